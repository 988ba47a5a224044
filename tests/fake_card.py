"""A card that is not there: a driver's mapping calls over ordinary memory, and another program beside it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kakera.errors import KakeraError

SPOILED = 0xFF  # as fp16 and bf16: not a number


class FakeMapper:
    """Knows what is mapped, has an end, and spoils what is given back. `room`: bytes that can be mapped."""

    def __init__(self, room: int = 10**12, granularity: int = 2 * 2**20) -> None:
        self.room, self.granularity = room, granularity
        self.mapped: dict[int, int] = {}
        self.reserved: dict[int, Tensor] = {}

    def __call__(self, device: torch.device) -> FakeMapper:
        return self

    @property
    def used(self) -> int:
        return sum(self.mapped.values())

    def reserve(self, size: int) -> int:
        memory = torch.from_numpy(np.full(size, SPOILED, np.uint8))  # whose storage can not be resized, as mapped ones
        self.reserved[memory.data_ptr()] = memory
        return memory.data_ptr()

    def map(self, address: int, size: int) -> None:
        assert address not in self.mapped and size % self.granularity == 0
        if self.used + size > self.room:
            raise KakeraError("out of memory")
        self.mapped[address] = size
        self._fill(address, size, 0)

    def unmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size
        self._fill(address, size, SPOILED)

    def _fill(self, address: int, size: int, value: int) -> None:
        base = max(start for start in self.reserved if start <= address)
        self.reserved[base][address - base : address - base + size] = value

    def release(self, address: int, size: int) -> None:
        del self.reserved[address]

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        return self.reserved[address][:size]


class FakeCard(FakeMapper):
    """`others`: bytes of another program. It has room for anything until it is `filled`."""

    def __init__(self) -> None:
        super().__init__(granularity=4096)
        self.others, self.margin, self.seconds, self.looks = 0, 0, 0.0, 0
        self.least_used = 0

    def filled(self) -> None:
        """The plan has all but its margin, a quarter of what is used now."""
        self.margin, self.least_used = self.used // 4, self.used
        self.room = self.used + self.margin

    def clock(self) -> float:
        return self.seconds

    def free(self) -> int:
        self.looks += 1
        return self.room - self.used - self.others

    def unmap(self, address: int, size: int) -> None:
        super().unmap(address, size)
        self.least_used = min(self.least_used, self.used)
