"""A card that gets fuller: what goes back and when it comes again; who waits meanwhile, and that nobody is harmed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driver import Driver, answer, prose
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.plan.page_pool import GRANULE, PoolPart, PoolShape, chunk_bytes
from kakera.schedule.lending import STEADY_SECONDS, InUse, LendingRule, Reading

MB = 10**6
PARTS = (PoolPart(16, 2906, 32768), PoolPart(16, 2906, 2048))  # of the 27B with 186,000 tokens
POOL = PoolShape(2906, PARTS)
RULE = LendingRule(POOL, 4, 513 * MB, 128)


def after(rule: LendingRule, now: InUse, *readings: tuple[float, float]) -> InUse:
    """(MB free, seconds) one after the other."""
    for free, at in readings:
        now = rule.decide(now, Reading(int(free * MB), at))
    return now


@given(
    layers=st.integers(1, 5),
    pages=st.integers(1, 300),
    size=st.sampled_from([64, 4096, 33_000, 3 * 2**20]),
    kept=st.integers(0, 300),
)
def test_what_goes_back_holds_no_byte_of_pages_that_stay(layers, pages, size, kept):
    part, kept = PoolPart(layers, pages, size), min(kept, pages)
    away = {i for first, last in part.behind(kept) for i in range(first, last)}
    for layer in range(layers):
        first, end = layer * pages * size, (layer * pages + kept) * size
        assert not kept or away.isdisjoint(range(first // part.chunk, -(-end // part.chunk)))
    assert all(0 <= i < part.chunks for i in away)
    if kept == 0:
        assert len(away) == part.chunks or layers > 1
    assert not part.behind(pages)


def test_memory_behind_few_pages_goes_back_nearly_whole():
    assert POOL.freed(2906) == 0
    assert POOL.freed(1453) > 0.46 * sum(part.bytes for part in PARTS)
    assert chunk_bytes(10**9) == GRANULE and chunk_bytes(50 * 10**9) // GRANULE == 24


@given(least=st.integers(0, 2906), freed=st.integers(0, 3 * 10**9))
def test_as_many_pages_stay_as_can(least, freed):
    kept = POOL.most_kept(freed, least, 2906)
    assert least <= kept <= 2906
    assert kept == least or POOL.freed(kept) >= freed
    assert kept == 2906 or POOL.freed(kept + 1) < freed


def test_nothing_goes_before_half_of_the_margin_is_lost():
    whole = RULE.whole
    assert after(RULE, whole, (600, 0), (513, 1), (400, 2), (257, 3)) == whole
    less = after(RULE, whole, (256, 0))
    assert 256 + POOL.freed(less.pages) / MB >= 513 and POOL.freed(less.pages + 1) / MB < 513 - 256
    assert less.slots == 4 and after(RULE, whole, (0, 0)).slots < 4
    assert after(RULE, less, (513, 1), (400, 2), (257, 3)) == less, "and between the two nothing changes"


def test_what_comes_back_leaves_the_margin_and_has_been_free_for_a_while():
    less = after(RULE, RULE.whole, (0, 0))
    lent = POOL.freed(less.pages) / MB
    roomy = 513 + lent + 1
    waiting = after(RULE, less, (roomy, 5), (roomy, 5 + STEADY_SECONDS - 0.1))
    assert waiting.pages == less.pages
    assert after(RULE, waiting, (roomy, 5 + STEADY_SECONDS)) == RULE.whole
    assert after(RULE, waiting, (400, 15), (roomy, 15.5)).pages == less.pages, "a moment without room begins anew"
    some = after(RULE, less, (513 + lent / 2, 5), (513 + lent / 2, 20))
    assert less.pages < some.pages < 2906 and lent / 2 + 513 >= 513 + (lent - POOL.freed(some.pages) / MB)
    assert after(RULE, less, (513 + 20, 5), (513 + 20, 99)).pages == less.pages, "not a few pages every ten seconds"


def test_where_nothing_can_go_back_nothing_shrinks():
    rule = LendingRule(PoolShape(2906), 4, 513 * MB, 128)
    assert after(rule, rule.whole, (0, 0), (100, 1)) == rule.whole
    least = after(RULE, RULE.whole, (-9000, 0))
    assert least.pages == 128 and after(RULE, least, (0, 1)) == least


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 4000), st.sampled_from([0.5, 3.0, 11.0])), max_size=8))
def test_a_card_with_other_programs_never_wavers(others):
    """`others`: MB that they hold, for so many seconds. Where they rest, so does the engine."""
    now, at, total = RULE.whole, 0.0, 4100 * MB
    for held, seconds in [*others, (others[-1][0] if others else 0, 25.0)]:
        changes = []
        for _ in range(int(seconds / 0.5)):
            at += 0.5
            free = total - held * MB - (POOL.freed(RULE.least) - POOL.freed(now.pages))
            new = RULE.decide(now, Reading(free, at))
            assert RULE.least <= new.pages <= POOL.pages and 1 <= new.slots <= RULE.slots
            if new.pages != now.pages:
                changes.append(new.pages)
                more = POOL.freed(new.pages) - POOL.freed(now.pages)
                assert free < RULE.margin // 2 if more > 0 else free + more >= RULE.margin
            now = new
        assert len(changes) <= 2, "one step down, or one up behind it"
    if now.pages < POOL.pages:
        assert free < RULE.margin + POOL.freed(now.pages)


def test_a_request_that_needs_lent_pages_waits_and_others_pass_it():
    driver = Driver(pages=40, slots=4)
    assert driver.resize(10, 4) == 10
    long, short = driver.submit(prose(1200, seed=1)), driver.submit(prose(100, seed=2))
    while driver.step():
        pass
    stats = driver.scheduler.stats()
    assert short in driver.finished and long not in driver.finished
    assert (stats.held_back, stats.pages_lent, stats.idle, stats.pages_used) == (1, 30, True, 0)
    assert driver.resize(40, 4) == 40
    driver.run()
    assert driver.finished[long].reason == "length" and driver.text[long] == answer(prose(1200, seed=1), 4)
    driver.assert_idle_is_clean()


@pytest.mark.parametrize(("room", "there"), [(2048, 15), (100, 11)])
def test_running_requests_keep_their_pages_and_some_more_and_one_that_outgrows_them_goes_on_later(room, there):
    driver = Driver(pages=40, slots=4)
    driver.scheduler.limits = replace(driver.scheduler.limits, room=room)
    prompt = prose(600, seed=3)
    name = driver.submit(prompt, max_tokens=300)
    for _ in range(5):
        driver.step()
    assert driver.resize(1, 1) == there
    while driver.step():
        pass
    stays = room > 300
    assert (name in driver.finished) == stays and driver.scheduler.stats().held_back == 1 - stays
    assert len(driver.text[name]) == 300 if stays else 100 < len(driver.text[name]) < 200
    driver.resize(40, 4)
    driver.run()
    assert driver.text[name] == answer(prompt, 300) and driver.finished[name].reason == "length"


def test_pages_in_use_move_to_the_front_and_cached_ones_to_the_host():
    driver = Driver(pages=30, slots=4)
    driver.ask(prose(700, seed=1))
    name = driver.submit(prose(500, seed=2), max_tokens=100)
    for _ in range(3):
        driver.step()
    assert max(driver.cache.device.held) >= 12
    assert driver.resize(12, 4) == 12
    assert driver.cache.counters["pages_demoted"] > 0
    driver.run()
    assert driver.text[name] == answer(prose(500, seed=2), 100)
    driver.resize(30, 4)
    assert driver.cached(prose(700, seed=1) + prose(64, seed=9)) > 0
    driver.assert_idle_is_clean()


@pytest.mark.parametrize("slots", [1, 2])
def test_fewer_requests_are_admitted_and_those_that_run_stay(slots):
    driver = Driver(pages=100, slots=4)
    names = [driver.submit(prose(100, seed=i), max_tokens=30) for i in range(6)]
    driver.step()
    assert len(driver.scheduler.running) == 4
    driver.resize(60, slots)
    most = 4
    while driver.step():
        running = len(driver.scheduler.running)
        assert running <= max(slots, most)
        most = running
    assert driver.finished.keys() == set(names)
    assert all(driver.text[name] == answer(prose(100, seed=i), 30) for i, name in enumerate(names))
