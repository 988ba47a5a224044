"""A model that ranks share, as threads of this process: one scheduler, a runner a rank, eyes for what each holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from run_world import World, tiny_plan
from torch import Tensor

from kakera.contract.events import RegionRead
from kakera.contract.step import Action, RowResult, SamplingInput, StepPlan, StepResult
from kakera.plan.plan import Plan
from kakera.run.build import build_runner, scheduler_for
from kakera.run.engine import LocalEngine
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


class Mute:
    """Of a rank that chooses nothing."""

    def draw(self, inputs: Sequence[SamplingInput], drafts: Sequence[tuple[int, ...]], logits_RV: Tensor) -> None:
        assert logits_RV.shape[1] == 0, "rank 0 alone has logits"

    def collect(self, drawn: None) -> dict[str, RowResult]:
        return {}


class Ranks:
    """Implements Runner: every rank carries out every plan, each in its thread."""

    def __init__(self, directory: Path, plan: Plan, ranks: int):
        self.runners: list[TorchRunner] = together(
            ranks, lambda exchange: build_runner(directory, plan, exchange=exchange)
        )
        for runner in self.runners[1:]:
            runner.chooser = Mute()  # type: ignore[assignment]
        self._pool = ThreadPoolExecutor(ranks)

    def execute(self, plan: StepPlan, sampling: Mapping[str, SamplingInput]) -> StepResult:
        first, *others = self._pool.map(lambda runner: runner.execute(plan, sampling), self.runners)
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
