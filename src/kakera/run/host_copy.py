"""HostCopy: storages of a device moved to ordinary memory of the host, and back.

Pinned memory is copied to in one piece, but to get it takes 0.6 s a GB (`store/pinned.py`), and WSL2 gives little of
it. So a few threads copy through a small pinned buffer each: while one waits for the bus, others copy on the host.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

PIECE = 8 * 2**20  # bytes: 0.16 ms at 50 GB/s, long beside the 20 us that a wait takes
LANES = min(16, os.cpu_count() or 1)  # threads: one copies 2 to 4 GB a second into memory that it touches first
ALIGNED = 64

_Piece = tuple[Tensor, Tensor]  # the same bytes: in the host's memory, on the device


class HostCopy:
    """Holds what the storages hold when it is made, in `bytes` of the host's memory. Raises OSError if there is none.

    Storages, and the tensors that view them, stay the same objects when they are emptied and filled again.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage]):
        self._places: list[tuple[torch.UntypedStorage, int, int]] = []
        end = 0
        for storage in storages:
            self._places.append((storage, end, storage.nbytes()))
            end += -(-storage.nbytes() // ALIGNED) * ALIGNED
        self.bytes = end
        if end:
            memory = mmap.mmap(-1, end)
            with contextlib.suppress(AttributeError, OSError):  # a kernel without; pages of 4 KB take longer to come
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._memory_B = torch.frombuffer(memory, dtype=torch.uint8)
            self._copy(to_host=True)

    def empty(self) -> None:
        """Free the storages' memory. Nothing may be computing with them."""
        for storage, _, _ in self._places:
            storage.resize_(0)

    def bring_back(self) -> None:
        """The storages get memory and what they held. Raises RuntimeError if the device has none."""
        for storage, _, size in self._places:
            storage.resize_(size)
        if self.bytes:
            self._copy(to_host=False)

    def _copy(self, to_host: bool) -> None:
        pieces = self._pieces()
        if pieces and pieces[0][1].is_cuda:
            torch.cuda.synchronize()  # memory that was just given may still be in use by what was queued before
        with ThreadPoolExecutor(LANES) as lanes:
            list(lanes.map(_copy_lane, [pieces[i::LANES] for i in range(LANES)], [to_host] * LANES))

    @torch.inference_mode()
    def _pieces(self) -> list[_Piece]:
        found = []
        for storage, begin, size in self._places:
            for start in range(0, size, PIECE):
                host_B = self._memory_B[begin + start : begin + min(size, start + PIECE)]
                found.append((host_B, bytes_of(storage)[start : start + PIECE]))
        return found


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


@torch.inference_mode()
def _copy_lane(pieces: Sequence[_Piece], to_host: bool) -> None:
    """One thread's share. Returns when all of it has arrived."""
    if not pieces or not pieces[0][1].is_cuda:
        for host_B, device_B in pieces:
            to_B, from_B = (host_B, device_B) if to_host else (device_B, host_B)
            to_B.copy_(from_B)
        return
    buffer_B = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(pieces[0][1].device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for host_B, device_B in pieces:
            part_B = buffer_B[: len(host_B)]
            if to_host:
                part_B.copy_(device_B, non_blocking=True)
                stream.synchronize()
                np.copyto(host_B.numpy(), part_B.numpy())  # without the GIL, and without threads of its own
            else:
                np.copyto(part_B.numpy(), host_B.numpy())
                device_B.copy_(part_B, non_blocking=True)
                stream.synchronize()
