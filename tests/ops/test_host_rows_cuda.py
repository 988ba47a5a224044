"""Rows that a kernel reads from host memory are those of the reference to the bit, in a graph too. Needs a GPU."""

from __future__ import annotations

import gc

import pytest
import torch

from kakera.ops.host_rows import HostRows, host_rows_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA = torch.device("cuda", 0)


def table(rows: int, channels: int, coded: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(rows)
    if not coded:
        return torch.randn(rows, channels, generator=generator).to(dtype), None
    q_VH = torch.randint(-128, 128, (rows, channels), dtype=torch.int8, generator=generator)
    return q_VH, (torch.rand(rows, generator=generator) * 0.1).half()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize(("rows", "channels"), [(8, 16), (1000, 512), (4099, 5120)])
def test_rows_are_those_of_the_reference(rows, channels, coded, dtype):
    held = table(rows, channels, coded, dtype)
    lookup = HostRows(*held, dtype, CUDA)
    for count in (1, 3, 8, 2500):
        tokens_T = torch.randint(0, rows, (count,))
        tokens_T[-1] = rows - 1
        assert torch.equal(lookup(tokens_T.cuda()).cpu(), host_rows_reference(*held, tokens_T, dtype))
    assert lookup(torch.empty(0, dtype=torch.int64, device=CUDA)).shape == (0, channels)
    wrong_T = torch.tensor([-1, rows, 2**40], device=CUDA)  # never other memory of the host
    expected = host_rows_reference(*held, torch.tensor([0, rows - 1, rows - 1]), dtype)
    assert torch.equal(lookup(wrong_T).cpu(), expected)


def test_a_graph_reads_what_its_tokens_are_now_and_memory_is_given_back():
    for _ in range(3):  # the same addresses are registered again
        held = table(1000, 512, True, torch.bfloat16)
        lookup = HostRows(*held, torch.bfloat16, CUDA)
        tokens_T = torch.zeros(4, dtype=torch.int64, device=CUDA)
        lookup(tokens_T)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y_TH = lookup(tokens_T)
        wanted_T = torch.tensor([999, 0, 17, 500])
        tokens_T.copy_(wanted_T)
        graph.replay()
        assert torch.equal(y_TH.cpu(), host_rows_reference(*held, wanted_T, torch.bfloat16))
        del graph, lookup, held
        gc.collect()
