"""A rank of a model that two processes share on NVIDIA GPUs: a card each, or both on the only one, by turns."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kakera.kv.batch import Batch, Span
from kakera.kv.cache import KVCache
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.ops.exchange import ALONE, Exchange
from kakera.ops.exchange_cards import CardExchange
from kakera.ops.exchange_host import HostExchange, Layout, Segment
from kakera.plan.kv_format import KvFormat

PROMPT, STEPS, ROWS = 150, 8, 64
PATIENCE_US = 120_000_000  # the other rank compiles kernels in the first pass


class Hosts:
    """Processes that meet at a barrier."""

    def __init__(self, barrier: Any):
        self._barrier = barrier

    def meet(self) -> None:
        self._barrier.wait(120)

    def abort(self, why: str) -> None:
        self._barrier.abort()

    def check(self) -> None: ...


def passes(directory: Path, device: torch.device, exchange: Exchange = ALONE) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of a prompt in two chunks and of some steps behind it, in bfloat16 with INT2 pages."""
    model = HybridModel.load(directory, torch.bfloat16, device, exchange=exchange)
    fmt = KvFormat("int2", group=model.spec.head_dim, window_pages=1)
    kv = KVCache(model.spec, fmt, 4, 1, None, device, 128, torch.bfloat16)
    states = StatePool(model.spec, 1, device, torch.bfloat16)
    tokens_T = torch.randint(0, 600, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    for begin, end in [(0, 128), (128, PROMPT), *((PROMPT + i, PROMPT + i + 1) for i in range(STEPS))]:
        exchange.meet()
        span = Span(0, end - begin, begin, 0, torch.arange(-(-end // 64), device=device))
        spans = ((), (span,)) if begin < PROMPT else ((span,), ())
        rows = torch.arange(end - begin, device=device)
        hidden_TH = model.hidden(Batch(tokens_T[begin:end], rows + begin, *spans, rows), kv.backend, states)
        found.append((hidden_TH, model.logits(hidden_TH)))
        exchange.check()
    hidden, logits = zip(*found, strict=True)
    return torch.cat(hidden).cpu(), torch.cat(logits).cpu()


def run(rank: int, directory: Path, channels: int, barrier: Any) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    layout, ready = Layout(ROWS, channels), directory.parent / "ready"
    while rank and not ready.exists():
        time.sleep(0.01)
    segment = Segment(Path(f"/dev/shm/{directory.parent.name}-{directory.name}"), layout.total, create=rank == 0)
    ready.touch()
    adder = HostExchange(segment, layout, rank, device, PATIENCE_US)
    exchange = CardExchange(adder, rank, Hosts(barrier), torch.bfloat16, device)
    found = passes(directory, device, exchange)
    torch.save(found, directory.parent / f"found-{rank}.pt")
    barrier.wait(120)
    segment.close()
