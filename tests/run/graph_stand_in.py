"""What a CUDA graph and a copy engine do, on a CPU and as late as they may."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from run_world import World

from kakera.cache.host import CacheSizes
from kakera.cache.prefix import PrefixCache
from kakera.kv.batch import Batch, Span
from kakera.plan.plan import Plan
from kakera.plan.sizes import checkpoint_parts
from kakera.plan.store_sizes import StoreSizes
from kakera.run.engine import LocalEngine
from kakera.run.step import graphs
from kakera.run.step.graphs import DecodeGraphs, ForwardOutput, _Captured
from kakera.run.store.host import CheckpointShape
from kakera.run.store.pinned import PinnedStore, pinned_segments
from kakera.schedule.scheduler import Scheduler
from kakera.target.target import CUDA


class StandIn:
    """Computes what a replay would, from the same inputs that lie on the device, into the same outputs."""

    def __init__(self, graphs: DecodeGraphs, owner, count: int):
        self._graphs, self._runner, self._count = graphs, owner, count
        model = owner.model
        width = 0 if model.exchange.rank else sum(model._vocab)  # rank 0 has all logits
        self.outputs = ForwardOutput(torch.empty(count, model.spec.hidden), torch.empty(count, width))
        self.replays = 0

    @torch.inference_mode()
    def replay(self) -> None:
        self.replays += 1
        tokens_R, rope_R, starts_R, slots_R = self._graphs._numbers_4R[:, : self._count].clone()
        rows = enumerate(zip(starts_R.tolist(), slots_R.tolist(), strict=True))
        tables = self._graphs._tables_SP.long()
        spans = tuple(Span(i, 1, start, slot, tables[slot, : start // 64 + 1]) for i, (start, slot) in rows)
        batch = Batch(tokens_R, rope_R, spans, (), torch.arange(self._count))
        hidden_RH = self._runner.model.hidden(batch, self._runner.kv.backend, self._runner.states)
        self.outputs.hidden_RH.copy_(hidden_RH)
        self.outputs.logits_RV.copy_(self._runner.model.logits(hidden_RH))


def with_graphs(world: World, most: int = 8) -> list[StandIn]:
    owner = world.runner
    owner.graphs = DecodeGraphs(owner.kv, owner.states, owner.tables)
    made = [StandIn(owner.graphs, owner, count) for count in range(1, most + 1)]
    owner.graphs._captured = [_Captured(one, one.outputs) for one in made]
    return made


def fake_capture(patch: pytest.MonkeyPatch) -> None:
    """Captures run what they capture, once."""
    nothing = SimpleNamespace(wait_stream=lambda stream: None)
    cuda = SimpleNamespace(
        Stream=lambda device: nothing,
        current_stream=lambda device: nothing,
        stream=lambda stream: nullcontext(),
        graph=lambda graph, pool, stream: nullcontext(),
        CUDAGraph=lambda: SimpleNamespace(pool=lambda: 1),
    )
    names = ("arange", "empty_like", "inference_mode", "int32", "tensor", "zeros")
    patch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda, **{name: getattr(torch, name) for name in names}))


def worlds(tiny_model, **changes) -> tuple[World, World, list[StandIn]]:
    plain, replayed = (World.build(tiny_model, **changes) for _ in range(2))
    return plain, replayed, with_graphs(replayed)


class LateSide:
    """A side stream whose work happens when the computation waits for it, and not before."""

    def __init__(self):
        self._works: list[Callable[[], None]] = []
        self._done = 0

    @property
    def queued(self) -> int:
        return self._done + len(self._works)

    def run(self, work: Callable[[], None]) -> int:
        self._works.append(work)
        return self.queued

    @torch.inference_mode()
    def wait(self, end: int) -> None:
        while self._done < end:
            self._works.pop(0)()
            self._done += 1

    def finish(self) -> None:
        self.wait(self.queued)


def in_blocks(world: World, plan: Plan) -> World:
    """Decide as for a GPU with this plan, whose records take whole blocks."""
    cache = PrefixCache(CacheSizes.of(replace(plan, target=CUDA)))
    world.engine = LocalEngine(Scheduler(world.engine.scheduler.limits, cache, time.monotonic), world.engine.runner)
    store, kinds = world.runner.store, cache.host.bytes

    def counted() -> int:
        records = {"checkpoint": store.checkpoints, "sink": store.sinks, "page": store.pages}
        return sum(len(kept) * kinds[kind] for kind, kept in records.items())

    store.bytes = counted  # type: ignore[method-assign]
    return world


def with_late_store(world: World, plan: Plan, places: int = 2) -> LateSide:
    """Give the world a GPU's store, whose copies come as late as they may."""
    in_blocks(world, plan)
    runner, side = world.runner, LateSide()
    shape = CheckpointShape(checkpoint_parts(plan.spec, plan.kv, plan.state_dtype, plan.target), runner.device)
    sizes = StoreSizes.of_plan(replace(plan, target=CUDA))
    segments_SB = pinned_segments(sizes, lambda done, of: None)
    runner.store = PinnedStore(shape, runner.kv.store, runner.states, sizes, segments_SB, places, side)  # type: ignore[arg-type]
    return side
