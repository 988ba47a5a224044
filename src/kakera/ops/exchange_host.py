"""Sums over two cards without peer-to-peer: partial results cross through pinned host memory that both cards see.

Every row-parallel linear of a cut model is followed by a sum with the residual stream and its norm, so the exchange is
part of that launch (`cuda/exchange_norm.cu`, which has the protocol). `exchange.exchange_norm_reference` is what both
ranks compute. A `Segment` is one shared file; each rank maps it, registers it with its card and uses the alias that the
driver gives: it need not be the host's address.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kakera.ops import mapped
from kakera.ops.cuda.compiler import Kernel, kernel

THREADS, WARPS, EIGHT = 256, 8, 8
SLOTS = 2  # of a lane: see the proof in exchange_norm.cu
LINE_BYTES = 64
PAGE_BYTES = 4096
LIMIT_MICROSECONDS = 800_000  # Windows resets a card whose kernel runs for two seconds
ABORT, HUNG_EPOCH, HUNG_ROW = 0, 16, 17  # 32-bit words of the control page


@dataclass(frozen=True)
class Layout:
    """Places in a segment, in bytes: a control page, then for each rank its flags and its payload."""

    rows: int  # at most, of one exchange
    channels: int

    @property
    def flag_bytes(self) -> int:
        return SLOTS * self.rows * WARPS * LINE_BYTES

    @property
    def payload_bytes(self) -> int:
        return SLOTS * self.rows * self.channels * 2  # 16-bit values

    def flags(self, rank: int) -> int:
        return PAGE_BYTES + rank * self._rank_bytes

    def payload(self, rank: int) -> int:
        return self.flags(rank) + _up(self.flag_bytes)

    @property
    def total(self) -> int:
        return PAGE_BYTES + 2 * self._rank_bytes

    @property
    def _rank_bytes(self) -> int:
        return _up(self.flag_bytes) + _up(self.payload_bytes)


_KEPT: list[mmap.mmap] = []  # registered memory must stay mapped, whoever forgets its Segment


class Segment:
    """A file in shared memory, mapped by this process and registered with its current CUDA device.

    `address` is where the device sees its first byte. Raises KakeraError if the driver does not register it.
    """

    def __init__(self, path: Path, size: int, create: bool) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        handle = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(handle, 0, size)  # a full /dev/shm is an error here, not a signal later
            self._map = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        _KEPT.append(self._map)
        self._words = (ctypes.c_uint32 * (size // 4)).from_buffer(self._map)
        self._host = ctypes.addressof(self._words)
        self.address = mapped.register(self._host, size)

    def word(self, index: int) -> int:
        """A 32-bit word as the host sees it now."""
        return int(self._words[index])

    def set_word(self, index: int, value: int) -> None:
        self._words[index] = value

    def close(self) -> None:
        """No kernel may use it any more. Without it the memory is registered until the process ends: what lies at its
        address next could not be."""
        mapped.unregister(self._host)


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "delta", "scale", "sum", "y", "mine", "other")),
        *((name, ctypes.c_void_p) for name in ("my_flags", "other_flags", "epochs", "dead", "control")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("channels", "most_rows")),
        ("limit_us", ctypes.c_uint32),
    ]


class HostExchange:
    """One rank's side of two. All exchanges of a rank go through one stream at a time, in the same order on both ranks,
    with the same number of rows; the segment must be zero when both sides are made. `CardExchange` makes of it what a
    model needs."""

    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        rank: int,
        device: torch.device,
        limit_us: int = LIMIT_MICROSECONDS,
    ) -> None:
        self._segment = segment
        self._layout = layout
        self._epochs = torch.zeros(layout.rows * WARPS, dtype=torch.int32, device=device)
        self._dead = torch.zeros(1, dtype=torch.int32, device=device)
        at = segment.address
        self._launch = _Launch(
            mine=at + layout.payload(rank),
            other=at + layout.payload(1 - rank),
            my_flags=at + layout.flags(rank),
            other_flags=at + layout.flags(1 - rank),
            epochs=self._epochs.data_ptr(),
            dead=self._dead.data_ptr(),
            control=at,
            channels=layout.channels,
            most_rows=layout.rows,
            limit_us=limit_us,
        )

    @property
    def rows(self) -> int:
        """At most, of one exchange."""
        return self._layout.rows

    @property
    def channels(self) -> int:
        return self._layout.channels

    def add_norm(self, x_TH: Tensor, delta_TH: Tensor, scale_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x plus the partial sums of both ranks, and its RMS norm; what `exchange_norm_reference` gives, to the bit for
        the sum. If the other rank does not come, the outputs are not written and `failure` says so."""
        sum_TH, y_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
        self.add_norm_into(x_TH, delta_TH, scale_H, eps, sum_TH, y_TH)
        return sum_TH, y_TH

    def add_norm_into(
        self, x_TH: Tensor, delta_TH: Tensor, scale_H: Tensor, eps: float, sum_TH: Tensor, y_TH: Tensor
    ) -> None:
        """`add_norm` with its outputs given; `sum_TH` may be x itself."""
        rows, channels = x_TH.shape
        if rows > self._layout.rows or channels != self._layout.channels:
            raise ValueError(f"{rows} x {channels} values do not fit an exchange of {self._layout}")
        run = self._kernel(x_TH.dtype, x_TH.device)
        launch = self._launch
        launch.x, launch.delta, launch.scale = x_TH.data_ptr(), delta_TH.data_ptr(), scale_H.data_ptr()
        launch.sum, launch.y, launch.eps = sum_TH.data_ptr(), y_TH.data_ptr(), eps
        run.launch((rows, 1), launch, dependent=True)

    def load(self, dtype: torch.dtype) -> None:
        """Compile the kernel, or read it from the disk: the first exchange of `dtype` is then as fast as the next."""
        self._kernel(dtype, self._epochs.device)

    def _kernel(self, dtype: torch.dtype, device: torch.device) -> Kernel:
        defines = [f"VECTORS={-(-self._layout.channels // (EIGHT * THREADS))}"]
        defines += ["BF16"] if dtype == torch.bfloat16 else []
        return kernel("exchange_norm", THREADS, tuple(defines), device.index)

    def abort(self) -> None:
        """Have whoever waits, on either rank, leave within milliseconds."""
        self._segment.set_word(ABORT, 1)

    @property
    def failure(self) -> str:
        """What has gone wrong on either rank; "" if nothing has. Costs a read of host memory."""
        epoch = self._segment.word(HUNG_EPOCH)
        if epoch == 0:
            return ""
        why = "was given up" if self._segment.word(ABORT) else "waited too long"
        return f"exchange {epoch} of row {self._segment.word(HUNG_ROW)} {why}"


def _up(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
