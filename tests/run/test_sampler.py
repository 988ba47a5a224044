"""Sampling: filters, penalties, and noise that depends on nothing but seed, choice and position."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_mixes import sample_rows

from kakera.constrain.output import ANYTHING, Allowed
from kakera.contract.request import Sampling
from kakera.contract.step import SamplingInput
from kakera.run.choose.logprobs import LOGPROB_FLOOR, logprobs_of
from kakera.run.choose.noise import gumbel, gumbel_reference, noise_key
from kakera.run.choose.picks import pick_of
from kakera.run.choose.sampler import Sampled

BASE = Sampling(max_tokens=8, seed=7)


def row(sampling: Sampling, context: tuple[int, ...] = (0,), prompt_tokens: int = 1) -> SamplingInput:
    return SamplingInput("r", sampling, context, prompt_tokens)


def choose(sampling: Sampling, logits: list[float] | torch.Tensor, **kwargs) -> int:
    (sampled,) = sample_rows([row(sampling, **kwargs)], torch.as_tensor(logits, dtype=torch.float32)[None])
    assert not sampled.error
    return sampled.token


def draws(sampling: Sampling, logits: list[float], count: int = 2000) -> Counter[int]:
    return Counter(choose(replace(sampling, seed=seed), logits) for seed in range(count))


def test_temperature_zero_takes_the_most_likely_token():
    assert choose(replace(BASE, temperature=0.0), [0.0, 3.0, 1.0]) == 1


def test_draws_follow_the_distribution():
    probabilities = [0.5, 0.3, 0.15, 0.05]
    counts = draws(BASE, [math.log(p) for p in probabilities])
    for token, p in enumerate(probabilities):
        assert counts[token] / 2000 == pytest.approx(p, abs=0.035)  # 3 sigma


@pytest.mark.parametrize(
    ("change", "allowed"),
    [({"top_k": 2}, {0, 1}), ({"top_p": 0.6}, {0, 1}), ({"top_p": 0.4}, {0}), ({"min_p": 0.25}, {0, 1, 2})],
)
def test_filters_keep_exactly_the_tokens_they_should(change, allowed):
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(draws(replace(BASE, **change), logits, 400)) == allowed


def test_choices_and_positions_get_different_noise():
    keys = {noise_key(3, choice, position) for choice in range(20) for position in range(20)}
    assert len(keys) == 400


@given(st.integers(0, 2**63), st.integers(0, 15), st.lists(st.integers(0, 2**18), min_size=1, max_size=9))
def test_noise_is_what_its_definition_says(seed, choice, ids):
    keys = [noise_key(seed, choice, position) for position in (0, 77)]
    found = gumbel(torch.tensor(keys)[:, None], torch.tensor(ids))
    wanted = torch.stack([torch.stack([gumbel_reference(key, i) for i in ids]) for key in keys])
    assert found.isfinite().all() and float((found - wanted).abs().max()) < 1e-12


def test_noise_is_gumbels_and_no_token_or_position_knows_of_another():
    """Means of 250,000 numbers: 0.5772 within 3 sigma, and products of neighbours the mean's square."""
    keys_S1 = torch.tensor([noise_key(5, 0, position) for position in range(500)])[:, None]
    noise_SK = gumbel(keys_S1, torch.arange(500))
    mean = 0.5772157
    assert float(noise_SK.mean()) == pytest.approx(mean, abs=3 * 1.283 / 500)
    assert float(noise_SK.std()) == pytest.approx(1.2825, abs=0.01)
    for one, other in ((noise_SK[1:], noise_SK[:-1]), (noise_SK[:, 1:], noise_SK[:, :-1])):
        assert float(((one - mean) * (other - mean)).mean()) == pytest.approx(0.0, abs=0.012)


def test_what_a_filter_leaves_does_not_depend_on_how_it_is_ranked():
    """The same token by the 128 most likely, by a sorted vocabulary and by all of it, where all leave the same."""
    logits = torch.cat([torch.linspace(3, 0, 100), torch.full((200,), -math.inf)])
    for seed in range(50):
        ranked = [{"top_k": 100}, {"top_k": 129}, {}]
        assert len({choose(replace(BASE, seed=seed, **wish), logits) for wish in ranked}) == 1


def test_end_tokens_are_held_back_until_the_minimum_length():
    sampling = replace(BASE, temperature=0.0, min_tokens=2, stop_token_ids=(1,))
    assert choose(sampling, [0.0, 9.0, 5.0], context=(0, 2), prompt_tokens=1) == 2
    assert choose(sampling, [0.0, 9.0, 5.0], context=(0, 2, 2), prompt_tokens=1) == 1


def test_penalties_count_the_right_tokens():
    greedy = replace(BASE, temperature=0.0)
    logits = [2.0, 1.9, 1.8]
    output = {"context": (0, 0, 0), "prompt_tokens": 1}
    assert choose(replace(greedy, presence_penalty=0.15), logits, **output) == 1
    assert choose(replace(greedy, frequency_penalty=0.08), logits, **output) == 1  # two times
    assert choose(replace(greedy, presence_penalty=2.0), logits, context=(0,), prompt_tokens=1) == 0  # prompt is free
    assert choose(replace(greedy, repetition_penalty=1.2), logits, context=(0,), prompt_tokens=1) == 1  # but not here


def test_logit_bias_moves_one_token():
    assert choose(replace(BASE, temperature=0.0, logit_bias=((2, 5.0),)), [2.0, 1.9, 1.8]) == 2


class Counted(tuple):
    """A tuple that knows how often it was read through."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


def test_what_a_request_always_asks_for_is_read_once_and_not_in_each_step():
    stops, bias = Counted(range(3, 1_000)), Counted((i, -1.0) for i in range(1_000))
    sampling = replace(BASE, temperature=0.0, min_tokens=30, stop_token_ids=stops, logit_bias=bias)
    for step in range(40):
        pick_of(row(sampling, (0,) * (step + 1)), ANYTHING, 2_000)
    assert (stops.reads, bias.reads) == (1, 1)
    equal = replace(BASE, temperature=0.0, min_tokens=30, stop_token_ids=(1,), logit_bias=((2, 5.0), (2, 1.0)))
    assert choose(equal, [2.0, 9.0, 3.5]) == 2  # the sum of both


@settings(max_examples=30)
@given(st.floats(0.05, 2.0), st.floats(0.01, 1.0), st.integers(0, 8), st.floats(0.0, 1.0), st.integers(0, 2**32))
def test_any_setting_yields_a_token_of_the_vocabulary(temperature, top_p, top_k, min_p, seed):
    sampling = replace(BASE, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    assert 0 <= choose(sampling, [0.0, -50.0, 3.0, 100.0, -100.0]) < 5


@pytest.mark.parametrize(
    "extreme", [{"top_p": 0.0}, {"temperature": 1e-40}, {"temperature": 1e-300}, {"temperature": 1e-8, "top_p": 0.0}]
)
def test_extremes_that_the_api_allows_are_greedy(extreme):
    assert draws(replace(BASE, **extreme), [1.0, 3.0, 2.9, -80.0], 50) == {1: 50}


def test_an_endless_temperature_is_uniform():
    assert len(draws(replace(BASE, temperature=1e30), [1.0, 30.0, -80.0], 100)) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_are_an_error_of_their_row_alone(bad):
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    logits[1] = bad if bad < 0 else torch.tensor([0.0, 1.0, bad])
    wish = replace(BASE, logprobs=1)
    first, failed, last = sample_rows([row(wish)] * 3, logits)
    assert "not finite" in failed.error and failed.logprob is None
    assert [first, last] == sample_rows([row(wish)], logits[:1]) * 2 and first.error == ""


def test_logprobs_are_the_models_own_and_always_finite():
    logits = torch.tensor([[0.0, 1.0, -math.inf], [0.5, 0.5, 3.0]])
    found, other = logprobs_of(logits, [2, 0], alternatives=3)
    assert found.logprob == LOGPROB_FLOOR
    assert [t for t, _ in found.top] == [1, 0, 2]
    assert found.top[0][1] == pytest.approx(float(torch.log_softmax(logits[0], -1)[1]))
    assert [t for t, _ in other.top] == [2, 0, 1] and other.logprob == other.top[1][1]


def test_nobody_is_sampled_in_an_empty_batch():
    assert sample_rows([], torch.empty(0, 5)) == [] and logprobs_of(torch.empty(0, 5), [], 2) == []


def test_a_forced_token_brings_its_own_log_probability():
    logits = torch.randn(1, 50)
    (sampled,) = sample_rows([row(replace(BASE, logprobs=0))], logits, [Allowed(forced=7)])
    assert sampled == Sampled(7, logprobs_of(logits, [7], 0)[0])


@pytest.mark.parametrize("wish", [{"logit_bias": ((50, 1.0),)}, {"logit_bias": ((-1, 1.0),)}])
def test_a_token_outside_the_vocabulary_is_refused_before_it_reaches_the_device(wish):
    with pytest.raises(ValueError, match="ids are 0 to 49"):
        pick_of(row(replace(BASE, **wish)), ANYTHING, 50)
    with pytest.raises(ValueError, match="ids are 0 to 49"):
        pick_of(row(BASE), Allowed(forced=50), 50)
