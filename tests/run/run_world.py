"""The real engine over the tiny model, in this process and small enough to be crowded; and eyes for what it holds."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kakera.arch.registry import load_spec
from kakera.cache.integrity import check_integrity
from kakera.contract.request import Boundary, Request, Sampling
from kakera.contract.step import SamplingInput, Segment
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import make_plan
from kakera.plan.weights import WeightBytes, from_checkpoint
from kakera.run.build import build_engine
from kakera.run.engine import LocalEngine
from kakera.run.generate import Completion, generate
from kakera.run.step.runner import TorchRunner
from kakera.target.devices import Device, Machine
from kakera.target.target import CPU

CODECS = ("fp32", "bf16", "int2")
GROUP, WINDOW = 32, 128  # tokens; two groups a head, and a prompt of 300 tokens has a history behind its window
MACHINE = Machine(CPU, (Device("cpu", 16 * 10**9),), 16 * 10**9)


def tiny_plan(directory: Path, kv: str = "int2", **changes: Any) -> Plan:
    """A plan for the tiny model; `changes` replace fields of it (pages, slots, chunk, host_cache, context); `ranks`:
    processes that share it; `drafting`: its draft layer is computed."""
    spec = replace(load_spec(directory), drafting=changes.pop("drafting", False))
    machine = replace(MACHINE, processes=changes.pop("ranks", 1))
    wishes = Wishes(
        context=2048,
        max_running=8,
        kv=kv,
        kv_group=GROUP if kv == "int2" else None,
        kv_window=WINDOW,
        state_dtype=changes.pop("state_dtype", "fp32"),
        host_cache=64 * 2**20,
    )
    weights: WeightBytes = from_checkpoint(directory, spec)
    return replace(make_plan(spec, wishes, machine, weights), **{"pages": 128, "chunk": 128, **changes})


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    """Bytes, none of them a control token."""
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(count))


def ask(
    id: str, tokens: Iterable[int], max_tokens: int = 4, boundaries: Iterable[int] = (), **sampling: Any
) -> Request:
    """A greedy request unless `sampling` says otherwise, with log-probabilities."""
    wanted = {"seed": 1, "temperature": 0.0, "logprobs": 1, **sampling}
    marks = tuple(Boundary(position, "message") for position in boundaries)
    return Request(id, tuple(tokens), Sampling(max_tokens=max_tokens, **wanted), marks)


@dataclass
class Seen:
    """What a request held when its prompt had been computed, and what it was sampled from."""

    pages: tuple[Tensor, ...]
    state_LVKD: Tensor
    conv_LWC: Tensor
    logits_V: Tensor


@dataclass
class World:
    engine: LocalEngine
    seen: dict[str, Seen] = field(default_factory=dict)

    @staticmethod
    def build(directory: Path, kv: str = "int2", **changes: Any) -> World:
        return World(build_engine(directory, tiny_plan(directory, kv, **changes)))

    @property
    def runner(self) -> TorchRunner:
        runner = self.engine.runner
        assert isinstance(runner, TorchRunner)
        return runner

    @property
    def cache(self):
        return self.engine.scheduler.cache

    def watch(self) -> World:
        """Keep what every request holds when it is sampled for the first time."""
        original = self.runner._draw

        def draw(rows: Sequence[Segment], sampling: Mapping[str, SamplingInput], logits_RV: Tensor):
            for i, row in enumerate(rows):
                given = sampling.get(row.request_id)  # a rank that only hears what is chosen has none
                if given.generated == 0 if given else row.request_id not in self.seen:
                    self.seen[row.request_id] = self._look(row, logits_RV[i].clone())
            return original(rows, sampling, logits_RV)

        self.runner._draw = draw  # type: ignore[method-assign]
        return self

    def _look(self, row: Segment, logits_V: Tensor) -> Seen:
        states = self.runner.states
        return Seen(
            self.runner.kv.store.read_pages(self.runner.tables.of(row)),
            states.state_LSVKD[:, row.slot].clone(),
            states.conv_LSWC[:, row.slot].clone(),
            logits_V,
        )

    def answer(self, *requests: Request) -> list[Completion]:
        """All at once; the completions in the same order."""
        return list(generate(self.engine, requests).values())

    def one(self, request: Request) -> Completion:
        """Alone; it must end well."""
        (completion,) = self.answer(request)
        assert completion.finished is not None and completion.finished.reason in ("stop", "length")
        return completion

    def check_idle(self) -> None:
        """Nobody runs: every page, slot and host byte is free or cached, and the store holds what the cache counts."""
        stats, cache = self.engine.stats(), self.cache
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.slots_free == stats.slots_total and stats.pages_free == stats.pages_total
        assert not cache.leases and not cache.checkpoints.reserved
        check_integrity(cache)
        self.settle()
        self.check_bytes()

    def settle(self) -> None:
        """Carry out what the cache decided after the last step; the next step would."""
        for action in self.cache.take_actions():
            self.runner._apply(action)

    def check_bytes(self) -> None:
        store, counts = self.runner.store, self.cache.host.counts
        assert {"checkpoint": len(store.checkpoints), "sink": len(store.sinks), "page": len(store.pages)} == counts
        assert store.bytes() == self.cache.host.used <= self.cache.host.limit


def equal(one: Seen, other: Seen, logits: float = 0.0) -> bool:
    """Bit for bit; `logits` may differ by so much: rows that are sampled together share a product of their number."""
    pages = all(torch.equal(a, b) for a, b in zip(one.pages, other.pages, strict=True))
    state = torch.equal(one.state_LVKD, other.state_LVKD) and torch.equal(one.conv_LWC, other.conv_LWC)
    return pages and state and bool(((one.logits_V - other.logits_V).abs() <= logits).all())


def logprob_gap(one: Completion, other: Completion) -> float:
    """Largest difference of the chosen tokens' log-probabilities; the tokens must be the same."""
    assert one.tokens == other.tokens and len(one.logprobs) == len(other.logprobs)
    return max((abs(a.logprob - b.logprob) for a, b in zip(one.logprobs, other.logprobs, strict=True)), default=0.0)
