"""Reads what an engine in this process has taken of its device's memory, by purpose."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kakera.bench.memory import Held, MemoryTable, Taken, compare_cpu, compare_gpu, compare_host
from kakera.plan.plan import Plan
from kakera.plan.share import plan_of_rank
from kakera.run.engine import LocalEngine
from kakera.run.ranks.leader import LeadingRunner
from kakera.run.regions import KV, PAGES, SCRATCH, STAGING, STATES, WEIGHTS
from kakera.run.step.runner import TorchRunner
from kakera.target.devices import device_bytes_used
from kakera.target.target import Target


@dataclass(frozen=True)
class MemoryWatch:
    """`before`: bytes in use on all cards when the watch began, as the driver counts them."""

    before: int

    @staticmethod
    def start() -> MemoryWatch:
        """Before the first CUDA call of the process: the context counts as ours."""
        return MemoryWatch(device_bytes_used())

    def tables(self, engine: LocalEngine, plan: Plan) -> dict[str, MemoryTable]:
        """The plan beside what was taken since the start, the most of it for a card. By key in a JSON document. Of a
        model that ranks share the first card's part; nothing where all of them are in one memory.

        Others must not have taken any memory of the cards meanwhile.
        """
        runner = engine.runner
        if isinstance(runner, LeadingRunner):
            if plan.target.one_memory:
                return {}
            runner, plan = runner.runner, plan_of_rank(plan, 0, plan.ranks)
        assert isinstance(runner, TorchRunner)
        held, store = held_bytes(runner, plan.target), runner.store.reserved()
        if plan.target.one_memory:
            return {"memory": compare_cpu(plan.rows, held, store, peak_resident())}
        torch.cuda.synchronize()
        beside = runner.kv.store.pool.mapped_bytes  # of torch's allocator
        taken = Taken(
            held=held,
            allocated=torch.cuda.max_memory_allocated() + beside,
            reserved=torch.cuda.max_memory_reserved() + beside,
            graphs=graph_bytes(torch.cuda.memory_snapshot()),  # type: ignore[no-untyped-call]
            # the allocator may have given memory back since its fullest moment
            device=_used() - self.before - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved(),
        )
        card, host = compare_gpu(plan.rows, taken), compare_host(plan.rows, store, anonymous())
        return {"memory": card, "host_memory": host}


def _used() -> int:
    """Bytes in use on all cards; on the current one where NVML, which tells it, is missing."""
    free, total = torch.cuda.mem_get_info()
    return device_bytes_used() or total - free


def held_bytes(runner: TorchRunner, target: Target) -> Held:
    """Bytes of the device that the runner's objects hold."""
    found = {name: sum(storage.nbytes() for storage in storages) for name, storages in runner.regions().items()}
    kv = runner.kv.bytes()
    windows = kv.ring + kv.sink
    staging = 0 if target.one_memory else found[STAGING]  # on a CPU a row of its own
    scratch = found[KV] - windows + found[SCRATCH]
    return Held(found[WEIGHTS], found[STATES], windows, found[PAGES], scratch, staging)


def graph_bytes(segments: Sequence[Mapping[str, Any]]) -> int:
    """Bytes that lie idle in private pools, which torch keeps for graphs to be replayed, of a snapshot's segments."""
    private = [segment for segment in segments if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


def anonymous() -> int:
    """Bytes of this process in memory that belong to no file: libraries, which others share, do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def peak_resident() -> int:
    """Bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
