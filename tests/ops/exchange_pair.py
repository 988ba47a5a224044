"""Two ranks of an exchange, a process and a card each: what both compute, and what one does without the other."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from kakera.ops.exchange import exchange_norm_reference
from kakera.ops.exchange_host import HostExchange, Layout, Segment

CHANNELS, DELTAS, SUMS, EPS = 5120, 64, 200, 1e-6


def run(rank: int, path: Path, rows: int, results) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    layout = Layout(rows, CHANNELS)
    ready = path.with_suffix(".ready")
    while rank and not ready.exists():
        time.sleep(0.01)
    segment = Segment(path, layout.total, create=rank == 0)
    ready.touch()
    exchange = HostExchange(segment, layout, rank, device)
    generator = torch.Generator().manual_seed(rows)
    begin = torch.randn(rows, CHANNELS, generator=generator).bfloat16().to(device)
    deltas = torch.randn(2, DELTAS, rows, CHANNELS, generator=generator).bfloat16().to(device)
    scale = torch.rand(CHANNELS, generator=generator).to(device)
    x, y = begin.clone(), torch.empty_like(begin)
    exchange.add_norm_into(begin, deltas[rank, 0], scale, EPS, x, y)  # loads the kernel, which a capture can not
    x.copy_(begin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(SUMS):
            exchange.add_norm_into(x, deltas[rank, i % DELTAS], scale, EPS, x, y)
    graph.replay()
    torch.cuda.synchronize()
    expected, normed = begin, y
    for i in range(SUMS):
        expected, normed = exchange_norm_reference(expected, list(deltas[:, i % DELTAS]), scale, EPS)
    same = torch.equal(x, expected)
    close = torch.allclose(y.float(), normed.float(), rtol=2**-7, atol=1e-3)
    healthy = exchange.failure
    seconds = 0.0
    if rank == 0:  # the other does not come any more
        began = time.perf_counter()
        exchange.add_norm(x, deltas[0, 0], scale, EPS)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    results.put((rank, same, close, healthy, seconds, exchange.failure if rank == 0 else ""))
    segment.close()
