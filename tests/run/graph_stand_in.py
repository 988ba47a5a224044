"""What a CUDA graph and a copy engine do, on a CPU and as late as they may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from run_world import World
from torch import Tensor

from kakera.model.batch import Batch, Span
from kakera.run import graphs, offload
from kakera.run.graphs import DecodeGraphs, Outputs, _Captured


class StandIn:
    """Computes what a replay would, from the same inputs that lie on the device, into the same outputs."""

    def __init__(self, graphs: DecodeGraphs, owner, count: int):
        self._graphs, self._runner, self._count = graphs, owner, count
        spec = owner.model.spec
        self.outputs = Outputs(torch.empty(count, spec.hidden), torch.empty(count, spec.vocab))
        self.replays = 0

    @torch.inference_mode()
    def replay(self) -> None:
        self.replays += 1
        tokens_R, starts_R, slots_R = self._graphs._numbers_3R[:, : self._count].clone()
        rows = enumerate(zip(starts_R.tolist(), slots_R.tolist(), strict=True))
        tables = self._graphs._tables_SP.long()
        spans = tuple(Span(i, 1, start, slot, tables[slot, : start // 64 + 1]) for i, (start, slot) in rows)
        batch = Batch(tokens_R, starts_R, spans, (), torch.arange(self._count))
        hidden_RH = self._runner.model.hidden(batch, self._runner.kv, self._runner.states)
        self.outputs.hidden_RH.copy_(hidden_RH)
        self.outputs.logits_RV.copy_(self._runner.model.logits(hidden_RH))


def with_graphs(world: World, most: int = 8) -> list[StandIn]:
    owner = world.runner
    slots = owner.states.state_LSVKD.shape[1]
    owner.graphs = DecodeGraphs(owner.model, owner.kv, owner.states, slots, 64, torch.device("cpu"))
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


class LateStream:
    """A side stream whose copies happen when somebody waits for them, and not before."""

    def __init__(self, device: object = None):
        self._copies: list[Callable[[], None]] = []
        self.queued = self._done = 0

    def queue(self, copy: Callable[[], None]) -> None:
        self._copies.append(copy)
        self.queued += 1

    def finish(self, until: int) -> None:
        while self._done < until:
            self._copies.pop(0)()
            self._done += 1

    def wait_stream(self, stream: object) -> None:
        """The stream of the computation is a CPU, which has done what it was told."""

    def wait_event(self, event: LateEvent) -> None:
        event.synchronize()

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class LateEvent:
    def record(self, stream: LateStream) -> None:
        self._stream, self._until = stream, stream.queued

    def synchronize(self) -> None:
        self._stream.finish(self._until)


class LateJob:
    """Of the thread: runs when its result is wanted, behind those before it."""

    def __init__(self, thread: LateThread, work: Callable[[], None]):
        self._thread, self._work, self._error = thread, work, None

    def done(self) -> bool:
        return self not in self._thread.jobs

    def exception(self) -> Exception | None:
        self._thread.finish(self)
        return self._error

    def result(self) -> None:
        if error := self.exception():
            raise error

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error


class LateThread:
    def __init__(self, *_: object):
        self.jobs: list[LateJob] = []

    def submit(self, work: Callable[[], None]) -> LateJob:
        self.jobs.append(LateJob(self, work))
        return self.jobs[-1]

    def finish(self, last: LateJob | None = None) -> None:
        """Run the jobs up to and with `last`, or all."""
        while self.jobs and (last is None or last in self.jobs):
            self.jobs[0].run()
            self.jobs.pop(0)


def with_late_offload(world: World, patch: pytest.MonkeyPatch, places: int = 2) -> LateThread:
    """Give the world's runner an Offload whose copies come as late as they may. Returns its thread."""
    cpu = LateStream()

    def copy(tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        @torch.inference_mode()
        def late() -> None:
            for tensor, view in zip(tensors, views, strict=True):
                view.copy_(tensor)

        side.queue(late)

    cuda = SimpleNamespace(
        Stream=LateStream, Event=LateEvent, stream=lambda stream: stream, current_stream=lambda device: cpu
    )
    fake = SimpleNamespace(
        cuda=cuda, uint8=torch.uint8, empty=lambda size, dtype, pin_memory: torch.empty(size, dtype=dtype)
    )
    patch.setattr(offload, "torch", fake)
    patch.setattr(offload, "ThreadPoolExecutor", LateThread)
    patch.setattr(offload, "_copy", copy)
    world.runner.offload = offload.Offload(world.runner.shape, world.runner.store, places)
    side = world.runner.offload._stream
    return world.runner.offload._thread
