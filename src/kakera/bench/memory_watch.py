"""Reads what an engine in this process has taken of its device's memory, by purpose."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kakera.bench.memory import Held, MemoryTable, Taken, compare_cpu, compare_gpu, compare_host
from kakera.plan.plan import Plan
from kakera.run.engine import LocalEngine
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
        """The plan beside what was taken since the start, the most of it for a card. By key in a JSON document.

        Others must not have taken any memory of the cards meanwhile.
        """
        assert isinstance(engine.runner, TorchRunner)
        held, store = held_bytes(engine.runner, plan.target), engine.runner.store.reserved()
        if plan.target.one_memory:
            return {"memory": compare_cpu(plan.rows, held, store, peak_resident())}
        torch.cuda.synchronize()
        taken = Taken(
            held=held,
            allocated=torch.cuda.max_memory_allocated(),
            reserved=torch.cuda.max_memory_reserved(),
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
    """Bytes of the tensors on the device that the runner's objects hold, each storage once.

    What classes named ...Scratch hold is scratch wherever it hangs, and so is all that the runner has beside the model,
    the cache, the states and the store. Opaque weights, which a CPU's library packs, are not seen.
    """
    seen: set[int] = set()
    device = target.kind
    kv = runner.kv.bytes()
    cache = _bytes(_tensors(runner.kv), device, seen)
    states = _bytes(_tensors(runner.states), device, seen)
    scratch = _bytes(_tensors(runner.model, within="Scratch"), device, seen)
    weights = _bytes(_tensors(runner.model), device, seen)
    store = _bytes(_tensors(runner.store), device, seen)
    staging = 0 if target.one_memory else store  # on a CPU a row of its own
    others = _bytes(_tensors(runner), device, seen)
    windows = kv.ring + kv.sink
    return Held(weights, states, windows, kv.pages, cache - windows - kv.pages + scratch + others, staging)


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


def _bytes(tensors: Iterable[Tensor], device: str, seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _tensors(root: Any, within: str = "") -> Iterator[Tensor]:
    """Tensors reachable through containers and through attributes of this package's objects; `within`: only those in
    objects whose class is called so at its end."""
    open_, visited = [(root, not within)], set()
    while open_:
        item, wanted = open_.pop()
        if isinstance(item, Tensor):
            if wanted:
                yield item
            continue
        if id(item) in visited:
            continue
        visited.add(id(item))
        wanted = wanted or type(item).__name__.endswith(within)
        open_ += [(child, wanted) for child in _children(item)]


def _children(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return list(item.values())  # a thread may be putting something in
    if isinstance(item, list | tuple | set | frozenset):
        return item
    if type(item).__module__.startswith("kakera."):
        return vars(item).values() if hasattr(item, "__dict__") else ()
    return ()
