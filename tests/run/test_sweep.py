"""What an engine holds for good is read piece by piece, under the names of a plan."""

from __future__ import annotations

import pytest
import torch
from run_world import World

from kakera.contract.events import RegionRead
from kakera.run import sweep as module
from kakera.run.regions import PAGES, STATES, WEIGHTS
from kakera.run.sweep import sweep

KIB = 1024


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE", 64 * KIB)
    monkeypatch.setattr(module, "LEAST", 4 * KIB)


def test_all_of_an_engine_is_read(tiny_model):
    world = World.build(tiny_model)
    regions = world.engine.runner.regions()
    storages = [storage.data_ptr() for found in regions.values() for storage in found]
    assert len(storages) == len(set(storages))
    reads = world.engine.sweep()
    for name in (PAGES, STATES, WEIGHTS):
        held = sum(storage.nbytes() for storage in regions[name])
        mine = [read for read in reads if read.region == name]
        assert sum(read.bytes for read in mine) > 0.9 * held
        assert all(read.bytes <= 64 * KIB and len(read.seconds) == 2 and min(read.seconds) > 0 for read in mine)
        ends = [read.offset + read.bytes for read in mine]
        assert ends[-1] <= held and all(a <= b.offset for a, b in zip(ends, mine[1:], strict=False))


def test_pieces_and_rounds_of_one_storage():
    """160 KiB and 6 bytes beside 1 KiB: three pieces, whose bytes are those of the storage; the small one is left out,
    and counts in the offsets of what comes behind it."""
    values = torch.arange(40 * KIB + 1, dtype=torch.int32)
    small, large = (
        torch.zeros(KIB, dtype=torch.uint8),
        torch.cat([values.view(torch.uint8), torch.zeros(2, dtype=torch.uint8)]),
    )
    rounds = []

    def timer(pieces):
        rounds.append([int(piece.sum()) for piece in pieces])
        return [0.25 * len(rounds) + i for i in range(len(pieces))]

    storages = (small.untyped_storage(), large.untyped_storage())
    found = sweep({"weights": storages, "nothing": ()}, torch.device("cpu"), timer)
    sizes = [(KIB, 64 * KIB), (65 * KIB, 64 * KIB), (129 * KIB, 32 * KIB + 4)]
    assert found == [RegionRead("weights", at, size, (0.25 + i, 0.5 + i)) for i, (at, size) in enumerate(sizes)]
    assert rounds[0] == rounds[1] and sum(rounds[0]) == int(values.sum())


def test_what_has_no_memory_is_not_read_and_counts_in_the_offsets():
    values = torch.arange(40 * KIB, dtype=torch.int32)
    storage = values.untyped_storage()
    holes = {storage.data_ptr(): [(0, 8 * KIB), (16 * KIB, 80 * KIB), (156 * KIB, 160 * KIB)]}
    pieces = []

    def timer(read):
        pieces[:] = [(int(words[0]), words.nbytes) for words in read]
        return [1.0] * len(read)

    found = sweep({"KV pages": (storage,)}, torch.device("cpu"), timer, holes)
    assert [(read.offset, read.bytes) for read in found] == [
        (8 * KIB, 8 * KIB),
        (80 * KIB, 64 * KIB),
        (144 * KIB, 12 * KIB),
    ]
    assert pieces == [(2 * KIB, 8 * KIB), (20 * KIB, 64 * KIB), (36 * KIB, 12 * KIB)]
