"""What the Python side hands to the kernel that reads rows from host memory: the right addresses, and rows in the form
that it knows. Driver and kernel are stand-ins; the kernel itself is in test_host_rows_cuda.py."""

from __future__ import annotations

import contextlib
import ctypes
import gc

import pytest
import torch

from kakera.errors import KakeraError
from kakera.ops import host_rows
from kakera.ops.host_rows import HostRows, host_rows_reference

CPU = torch.device("cpu")


class Kernel:
    """What host_rows.cu does, from the addresses of its argument."""

    def __init__(self, name: str, threads: int, defines: tuple[str, ...], device: int):
        self.coded, self.dtype = "CODED" in defines, torch.bfloat16 if "BF16" in defines else torch.float16

    def launch(self, blocks: tuple[int, int], launch: host_rows._Launch) -> None:
        width, item = launch.channels, 1 if self.coded else 2
        for i in range(blocks[0]):
            token = ctypes.c_int64.from_address(launch.tokens + 8 * i).value
            row = bytearray((ctypes.c_char * (width * item)).from_address(launch.rows + token * width * item))
            if self.coded:
                scale = bytearray((ctypes.c_char * 2).from_address(launch.scale + 2 * token))
                q_1H, scale_1 = torch.frombuffer(row, dtype=torch.int8)[None], torch.frombuffer(scale, dtype=torch.half)
                y_1H = host_rows_reference(q_1H, scale_1, torch.tensor([0]), self.dtype)
                row = bytearray(y_1H.view(torch.uint8).numpy().tobytes())
            ctypes.memmove(launch.y + i * width * 2, bytes(row), width * 2)


@pytest.fixture
def driver(monkeypatch) -> list[tuple[str, int]]:
    """What was registered and given back: the card sees memory where the host does."""
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(host_rows.mapped, "register", lambda at, size: (calls.append(("pinned", size)), at)[1])
    monkeypatch.setattr(host_rows.mapped, "unregister", lambda at: calls.append(("given back", 0)))
    monkeypatch.setattr(host_rows, "kernel", Kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return calls


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("coded", [True, False])
def test_rows_come_from_the_registered_memory_which_is_given_back(driver, coded, dtype):
    rows_VH = torch.randint(-128, 128, (50, 32), dtype=torch.int8) if coded else torch.randn(50, 32).to(dtype)
    scale_V = torch.rand(50).half() if coded else None
    table = HostRows(rows_VH, scale_V, dtype, CPU)
    tokens_T = torch.tensor([0, 49, 7, 7], dtype=torch.int32)  # whose width the kernel does not know
    assert torch.equal(table(tokens_T), host_rows_reference(rows_VH, scale_V, tokens_T.long(), dtype))
    assert table(tokens_T[:0]).shape == (0, 32) and (table.dtype, table.device) == (dtype, CPU)
    del table
    gc.collect()
    assert driver == [("pinned", rows_VH.nbytes), ("given back", 0)]


def test_a_driver_that_refuses_is_told_with_the_way_out(driver, monkeypatch):
    def refuse(at: int, size: int) -> int:
        raise KakeraError("no more")

    monkeypatch.setattr(host_rows.mapped, "register", refuse)
    with pytest.raises(KakeraError, match="--embedding host: no more; --embedding device keeps it on the card"):
        HostRows(torch.zeros(8, 16, dtype=torch.half), None, torch.half, CPU)


def test_what_the_kernel_does_not_take_is_refused(driver):
    for rows_VH, scale_V, dtype, words in (
        (torch.zeros(8, 24).half(), None, torch.half, "can not be read"),
        (torch.zeros(8, 32), None, torch.float32, "can not be read"),
        (torch.zeros(8, 32).half(), None, torch.bfloat16, "without scales"),
        (torch.zeros(8, 32).half(), torch.ones(8).half(), torch.half, "with scales"),
    ):
        with pytest.raises(ValueError, match=words):
            HostRows(rows_VH, scale_V, dtype, CPU)
    assert driver == []
