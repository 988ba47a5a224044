"""A prefix hit is the same computation: equal bits of pages, states and logits, for every length of the tail."""

from dataclasses import replace

import pytest
import torch
from run_world import CODECS, World, ask, equal, logprob_gap, tokens_of

LENGTHS = {"int2": [*range(64, 128), 257, 383], "fp32": [*range(64, 128, 2), 257], "bf16": [*range(65, 128, 2), 383]}


# `make quick` plays the default codec
QUICK = [pytest.param(kv, marks=() if kv == "int2" else pytest.mark.slow) for kv in CODECS]


@pytest.mark.parametrize("kv", QUICK)
def test_the_second_identical_request_equals_the_first_bit_for_bit(tiny_model, kv):
    world = World.build(tiny_model, kv).watch()
    for n in LENGTHS[kv]:
        prompt = tokens_of(n, n)
        most = 2 if n % 8 == 0 or n > 128 else 1  # the second one is decoded
        cold, warm = (world.one(ask(f"{kind} {n}", prompt, most)) for kind in ("cold", "warm"))
        assert cold.finished.usage.cached_tokens == 0, n
        assert n - 64 <= warm.finished.usage.cached_tokens < n, n
        assert torch.isfinite(world.seen[f"cold {n}"].logits_V).all()
        assert equal(world.seen[f"cold {n}"], world.seen[f"warm {n}"]), n
        assert warm.tokens == cold.tokens and logprob_gap(cold, warm) < 1e-4
        world.seen.clear()
    world.check_idle()


@pytest.mark.parametrize("kv", QUICK)
def test_a_prompt_that_leaves_the_shared_prefix_equals_one_that_never_shared(tiny_model, kv):
    """The hit ends at a message, in the middle of other prompts; what follows is computed beside cold neighbours."""
    prefix, prompts = tokens_of(1, 410), {}
    for i, more in enumerate((1, 50, 130, 300)):
        prompts[f"p{i}"] = prefix + tokens_of(100 + i, more)
    requests = [ask(id, prompt, boundaries=[410]) for id, prompt in prompts.items()]
    shared = World.build(tiny_model, kv).watch()
    answers = {r.id: c for r, c in zip(requests, shared.answer(*requests), strict=True)}
    for request in requests:
        alone = World.build(tiny_model, kv).watch()
        assert logprob_gap(alone.one(request), answers[request.id]) < 1e-4
        assert equal(alone.seen[request.id], shared.seen[request.id], 1e-5), request.id
    assert [c.finished.usage.cached_tokens for c in answers.values()] == [0, 384, 384, 384]


@pytest.mark.parametrize("kv", QUICK)
def test_a_prompt_that_was_left_half_computed_goes_on_with_equal_bits(tiny_model, kv):
    """Between the save points 512 and 960, at the ends of steps; another request takes its slot first."""
    prompt = tokens_of(7, 1000)
    world = World.build(tiny_model, kv).watch()
    cold = world.one(replace(ask("cold", prompt, 2), cache=False))
    for steps in (6, 7):
        world.engine.submit(ask("left", prompt))
        for _ in range(steps):
            world.engine.step()
        world.engine.abort("left")
        world.one(ask("other", tokens_of(50 + steps, 100), 1))
        warm = world.one(ask(f"warm {steps}", prompt, 2))
        assert warm.finished.usage.cached_tokens == 128 * steps
        assert equal(world.seen["cold"], world.seen[f"warm {steps}"]), steps
        assert warm.tokens == cold.tokens and logprob_gap(cold, warm) < 1e-4
        world.engine.flush()
    world.check_idle()


def test_what_is_kept_of_a_prompt_that_was_left_is_what_a_save_point_there_keeps(tiny_model):
    prompt = tokens_of(7, 900)
    left, passed = World.build(tiny_model), World.build(tiny_model)
    left.engine.submit(ask("left", prompt))
    for _ in range(6):
        left.engine.step()
    left.engine.abort("left")
    left.settle()
    passed.one(ask("passed", prompt, boundaries=[768]))
    ours, theirs = ({c.position: c for c in world.runner.store.checkpoints.values()}[768] for world in (left, passed))
    assert ours.parts.keys() == theirs.parts.keys()
    assert all(torch.equal(part, theirs.parts[name]) for name, part in ours.parts.items())


def test_sixteen_bit_checkpoints_stay_within_a_stated_tolerance(tiny_model):
    """Half the bytes: a state is rounded to 11 bits once per hit. Log-probabilities moved by at most 1.2e-3."""
    world = World.build(tiny_model, state_dtype="fp16").watch()
    gaps = []
    for n in (70, 128, 191, 300, 500):
        prompt = tokens_of(n, n)
        cold, warm = (world.one(ask(f"{kind} {n}", prompt, 8)) for kind in ("cold", "warm"))
        assert warm.finished.usage.cached_tokens >= n - 64
        one, other = (torch.log_softmax(world.seen[f"{kind} {n}"].logits_V, -1) for kind in ("cold", "warm"))
        gaps += [float((one - other).abs().max()), logprob_gap(cold, warm)]
    assert 0 < max(gaps) < 5e-3
    world.check_idle()
