"""The loop guard ends what repeats without end, and leaves alone what people ask for."""

import random
from dataclasses import replace

import pytest
from driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.schedule.loops import LONGEST_CYCLE, ROUNDS, SHORTEST_RUN, LoopGuard


def found_at(tokens) -> int | None:
    guard = LoopGuard()
    return next((i + 1 for i, token in enumerate(tokens) if guard.add(token)), None)


@settings(max_examples=40)
@given(st.integers(1, LONGEST_CYCLE), st.integers(0, 300), st.integers())
def test_a_cycle_is_found_when_its_bound_is_reached(period, lead, seed):
    rng = random.Random(seed)
    cycle = [1000 + i for i in range(period)]  # all different: no shorter cycle inside
    text = [rng.randrange(1000) for _ in range(lead)] + cycle * (SHORTEST_RUN // period + ROUNDS + 1)
    assert found_at(text) == lead + max(SHORTEST_RUN, ROUNDS * period)


def test_text_that_repeats_with_changes_is_left_alone():
    rows = [token for i in range(200) for token in (1, 2, 3, 100 + i, 4)]  # a table with a running number
    zeros = ([0] * 400 + [7]) * 5
    long_cycle = list(range(LONGEST_CYCLE + 1)) * 20
    assert found_at(rows) is found_at(zeros) is found_at(long_cycle) is None


def stuck(driver: Driver, token: int = 7) -> Driver:
    """The runner answers the same token for ever."""
    original = driver.runner.answer
    driver.runner.answer = lambda *row: replace(original(*row), tokens=(token,))
    return driver


def test_a_request_in_a_loop_ends_as_cut_off_and_says_why():
    driver = stuck(Driver())
    end = driver.ask([1, 2, 3], max_tokens=5000, loop_guard=True)
    assert (end.reason, end.code) == ("length", "loop") and end.stop_token is None
    assert driver.text[end.request_id] == [7] * SHORTEST_RUN
    assert driver.cache.counters["finished: loop"] == 1


@pytest.mark.slow
def test_without_the_guard_it_runs_to_its_limit():
    end = stuck(Driver()).ask([1, 2, 3], max_tokens=2000)
    assert (end.reason, end.code, end.usage.completion_tokens) == ("length", "", 2000)


@pytest.mark.parametrize("tokens", [(7,), ()])
def test_a_complete_constraint_ends_the_answer_and_shows_its_last_token(tokens):
    driver = Driver()
    original = driver.runner.answer
    driver.runner.answer = lambda *row: replace(original(*row), tokens=tokens, complete=True, logprobs=())
    end = driver.ask([1, 2, 3], max_tokens=50, min_tokens=5, stop_token_ids=(9,))
    assert (end.reason, end.stop_token, end.usage.completion_tokens) == ("stop", None, len(tokens))
    assert driver.text[end.request_id] == list(tokens)
    driver.assert_idle_is_clean()
