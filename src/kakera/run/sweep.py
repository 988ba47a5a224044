"""Timed reads of all memory that an engine holds for good. What lies on the host is read over the bus: several times
slower than the rest, whatever a driver says about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from kakera.contract.events import RegionRead
from kakera.run.regions import Region
from kakera.target.as_torch import target_of

PIECE = 64 * 2**20  # bytes: 0.11 ms at 600 GB/s, 2.5 to 20 ms over a bus
LEAST = 4 * 2**20  # bytes of a piece: of less, a launch takes as long as a read over the bus. Left out
READS = 2  # of each piece, a whole round apart: the first touch counts, for the driver may bring memory back by it
AHEAD = 256  # reads that are launched before the first of them runs, so that none waits for its launch
HOLD_CYCLES = 40_000_000  # for which the device is kept busy meanwhile: 15 to 30 ms

Timer = Callable[[Sequence[Tensor]], list[float]]  # seconds of a read of each


@dataclass(frozen=True)
class _Piece:
    region: str
    offset: int
    words: Tensor  # int32, all of the piece

    def read(self, seconds: tuple[float, ...]) -> RegionRead:
        return RegionRead(self.region, self.offset, self.words.nbytes, seconds)


@torch.inference_mode()
def sweep(
    regions: Mapping[str, Region],
    device: torch.device,
    timer: Timer | None = None,
    holes: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({}),
) -> list[RegionRead]:
    """Read every storage in pieces, `READS` times; between steps only. Offsets count all bytes of a region, also those
    of storages that are too small to be read. 17 ms a round for 10 GB at 600 GB/s. `holes`: by a storage's address, the
    bytes (begin, end) that have been given back, in order."""
    timer = timer or (_on_card if target_of(device).has_cards else _on_host)
    pieces = [piece for name, storages in regions.items() for piece in _pieces(name, storages, device, holes)]
    rounds = [timer([piece.words for piece in pieces]) for _ in range(READS)]
    return [piece.read(seconds) for piece, seconds in zip(pieces, zip(*rounds, strict=True), strict=True)]


def _pieces(
    name: str, storages: Region, device: torch.device, holes: Mapping[int, Sequence[tuple[int, int]]]
) -> Iterator[_Piece]:
    offset = 0
    for storage in storages:
        size = storage.nbytes()
        for begin, end in _without(size, holes.get(storage.data_ptr(), ())):
            for start in range(begin, end, PIECE):
                words = (min(PIECE, end - start)) // 4
                if 4 * words >= LEAST:
                    view = torch.empty(0, dtype=torch.int32, device=device).set_(storage, start // 4, (words,), (1,))
                    yield _Piece(name, offset + start, view)
        offset += size


def _without(size: int, holes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of `size` bytes. Holes begin on multiples of 4."""
    begins, ends = [0, *(end for _, end in holes)], [*(begin for begin, _ in holes), size]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]


def _on_host(pieces: Sequence[Tensor]) -> list[float]:
    found = []
    for words in pieces:
        began = time.perf_counter()
        words.sum()
        found.append(time.perf_counter() - began)
    return found


def _on_card(pieces: Sequence[Tensor]) -> list[float]:
    found: list[float] = []
    for first in range(0, len(pieces), AHEAD):
        batch = pieces[first : first + AHEAD]
        torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(batch) + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for words, mark in zip(batch, marks[1:], strict=True):
            words.sum()
            mark.record()
        torch.cuda.synchronize()
        found += [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
    return found
