"""A card that is lent is empty but for what no engine can give back, and the text goes on as if it had not been.
Skipped without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kakera
from kakera.contract.request import Request, Sampling
from kakera.plan.plan import Wishes
from kakera.plan.planner import plan_for
from kakera.run.build import build_engine
from kakera.run.generate import generate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MINI = Path(kakera.__file__).parent / "data" / "mini"
TEXT = tuple(5 + i * 7 % 300 for i in range(3000))
LEFT = 48 * 2**20  # of torch: what it keeps for libraries and in pieces that it can not split


def answer(engine, name: str) -> tuple[list[int], int]:
    done = generate(engine, [Request(name, TEXT, Sampling(max_tokens=40, seed=1, temperature=0.0))])[name]
    assert done.finished is not None and done.finished.reason in ("length", "stop"), done
    return done.tokens, done.finished.usage.cached_tokens


@pytest.mark.parametrize("kv", ["int2", "bf16"])
def test_a_card_is_given_back_and_taken_again_several_times(kv):
    wishes = Wishes(gpus="auto", context=4096, max_running=3, chunk=1024, host_cache=2**28, kv=kv)
    engine = build_engine(MINI, plan_for(MINI, wishes))
    for name in ("cold", "warm"):
        answer(engine, name)
    text, cached = answer(engine, "before")
    assert cached > 0.95 * len(TEXT) and engine.runner.graphs.rows == 3
    reserved, left, held, kept = torch.cuda.memory_reserved(), [], [], []
    for turn, level in enumerate((1, 2, 1, 2, 1)):
        state = engine.sleep(level)
        left.append(torch.cuda.memory_reserved())
        held.append(state.device_bytes)
        assert torch.cuda.memory_allocated() < LEFT and engine.runner.graphs.rows == 0
        kept.append(state.host_bytes)
        engine.wake_up()
        assert engine.runner.graphs.rows == 3 and torch.cuda.memory_reserved() <= reserved + 2 * LEFT
        assert answer(engine, f"turn {turn}") == (text, cached)
    assert max(left) < LEFT and max(held[1:]) - held[1] < LEFT, "something stays with each sleep"
    assert max(kept[1], kept[3]) < min(kept[0], kept[2], kept[4]) - 4 * 10**7, "level 2 keeps no weights"


def test_who_decodes_when_the_card_is_lent_goes_on():
    wishes = Wishes(gpus="auto", context=4096, max_running=2, chunk=1024, host_cache=2**28)
    engine = build_engine(MINI, plan_for(MINI, wishes))
    for name in ("cold", "warm"):
        expected, _ = answer(engine, name)
    engine.submit(Request("lent", TEXT, Sampling(max_tokens=40, seed=1, temperature=0.0)))
    found: list[int] = []
    for step in range(400):
        if step == 12:
            engine.sleep(1)
            assert engine.step() == []
            engine.wake_up()
        for event in engine.step():
            found += getattr(event, "tokens", ())
        stats = engine.stats()
        if not stats.running + stats.waiting:
            break
    assert found == expected
