"""PagePool: the memory of page tensors, of which the last pages' can be given back to the card's driver for a while."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from kakera.ops.virtual_memory import Mapper, VirtualMemory
from kakera.plan.page_pool import PoolPart, PoolShape

log = logging.getLogger(__name__)
MakeMapper = Callable[[torch.device], Mapper]


class PagePool:
    """Tensors [layers, pages, ...] on one device. With a mapper each lies in memory that is mapped in chunks; without
    one, or where mapping fails, they are torch's, and nothing goes back."""

    def __init__(self, pages: int, device: torch.device, mapper: MakeMapper | None = None):
        self.pages, self.device = pages, device
        self.held = pages  # from the first on: those that have memory
        self._mapped: list[tuple[PoolPart, VirtualMemory]] = []
        self._mapper: Mapper | None = None
        if mapper is not None:
            try:
                self._mapper = mapper(device)
            except Exception as error:  # whatever it is (an old driver or old bindings): the engine serves without
                _say_plain(error)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised, as torch.empty."""
        part = PoolPart(shape[0], shape[1], math.prod(shape[2:]) * dtype.itemsize)
        if self._mapper is not None and part.bytes:
            try:
                memory = VirtualMemory(part.bytes, part.chunk, self._mapper)
                tensor = memory.tensor().view(dtype).view(shape)
            except Exception as error:  # as above
                _say_plain(error)
            else:
                self._mapped.append((part, memory))
                return tensor
        return torch.empty(shape, dtype=dtype, device=self.device)

    @property
    def shape(self) -> PoolShape:
        return PoolShape(self.pages, tuple(part for part, _ in self._mapped))

    @property
    def mapped_bytes(self) -> int:
        """That are held beside torch's allocator."""
        return sum(memory.held for _, memory in self._mapped)

    def hold(self, pages: int) -> int:
        """Give back the memory behind the first `pages` pages, or take it again; returns how many pages have theirs
        then, which are fewer only where the driver has no more. Nothing may use the others. What they held is lost:
        pages that come back are zeros."""
        held = [self._hold(part, memory, pages) for part, memory in self._mapped]
        there = min(held, default=pages)
        if there < pages:
            for part, memory in self._mapped:
                self._hold(part, memory, there)
        self.held = there
        return there

    def _hold(self, part: PoolPart, memory: VirtualMemory, pages: int) -> int:
        away = part.behind(pages)
        for first, last in away:
            memory.give_back(first, last)
        wanted = _between(part.chunks, away)
        if all(memory.take(first, last) for first, last in wanted):
            return pages
        holes = memory.holes()
        layer = part.pages * part.page_bytes
        return min(pages, *(begin % layer // part.page_bytes for begin, _ in holes)) if holes else pages

    def holes(self) -> dict[int, list[tuple[int, int]]]:
        """By address of a tensor's first byte, the bytes of it that must not be read."""
        return {memory.address: memory.holes() for _, memory in self._mapped}


def _between(chunks: int, away: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of all chunks without these runs, which are in order."""
    begins, ends = [0, *(last for _, last in away)], [*(first for first, _ in away), chunks]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]


def _say_plain(error: Exception) -> None:
    log.warning("the KV pages are ordinary memory, which is not given back while others need the card: %s", error)
