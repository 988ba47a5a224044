"""A model that ranks share on cards, or on one by turns: the answers of one rank, hits too. Skipped without a GPU.

The whole way of serving: shapes of a rank in all kernels and stores, warm-up and captures in step, the sums' kernel in
graphs and beside them, tokens that followers hear, steps that run ahead.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from run_world import World, ask, logprob_gap, tokens_of
from shared_world import ProcessWorld, write_shared

import kakera
from kakera.arch.registry import load_spec
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import make_plan
from kakera.plan.weights import from_checkpoint
from kakera.run.build import build_engine, scheduler_for
from kakera.run.engine import LocalEngine
from kakera.run.generate import Completion
from kakera.run.ranks.engine import RankBuild, lead
from kakera.target.devices import Device, Machine
from kakera.target.target import CUDA

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
MINI = Path(kakera.__file__).parent / "data" / "mini"
LENGTHS = (30, 300, 1200)
CLOSE = 0.1  # of log-probabilities: partial sums are rounded to 16 bit


def plan_for_cards(directory: Path, cards: int) -> Plan:
    spec, size = load_spec(directory), 12 * 10**9
    machine = Machine(CUDA, (Device("12GB", size),) * cards, 64 * 10**9)
    wishes = Wishes(gpus=",".join(["12GB"] * cards), context=2048, max_running=3, chunk=512, host_cache=2**28)
    return make_plan(spec, wishes, machine, from_checkpoint(directory, spec))


def alone(directory: Path) -> dict[str, Completion]:
    """What one rank says, whose memory is free again when this returns: a process has one plan's."""
    world = World(build_engine(directory, plan_for_cards(directory, 1)))
    said = {f"{n}": world.one(ask(f"alone {n}", tokens_of(n, n), 12)) for n in LENGTHS}
    del world
    gc.collect()
    torch.cuda.empty_cache()
    return said


@pytest.mark.parametrize("which", ["mini", "more heads"])
def test_two_ranks_answer_as_one(tmp_path, monkeypatch, which):
    """Greedy texts of a real model are equal; of made-up weights, whose logits are flat, the first tokens' are near."""
    directory = MINI if which == "mini" else write_shared(tmp_path / "shared")
    said, plan, count = alone(directory), plan_for_cards(directory, 2), torch.cuda.device_count()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))  # and back again
    cards = (0, 1) if count > 1 else (0, 0)  # of one card each has its part of the memory
    runner, followers = lead(RankBuild(directory, plan, cards=cards), 2, on_death=lambda why: None)
    shared = ProcessWorld(LocalEngine(scheduler_for(plan), runner))
    try:
        assert shared.runner.graphs is not None and shared.runner.graphs.rows == plan.slots
        for n in LENGTHS:
            wanted = said[f"{n}"]
            cold, warm = (shared.one(ask(f"{kind} {n}", tokens_of(n, n), 12)) for kind in ("cold", "warm"))
            assert abs(cold.logprobs[0].logprob - wanted.logprobs[0].logprob) < CLOSE
            if which == "mini":
                assert cold.tokens == wanted.tokens and logprob_gap(cold, wanted) < CLOSE
            assert warm.tokens == cold.tokens and warm.finished.usage.cached_tokens >= n // 64 * 64 - 64
        several = [ask(f"s{i}", tokens_of(i, 100), 20) for i in range(3)]
        assert all(len(answer.tokens) for answer in shared.answer(*several))
    finally:
        followers.close()
