"""Page tensors whose last pages' memory goes back to the driver and comes again, over a driver that is not there."""

from __future__ import annotations

import random

import pytest
import torch

from fake_card import SPOILED, FakeMapper
from kakera.errors import KakeraError
from kakera.kv.pool import PagePool
from kakera.ops.virtual_memory import VirtualMemory

LAYERS, PAGES, WIDTH = 3, 100, 60_000  # 6 MB a layer: chunks do not end with pages, nor pages with layers
CPU = torch.device("cpu")


def pool_of(mapper: FakeMapper) -> tuple[PagePool, tuple[torch.Tensor, torch.Tensor]]:
    pool = PagePool(PAGES, CPU, mapper)
    tensors = pool.empty((LAYERS, PAGES, WIDTH), torch.uint8), pool.empty((LAYERS, PAGES, WIDTH // 4), torch.float16)
    for number, tensor in enumerate(tensors):
        for layer in range(LAYERS):
            for page in range(PAGES):
                tensor[layer, page] = (page + layer + number) % 100
    return pool, tensors


def assert_whole(tensors, pages: int) -> None:
    for number, tensor in enumerate(tensors):
        for layer in range(LAYERS):
            for page in range(pages):
                assert bool((tensor[layer, page] == (page + layer + number) % 100).all()), (number, layer, page)


def test_pages_that_stay_keep_their_bytes_and_the_driver_gets_what_was_told():
    pool, tensors = pool_of(mapper := FakeMapper())
    whole = mapper.used
    assert whole == pool.mapped_bytes >= sum(tensor.nbytes for tensor in tensors)
    random_ = random.Random(1)
    least = PAGES
    for pages in (90, 50, 51, 3, 60, *(random_.randrange(1, PAGES + 1) for _ in range(20)), 100):
        assert pool.hold(pages) == pages
        least = min(least, pages)
        assert whole - mapper.used == pool.shape.freed(pages), pages
        assert_whole(tensors, least)
        holes = pool.holes()
        for tensor in tensors:
            flat = tensor.view(-1).view(torch.uint8)
            assert all(bool((flat[begin:end] == SPOILED).all()) for begin, end in holes[tensor.data_ptr()])
    assert mapper.used == whole and not any(pool.holes().values())


@pytest.mark.parametrize("missing", range(0, 12, 2))
def test_where_the_driver_has_no_more_as_many_pages_come_back_as_there_is_memory_for(missing):
    pool, tensors = pool_of(mapper := FakeMapper())
    whole = mapper.used
    pool.hold(10)
    mapper.room = whole - missing * 2**20
    there = pool.hold(PAGES)
    assert 10 <= there <= PAGES and (there == PAGES) == (missing == 0)
    assert mapper.used <= mapper.room and whole - mapper.used == pool.shape.freed(there)
    for tensor in tensors:
        tensor[:, :there] = 1
    mapper.room = whole
    assert pool.hold(PAGES) == PAGES


def test_memory_that_can_not_be_mapped_is_ordinary_memory(caplog):
    def none(device: torch.device) -> FakeMapper:
        raise KakeraError("the driver maps no memory")

    small = FakeMapper(room=4 * 2**20)
    for mapper, why in ((none, "maps no memory"), (small, "0.02 GB of memory to map")):
        caplog.clear()
        pool = PagePool(PAGES, CPU, mapper)
        tensor = pool.empty((LAYERS, PAGES, WIDTH), torch.uint8)
        assert tensor.shape == (LAYERS, PAGES, WIDTH) and pool.mapped_bytes == 0 and pool.hold(5) == 5
        assert why in caplog.text and pool.shape.freed(1) == 0
    assert not small.mapped and not small.reserved, "what was taken on the way went back"
    assert not PagePool(4, CPU).holes()


def test_memory_goes_back_with_its_last_user():
    mapper = FakeMapper()
    memory = VirtualMemory(5 * 2**20, 2 * 2**20, mapper)
    memory.give_back(1, 2)
    assert mapper.used == memory.held == 4 * 2**20 and memory.holes() == [(2 * 2**20, 4 * 2**20)]
    del memory
    assert not mapper.mapped and not mapper.reserved
    with pytest.raises(KakeraError, match="multiples of"):
        VirtualMemory(10**6, 10**6, mapper)
