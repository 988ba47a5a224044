"""PrefixCache on its own: matching and its reasons, transactions, host memory, and the order of actions."""

import pytest

from kakera.cache.host import CacheSizes
from kakera.cache.integrity import check_integrity
from kakera.cache.keys import page_keys
from kakera.cache.match import Match
from kakera.cache.prefix import PrefixCache
from kakera.contract.grid import PAGE
from kakera.contract.step import DemotePages, Drop, PromotePages, ResetSlot, RestoreCheckpoint, SaveSink


def make(pages=16, host=1000, windowed=True, per_path=16):
    return PrefixCache(CacheSizes(pages, host, 100, 20, 5, windowed), per_path)


def text(count, seed=0):
    return [seed * 1000 + i % 997 for i in range(count)]


def serve(cache, tokens, saves=(), salt=b"", slot=0):
    """One request that computes `tokens` in a single step; returns its match."""
    keys = page_keys(tokens, salt)
    match = cache.match(keys, len(tokens))
    lease = cache.acquire(match, len(tokens) // PAGE + 1, slot)
    cache.reserve(lease, [save for save in saves if save[0] > match.position])
    check_integrity(cache)
    cache.extend(lease, keys, len(keys))
    cache.publish(lease)
    check_integrity(cache)
    cache.release(lease)
    check_integrity(cache)
    return match


def reason(cache, tokens, salt=b""):
    return cache.match(page_keys(tokens, salt), len(tokens)).reason


def test_match_needs_a_checkpoint_and_leaves_a_token_to_compute():
    cache = make()
    tokens = text(4 * PAGE)
    serve(cache, tokens, [(128, "message"), (256, "rolling")])
    match = cache.match(page_keys(tokens), 256)
    assert (match.position, match.kv_position) == (128, 192)
    assert cache.match(page_keys(tokens), 257).position == 256


def test_every_miss_has_its_reason():
    cache = make()
    tokens = text(300)
    assert reason(cache, tokens) == "cold"
    assert reason(cache, tokens[:64]) == "shorter than a page"
    serve(cache, tokens)
    assert reason(cache, tokens) == "no checkpoint on the shared prefix"
    serve(cache, tokens, [(128, "branch"), (256, "message")])
    assert reason(cache, tokens) == ""
    assert reason(cache, tokens[:256] + text(200, seed=1)) == ""  # all that is known is used
    other = cache.match(page_keys(tokens[:140] + text(200, seed=1)), 340)
    assert other.explain() == "diverged at token 140" and other.position == 128
    assert reason(cache, tokens, salt=b"other") == "cold"
    cache._residency.lose_checkpoint(cache.match(page_keys(tokens), 300).checkpoint)
    assert reason(cache, tokens) == "evicted checkpoint"
    serve(cache, text(16 * PAGE - 1, seed=2))
    cache.host.limit = 0  # demoted pages can not stay either
    cache._residency.free_host("system", "page")
    assert reason(cache, tokens) == "evicted pages"


def test_acquire_changes_nothing_if_the_pages_do_not_fit():
    cache = make(pages=4)
    tokens = text(200)
    serve(cache, tokens, [(128, "message")])
    cache.take_actions()
    match = cache.match(page_keys(tokens), 200)
    assert cache.acquire(match, 5, slot=0) is None
    assert cache.acquire(match, 4, slot=0, headroom=1) is None
    assert cache.take_actions() == () and cache.available == 4 and not cache.leases
    check_integrity(cache)
    assert cache.acquire(match, 4, slot=0) is not None


def test_demotion_precedes_reuse_and_promotion_precedes_the_drop_of_the_host_copy():
    cache = make(pages=4)
    tokens = text(3 * PAGE + 1)
    serve(cache, tokens, [(192, "message")])
    assert cache.take_actions() == (ResetSlot(0),)
    serve(cache, text(4 * PAGE - 1, seed=1))
    demote, reset = cache.take_actions()
    assert isinstance(demote, DemotePages) and isinstance(reset, ResetSlot)
    assert len(demote.pairs) == 3
    serve(cache, tokens)
    promote, drop, restore = cache.take_actions()  # the other text led to no checkpoint: its pages just go
    assert isinstance(promote, PromotePages) and isinstance(drop, Drop) and isinstance(restore, RestoreCheckpoint)
    assert set(drop.host_pages) == {host for host, _ in promote.pairs} == {host for _, host in demote.pairs}
    assert restore.position == 192 and restore.sink is not None


def test_a_pinned_checkpoint_is_not_evicted_until_its_restore_is_committed():
    cache = make(host=120)
    tokens = text(130)
    serve(cache, tokens, [(128, "message")])
    keys = page_keys(tokens)
    lease = cache.acquire(cache.match(keys, 130), 3, slot=0)
    assert not cache._residency.free_host("system", "checkpoint")
    cache.extend(lease, keys, 2)
    assert cache._residency.free_host("system", "checkpoint")
    cache.release(lease)
    check_integrity(cache)


def test_forfeited_saves_are_dropped_and_their_bytes_return():
    cache = make()
    lease = cache.acquire(Match(), 3, slot=2)
    (point,) = cache.reserve(lease, [(64, "message")])
    (sink,) = cache.sink_actions()
    assert isinstance(sink, SaveSink) and sink.slot == 2 and cache.host.used == 120
    cache.take_actions()
    cache.forfeit(lease)
    assert cache.take_actions() == (Drop(checkpoints=(point.checkpoint,), sinks=(sink.sink,)),)
    assert cache.host.used == 0
    cache.release(lease)
    check_integrity(cache)


def test_release_returns_what_was_reserved_too():
    cache = make()
    lease = cache.acquire(Match(), 3, slot=0)
    cache.reserve(lease, [(64, "message"), (128, "message")])
    cache.release(lease)
    check_integrity(cache)
    assert cache.host.used == 0 and cache.device.free == 16


def test_the_best_save_points_get_the_last_bytes():
    cache = make(host=2 * 100 + 20)
    lease = cache.acquire(Match(), 5, slot=0)
    points = cache.reserve(lease, [(64, "grid"), (128, "system"), (192, "grid"), (256, "message")])
    assert [point.position for point in points] == [128, 256]
    assert cache.counters["checkpoints_not_saved"] == 2


def test_a_second_save_at_one_place_is_dropped_and_lends_its_kind():
    cache = make()
    tokens = text(130)
    serve(cache, tokens, [(128, "grid")])
    keys = page_keys(tokens)
    lease = cache.acquire(Match(reason="not used"), 3, slot=0)  # as an echo request does: no match used
    cache.reserve(lease, [(128, "system")])
    cache.extend(lease, keys, 2)
    cache.publish(lease)
    assert [record.kind for record in cache.checkpoints.published.values()] == ["system"]
    cache.release(lease)
    check_integrity(cache)


def test_the_cap_holds_along_a_path():
    cache = make(pages=64, host=10_000, per_path=4)
    tokens = text(40 * PAGE)
    lease = cache.acquire(Match(), 40, slot=0)
    keys = page_keys(tokens)
    for depth in range(1, 40):
        cache.reserve(lease, [(depth * PAGE, "message")])
        cache.extend(lease, keys, depth)
        cache.publish(lease)
        check_integrity(cache)
    assert len(cache.checkpoints.published) == 4
    positions = sorted(record.position for record in cache.checkpoints.published.values())
    assert positions[-1] == 39 * PAGE and positions[0] < 30 * PAGE
    cache.release(lease)


def test_equal_pages_computed_twice_are_kept_once():
    cache = make(pages=8)
    tokens = text(200)
    serve(cache, tokens)
    serve(cache, tokens)
    assert cache.device.free == 8 - 3


@pytest.mark.parametrize("windowed", [True, False])
def test_sinks_exist_for_windowed_codecs_only(windowed):
    cache = make(windowed=windowed)
    serve(cache, text(130), [(128, "message")])
    assert cache.host.counts["sink"] == int(windowed)


def test_pages_that_an_import_from_the_disk_stands_on_may_go():
    cache = make(pages=8, host=231)
    serve(cache, text(129), [(128, "message")])
    keys = page_keys(text(257))
    begun = cache.imports.begin(keys, 4, cache.match(keys, 257).checkpoint)
    assert begun is not None and not cache.host.fits("page")
    serve(cache, text(449, seed=7))  # takes the whole device
    assert not cache.imports.end(begun.job, whole=True)
    check_integrity(cache)
    assert (cache.host.used, reason(cache, text(257))) == (0, "evicted pages")
