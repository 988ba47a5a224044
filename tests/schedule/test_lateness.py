"""Late steps: three in a row that take half as long again as such steps have taken, and none of what is usual."""

from __future__ import annotations

import random

import pytest

from kakera.contract.step import Segment, StepPlan
from kakera.schedule.lateness import LEARNED, Lateness

CHUNK = 2048


def prefill(position: int, tokens: int = CHUNK) -> StepPlan:
    return StepPlan(1, prefill=(Segment("r", 0, (0,) * tokens, position),))


def decode(rows: int, position: int) -> StepPlan:
    return StepPlan(1, decode=tuple(Segment(f"r{i}", i, (0,), position) for i in range(rows)))


def fill(lateness: Lateness, chunks: int, slow=lambda i: 1.0, first: int = 0) -> int:
    """A prompt on a card that reads 1.2 s a chunk and 4 us for each token before; times in which it was late."""
    before, rng = lateness.found, random.Random(1)
    for i in range(first, first + chunks):
        seconds = (1.2 + 4e-6 * CHUNK * i) * rng.uniform(0.95, 1.05)
        lateness.observe(prefill(CHUNK * i), seconds * slow(i))
    return lateness.found - before


def test_healthy_prompts_and_answers_are_never_late():
    lateness = Lateness()
    assert fill(lateness, 96) == fill(lateness, 96) == 0
    rng = random.Random(2)
    for step in range(2000):
        rows = 1 + step // 100 % 4
        lateness.observe(decode(rows, 1000 + 50 * step), (0.03 + 1e-7 * rows * 50 * step) * rng.uniform(0.9, 1.3))
    assert lateness.found == 0


@pytest.mark.parametrize(("factor", "late"), [(1.35, 0), (1.7, 10), (6.0, 10)])
def test_a_cliff_at_two_thirds_of_a_prompt_is_late_and_is_not_learned(factor, late):
    lateness = Lateness()
    assert fill(lateness, 96, lambda i: factor if i >= 64 else 1.0) == late
    assert not late or fill(lateness, 9, lambda i: factor, first=60) == 3


def test_one_slow_step_or_two_are_no_run_and_short_ones_have_to_add_up():
    lateness = Lateness()
    assert fill(lateness, 96, lambda i: 5.0 if i % 3 else 1.0) == 0, "before 32 are known, nothing is"
    lateness = Lateness()
    fill(lateness, 48)
    assert fill(lateness, 30, lambda i: 5.0 if i % 3 else 1.0) == 0
    for step in range(100):
        lateness.observe(decode(2, 5000 + step), 0.02)
    for step in range(10):
        lateness.observe(decode(2, 5100 + step), 0.09)
    assert lateness.found == 0, "0.9 s of them"
    lateness.observe(decode(2, 5110), 0.11)
    assert lateness.found == 1


def test_what_mixes_kinds_or_lies_far_out_says_nothing():
    lateness = Lateness()
    for i in range(LEARNED + 8):
        lateness.observe(prefill(64 * i), 1.0)
    for i in range(20):
        lateness.observe(prefill(10**6 + i), 9.0)
        both = StepPlan(1, decode=decode(1, 10).decode, prefill=prefill(0).prefill)
        lateness.observe(both, 50.0)
        lateness.observe(StepPlan(1), 50.0)
    assert lateness.found == 0
