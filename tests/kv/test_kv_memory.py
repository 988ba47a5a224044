"""What is stored, where, and in how many bytes: the precision rule seen from memory, and scratch that does not grow."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_world import Part, decode_from, make_spec, make_stream, prefill, run
from torch.utils._python_dispatch import TorchDispatchMode

from kakera.kv.cache import KVCache
from kakera.plan.kv_format import KvFormat

INT2 = KvFormat("int2", 32, 2)
SMALL = 1024  # bytes of constants: bit masks and weights of the fields


@pytest.mark.parametrize("page", range(8))
@pytest.mark.parametrize("how", ["prefill", "decode"])
def test_a_damaged_page_matters_only_beyond_sink_and_window(page: int, how: str) -> None:
    """448 tokens stored; the next query is on page 7, R = 2: pages 0 and 5 .. 7 are read in 16 bit."""
    spec = make_spec()
    stream = make_stream(spec, 449, 0, [4, 1, 6, 0, 3, 7, 2, 5])
    outputs = []
    for damage in (False, True):
        cache = KVCache(spec, INT2, 8, 1)
        run(cache, [Part(stream, 0, 448)])
        if damage and page < 7:
            index = [int(stream.pages[page])]
            codes, parameters = cache.store.read_pages(index)
            cache.store.write_pages(index, (codes ^ 255, parameters + 1))
        last = Part(stream, 448, 449)
        outputs += run(cache, [last]) if how == "prefill" else run(cache, decode=[last])
    assert torch.equal(*outputs) == (page in (0, 5, 6, 7))


def test_the_pool_takes_the_bytes_that_the_format_says() -> None:
    spec = make_spec(heads=12, kv_heads=2, head_dim=256, full=3)
    taken = {}
    for fmt in (KvFormat("int2", 256, 4), KvFormat("int2", 32, 1), KvFormat("bf16"), KvFormat("fp32")):
        held = KVCache(spec, fmt, 5, 3).bytes()
        assert held.pages == 5 * fmt.page_bytes(spec)
        assert held.ring + held.sink == 3 * fmt.slot_bytes(spec)
        taken[fmt.codec, fmt.group] = held.pages
    assert taken["int2", 256] <= 0.15 * taken["bf16", 256]


def tensors_of(thing: Any, seen: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Every tensor reachable from an object, by storage."""
    if isinstance(thing, torch.Tensor):
        seen[thing.untyped_storage().data_ptr()] = thing
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            tensors_of(item, seen)
    elif hasattr(thing, "__dict__"):
        for item in vars(thing).values():
            tensors_of(item, seen)
    return seen


def test_no_16_bit_copy_exists_outside_sink_and_window() -> None:
    spec = make_spec()
    cache = KVCache(spec, INT2, 40, 2)
    prefill(cache, make_stream(spec, 2000, 1, range(40)), [1024, 2000])
    inventory = tensors_of(cache, {}).values()
    held = cache.bytes()
    wide = [t for t in inventory if t.dtype in (torch.bfloat16, torch.float32)]
    allowed = held.ring + held.sink + held.scratch + held.rotation + SMALL
    assert sum(t.untyped_storage().nbytes() for t in wide) <= allowed
    total = sum(t.untyped_storage().nbytes() for t in inventory)
    assert total <= held.pages + allowed


class LargestTensor(TorchDispatchMode):
    """Records the largest storage that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_of(out, {}).values():
            if tensor.untyped_storage().nbytes() < POOL_BYTES:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


POOL_BYTES = 4_000_000  # below the pool's own storages, far above any temporary of the test


@pytest.mark.parametrize("codec", ["int2", "bf16"])
@pytest.mark.parametrize("how", ["prefill", "decode"])
def test_temporaries_do_not_grow_with_the_context(codec: str, how: str) -> None:
    spec = make_spec(heads=2, kv_heads=1, full=1)
    cache = KVCache(spec, replace(INT2, codec=codec), 2048, 1)
    for tensor in cache.store.page_tensors():
        tensor.zero_()
    assert max(t.untyped_storage().nbytes() for t in cache.store.page_tensors()) > POOL_BYTES
    largest = {}
    for context in (1024 * 4, 1024 * 16):
        stream = make_stream(spec, context, 2, range(256))
        with LargestTensor() as watch:
            if how == "prefill":
                run(cache, [Part(stream, context - 256, context)])
            else:
                decode_from(cache, stream, context - 1)
        largest[context] = watch.bytes
    assert largest[1024 * 16] <= largest[1024 * 4]


def test_dense_codecs_keep_no_window_and_no_rotation() -> None:
    cache = KVCache(make_spec(), KvFormat("bf16"), 4, 2)
    held = cache.bytes()
    assert (held.ring, held.sink, held.rotation, held.scratch) == (0, 0, 0, 0)
    assert cache.store.window_pages == 0 and cache.store.save_sink(1).numel() == 0
