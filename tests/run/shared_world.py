"""A model that ranks share, as threads of this process: one scheduler, a runner a rank, eyes for what each holds."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from run_world import World, tiny_plan

from kakera.contract.events import RegionRead
from kakera.contract.step import Action, SamplingInput, StepPlan, StepResult
from kakera.plan.plan import Plan
from kakera.run.build import build_runner, scheduler_for
from kakera.run.engine import LocalEngine
from kakera.run.interface import NOTHING_SAMPLED
from kakera.run.ranks.engine import RankBuild, lead
from kakera.run.ranks.leader import LeadingRunner
from kakera.run.ranks.start import Followers
from kakera.run.recording.record import RecordingRunner
from kakera.run.step.runner import TorchRunner
from random_model import write_config
from rank_threads import together

SHARED = {
    "quantization_config": None,  # bfloat16 throughout
    "random_weights": 7,
    "vocab_size": 640,  # five runs of 128 rows: two ranks have two and three
    "intermediate_size": 512,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,  # more than one a rank: a wrong mapping of heads shows
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "eos_token_id": 639,
}


def write_shared(directory: Path, **changes: Any) -> Path:
    """A model of 12 query and 4 KV heads, 4 key and 12 value heads, with made-up weights."""
    return write_config(directory, **{**SHARED, **changes})


class Ranks:
    """Implements Runner: every rank carries out every plan, each in its thread."""

    def __init__(self, directory: Path, plan: Plan, ranks: int):
        self.runners: list[TorchRunner] = together(
            ranks, lambda exchange: build_runner(directory, plan, exchange=exchange)
        )
        self._pool = ThreadPoolExecutor(ranks)

    def execute(self, plan: StepPlan, sampling: Mapping[str, SamplingInput]) -> StepResult:
        wishes = [sampling if runner is self.runners[0] else NOTHING_SAMPLED for runner in self.runners]
        first, *others = self._pool.map(lambda runner, own: runner.execute(plan, own), self.runners, wishes)
        assert len({runner.branch for runner in self.runners}) == 1
        failed = [row.error for result in others for row in result.rows if row.error]
        assert not failed, failed
        return first

    def sweep(self) -> list[RegionRead]:
        return []

    def _apply(self, action: Action) -> None:
        for runner in self.runners:
            runner._apply(action)


class SharedWorld(World):
    """`of_rank`: what each rank held when a request was first sampled."""

    @staticmethod
    def share(directory: Path, ranks: int, kv: str = "int2", **changes: Any) -> SharedWorld:
        plan = tiny_plan(directory, kv, **changes)
        world = SharedWorld(LocalEngine(scheduler_for(plan), Ranks(directory, plan, ranks)))
        world.of_rank = [World(SimpleNamespace(runner=runner)).watch() for runner in world.ranks.runners]
        world.seen = world.of_rank[0].seen
        return world

    of_rank: list[World]

    @property
    def ranks(self) -> Ranks:
        ranks = self.engine.runner
        assert isinstance(ranks, Ranks)
        return ranks


class ProcessWorld(World):
    """Rank 0 is in this process, where `runner` and `seen` look; the others are followers. A context manager."""

    @staticmethod
    def share(directory: Path, ranks: int, kv: str = "int2", **changes: Any) -> ProcessWorld:
        plan = tiny_plan(directory, kv, ranks=ranks, **changes)
        runner, followers = lead(RankBuild(directory, plan), ranks, on_death=lambda why: None)
        world = ProcessWorld(LocalEngine(scheduler_for(plan), runner))
        world.followers, world.plan = followers, plan
        return world

    followers: Followers
    plan: Plan

    def __enter__(self) -> ProcessWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.followers.close()

    @property
    def runner(self) -> TorchRunner:
        leader = self.engine.runner
        leader = leader.runner if isinstance(leader, RecordingRunner) else leader
        assert isinstance(leader, LeadingRunner) and isinstance(leader.runner, TorchRunner)
        return leader.runner

    def settle(self) -> None:
        self.engine.runner.execute(StepPlan(0, self.cache.take_actions()))

    def check_bytes(self) -> None:
        """Each rank holds as much."""
        store, host = self.runner.store, self.cache.host
        held = {"checkpoint": len(store.checkpoints), "sink": len(store.sinks), "page": len(store.pages)}
        assert held == host.counts
        assert store.bytes() * (1 + len(self.followers.wires)) == host.used <= host.limit
