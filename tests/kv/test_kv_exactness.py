"""Equal bits: any chunking, alone or in a batch, cold or restored, and whatever lies in memory that is not used."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_world import Part, decode_from, make_spec, make_stream, new_checkpoint, prefill, run

from kakera.kv.cache import KVCache
from kakera.kv.store import Int2Store
from kakera.plan.kv_format import KvFormat

INT2 = KvFormat("int2", 32, 2)
CODECS = [INT2, KvFormat("bf16"), KvFormat("fp32")]
TABLE = [9, 3, 17, 0, 12, 5, 21, 8, 1, 14, 19, 2, 23, 7]


def new_cache(fmt: KvFormat = INT2, slots: int = 3, pages: int = 48) -> KVCache:
    """A cache whose memory is full of NaN, as memory that another request left behind may be."""
    cache = KVCache(make_spec(), fmt, pages, slots)
    poison(cache)
    return cache


def poison(cache: KVCache) -> None:
    stores = [*cache.store.page_tensors(), *cache.backend.scratch()]
    if isinstance(cache.store, Int2Store):
        stores += [cache.store.recent.ring, cache.store.recent.sink]
    for tensor in stores:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 255)


@pytest.mark.parametrize("fmt", CODECS, ids=lambda fmt: fmt.codec)
@settings(max_examples=6)
@given(st.sets(st.integers(1, 12)), st.sampled_from([833, 832, 805]))
def test_chunked_prefill_equals_unchunked(fmt: KvFormat, cuts: set[int], length: int) -> None:
    stream = make_stream(make_spec(), length, 0, TABLE)
    whole = prefill(new_cache(fmt), stream, [length])
    cut = prefill(new_cache(fmt), stream, [*(64 * c for c in sorted(cuts) if 64 * c < length), length])
    assert whole.isfinite().all() and torch.equal(whole, cut)


def test_chunked_prefill_equals_unchunked_at_full_head_size() -> None:
    """256 dims and 6 heads a group: other matrix kernels than those of the small shapes."""
    spec, fmt = make_spec(heads=12, kv_heads=2, head_dim=256, full=1), KvFormat("int2", 256, 4)
    stream = make_stream(spec, 840, 1, TABLE)
    whole = prefill(KVCache(spec, fmt, 24, 1), stream, [840])
    for cuts in ([64, 832, 840], [512, 576, 840], [*range(64, 840, 64), 840]):
        assert torch.equal(whole, prefill(KVCache(spec, fmt, 24, 1), stream, cuts))


@pytest.mark.parametrize("fmt", CODECS, ids=lambda fmt: fmt.codec)
def test_a_row_is_the_same_alone_and_in_any_company(fmt: KvFormat) -> None:
    spec = make_spec()
    one = make_stream(spec, 400, 1, TABLE, slot=2)
    two = make_stream(spec, 300, 2, range(24, 48), slot=0)
    three = make_stream(spec, 3, 3, [11], slot=1)
    alone = new_cache(fmt)
    wanted = [run(alone, [Part(one, 0, 384)])[0]] + [run(alone, decode=[Part(one, t, t + 1)])[0] for t in (384, 385)]
    mixed = new_cache(fmt)
    run(mixed, [Part(two, 0, 256)])
    first = run(mixed, [Part(three, 0, 2), Part(one, 0, 384)], [Part(two, 256, 257)])[2]
    second = run(mixed, decode=[Part(two, 257, 258), Part(one, 384, 385), Part(three, 2, 3)])[1]
    third = run(mixed, decode=[Part(one, 385, 386), Part(two, 258, 259)])[0]
    for a, b in zip(wanted, (first, second, third), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tokens_per_row", [2, 5, 64])
@pytest.mark.parametrize("fmt", CODECS, ids=lambda fmt: fmt.codec)
def test_rows_of_several_tokens_across_page_borders(fmt: KvFormat, tokens_per_row: int) -> None:
    stream = make_stream(make_spec(), 521, 4, TABLE)
    caches = [new_cache(fmt) for _ in range(2)]
    for cache in caches:
        run(cache, [Part(stream, 0, 448)])
    steps = [decode_from(cache, stream, 448, count) for cache, count in zip(caches, (1, tokens_per_row), strict=True)]
    assert steps[0].isfinite().all() and torch.equal(*steps)


def test_decode_agrees_with_prefill() -> None:
    stream = make_stream(make_spec(), 560, 5, TABLE)
    cache = new_cache()
    wanted = prefill(cache, stream, [512, 560])
    got = decode_from(cache, stream, 512)
    assert (got - wanted[:, 512:]).abs().max() < 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("position", [64, 128, 192, 448, 768])
@pytest.mark.parametrize("chunk", [64, 320, 832])
def test_resuming_from_a_save_in_mid_chunk_equals_going_on(position: int, chunk: int) -> None:
    stream = make_stream(make_spec(), 820, 6, TABLE)
    cold = new_cache()
    saved = new_checkpoint(cold, position)
    outputs = []
    for start in range(0, 820, chunk):
        end = min(820, start + chunk)
        saves = (saved,) if start < position <= end else ()
        outputs += run(cold, [Part(stream, start, end, saves)])
    sink, pages = cold.store.save_sink(0), cold.store.read_pages(TABLE[: position // 64])
    warm = new_cache()
    moved = list(range(30, 30 + position // 64))  # the pages come back elsewhere, the request gets another slot
    warm.store.write_pages(moved, pages)
    warm.store.load_sink(1, sink)
    warm.store.load_window(1, saved)
    resumed = make_stream(make_spec(), 820, 6, [*moved, *range(30 + position // 64, 48)], slot=1)
    got = run(warm, [Part(resumed, position, 820)])[0]
    assert got.isfinite().all() and torch.equal(got, torch.cat(outputs, 1)[:, position:])


@pytest.mark.parametrize("late", [0, 1, 63, 64])
def test_a_window_saved_from_the_ring_is_the_window_saved_on_the_way(late: int) -> None:
    """A running request is saved at its last page border, up to 64 tokens after it passed it."""
    stream = make_stream(make_spec(), 600, 7, TABLE)
    cache = new_cache()
    run(cache, [Part(stream, 0, 384)])
    on_the_way, later = new_checkpoint(cache, 448), new_checkpoint(cache, 448)
    for start in range(384, 448 + late, 4):
        end = min(start + 4, 448 + late)
        run(cache, decode=[Part(stream, start, end, (on_the_way,) if start < 448 <= end else ())])
    cache.store.save_window(0, later)
    assert on_the_way.window_k is not None and on_the_way.window_k.isfinite().all()
    assert torch.equal(on_the_way.window_k, later.window_k) and torch.equal(on_the_way.window_v, later.window_v)
    fresh = new_cache()
    fresh.store.load_window(2, later)
    again = new_checkpoint(fresh, 448)
    fresh.store.save_window(2, again)
    assert torch.equal(again.window_k, later.window_k) and torch.equal(again.window_v, later.window_v)


def test_decode_goes_on_equally_after_a_restore() -> None:
    stream = make_stream(make_spec(), 480, 8, TABLE)
    cold = new_cache()
    saved = new_checkpoint(cold, 448)
    run(cold, [Part(stream, 0, 448, (saved,))])
    warm = new_cache()
    warm.store.write_pages(TABLE[:7], cold.store.read_pages(TABLE[:7]))
    warm.store.load_sink(0, cold.store.save_sink(0))
    warm.store.load_window(0, saved)
    assert torch.equal(decode_from(cold, stream, 448), decode_from(warm, stream, 448))
