"""A model that ranks share gives the answers of one rank; on each rank a hit is cold to the bit.

What features of the engine add themselves to: KV codecs x cold, hit, preempted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from graph_stand_in import with_graphs
from run_world import CODECS, World, ask, equal, logprob_gap, tiny_plan, tokens_of
from shared_world import SharedWorld, write_shared

import kakera
from kakera.arch.registry import load_spec
from kakera.contract.request import Sampling
from kakera.contract.step import ResetSlot, SamplingInput, Segment, StepPlan
from kakera.errors import UsageError
from kakera.kv.rotation import Frame, Rotation
from kakera.ops.exchange_plain import ThreadExchange
from kakera.run.build import build_runner
from rank_threads import together

MINI = Path(kakera.__file__).parent / "data" / "mini"
CLOSE = {"fp32": 1e-4, "bf16": 1e-4, "int2": 1e-3}  # of logits; sums in another order may flip a code, worth 1e-4 here
# `make quick` plays the default codec with two ranks
CASES = [
    pytest.param(kv, ranks, marks=() if (kv, ranks) == ("int2", 2) else pytest.mark.slow)
    for kv, ranks in ((*((kv, 2) for kv in CODECS), ("int2", 4)))
]


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory) -> Path:
    return write_shared(tmp_path_factory.mktemp("shared"))


@pytest.mark.parametrize(("kv", "ranks"), CASES)
def test_cold_and_hit(shared_model, kv, ranks):
    alone, shared = World.build(shared_model, kv).watch(), SharedWorld.share(shared_model, ranks, kv)
    for n in (70, 300, 447):
        prompt = tokens_of(n, n)
        wanted = alone.one(ask(f"cold {n}", prompt, 8))
        cold, warm = (shared.one(ask(f"{kind} {n}", prompt, 8)) for kind in ("cold", "warm"))
        assert (alone.seen[f"cold {n}"].logits_V - shared.seen[f"cold {n}"].logits_V).abs().max() < CLOSE[kv]
        assert cold.tokens == wanted.tokens and logprob_gap(cold, wanted) < CLOSE[kv]
        assert warm.finished.usage.cached_tokens >= n - 64
        for world in shared.of_rank:
            assert equal(world.seen[f"cold {n}"], world.seen[f"warm {n}"]), n
        assert warm.tokens == cold.tokens and logprob_gap(cold, warm) < 1e-4
        states = [world.seen[f"cold {n}"].state_LVKD for world in shared.of_rank]
        torch.testing.assert_close(torch.cat(states, 1), alone.seen[f"cold {n}"].state_LVKD, rtol=0, atol=CLOSE[kv])


@pytest.mark.parametrize("kv", [pytest.param(kv, marks=() if kv == "int2" else pytest.mark.slow) for kv in CODECS])
def test_preempted(shared_model, kv):
    """Three grow from two pages to three, and there are eight."""
    requests = [ask(f"p{i}", tokens_of(i, 100), 40) for i in range(3)]
    alone, shared = World.build(shared_model, kv), SharedWorld.share(shared_model, 2, kv, pages=8)
    answers = shared.answer(*requests)
    assert shared.cache.counters["preemptions"] > 0
    for request, answer in zip(requests, answers, strict=True):
        wanted = alone.one(request)
        assert answer.tokens == wanted.tokens and logprob_gap(answer, wanted) < 5 * CLOSE[kv]


def test_a_rotation_file_is_of_the_whole_model(shared_model, tmp_path):
    """Frames and centres of every head are others; a rank that took another head's would lose the centre."""
    spec, generator = load_spec(shared_model), torch.Generator().manual_seed(4)
    shape = (len(spec.full_layers), spec.kv_heads, spec.head_dim)

    def frame() -> Frame:
        turned, _ = torch.linalg.qr(torch.randn(*shape, spec.head_dim, generator=generator))
        return Frame(turned, torch.randn(shape, generator=generator))

    Rotation(frame(), frame()).save(tmp_path, spec, "test")
    request, rotation = ask("prompt", tokens_of(5, 400), 4), str(tmp_path)
    alone = World.build(shared_model, rotation=rotation).watch()
    shared = SharedWorld.share(shared_model, 2, rotation=rotation)
    assert shared.one(request).tokens == alone.one(request).tokens
    assert (alone.seen["prompt"].logits_V - shared.seen["prompt"].logits_V).abs().max() < CLOSE["int2"]
    codes = [world.seen["prompt"].pages[0] for world in shared.of_rank]
    same = (torch.cat(codes, dim=3) == alone.seen["prompt"].pages[0]).float().mean()
    assert same > 0.99, "codes are those of each head's own frame"


@pytest.mark.slow  # three times 95 M weights
def test_the_bundled_model_shared_by_two():
    """Trellis codes, a coded head, one KV head a rank. (With INT2 pages and logits up to 7 flips are worth 1e-3.)"""
    request = ask("prompt", tokens_of(3, 100), 4)
    alone, shared = World.build(MINI, "fp32", pages=8).watch(), SharedWorld.share(MINI, 2, "fp32", pages=8)
    wanted, found = alone.one(request), shared.one(request)
    assert found.tokens == wanted.tokens and logprob_gap(found, wanted) < 1e-4
    assert (alone.seen["prompt"].logits_V - shared.seen["prompt"].logits_V).abs().max() < 1e-4


def test_a_shared_model_has_no_disk(shared_model):
    class Half:
        rank, ranks = 0, 2

    plan = tiny_plan(shared_model)
    with pytest.raises(UsageError, match="--disk-cache"):
        build_runner(shared_model, plan, disk=object(), exchange=Half())


def test_rows_run_ahead_on_every_rank_with_the_tokens_that_rank_0_chose(shared_model):
    """Replays and what follows them are queued before any host has seen a token."""
    requests = [ask(f"r{i}", tokens_of(i, 60 + i), 30, temperature=1.0, seed=i) for i in range(3)]
    alone, shared = World.build(shared_model), SharedWorld.share(shared_model, 2)
    made = [with_graphs(world) for world in shared.of_rank]
    for answer, wanted in zip(shared.answer(*requests), alone.answer(*requests), strict=True):
        assert answer.tokens == wanted.tokens and logprob_gap(answer, wanted) < CLOSE["int2"]
    replays = [[stand_in.replays for stand_in in graphs] for graphs in made]
    assert replays[0] == replays[1] and sum(replays[0]) > 25
    ahead = [len(runner.graphs._ahead) for runner in shared.ranks.runners]
    assert ahead[0] == ahead[1]


def test_what_raises_on_one_rank_ends_the_step_of_all_instead_of_its_rows(shared_model):
    """As an allocator does that has no more memory: the others are in the middle of an exchange."""
    plan = tiny_plan(shared_model)
    prompt = Segment("a", 0, tokens_of(1, 60), 0, 0, (0,), sampled=1)
    wishes = {"a": SamplingInput("a", Sampling(max_tokens=1, seed=0, temperature=0.0), prompt.tokens, 60)}
    left: list[str] = []

    def work(exchange: ThreadExchange) -> None:
        runner = build_runner(shared_model, plan, exchange=exchange)
        if exchange.rank == 1:

            def full(hidden_RH: torch.Tensor) -> torch.Tensor:
                raise MemoryError("no memory for logits")

            runner.model.logits = full
        try:
            runner.execute(StepPlan(1, (ResetSlot(0),), prefill=(prompt,)), wishes if exchange.rank == 0 else {})
        except Exception as error:
            left.append(type(error).__name__)
            raise

    with pytest.raises(MemoryError, match="no memory"):
        together(2, work)
    assert sorted(left) == ["MemoryError", "RanksApart"]
