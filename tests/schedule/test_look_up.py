"""Look-up drafts: what followed the text's end where it stood before, how far that is trusted, and what it costs."""

from __future__ import annotations

import itertools
import random
from array import array

import pytest
from drafters import first, oracle
from driver import Driver, prose
from fake_runner import VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.contract.request import Sampling
from kakera.contract.step import SamplingInput
from kakera.plan.plan import MOST_DRAFTS
from kakera.schedule.drafts import ALLOWANCE, Drafts, StepCosts
from kakera.schedule.look_up import BARRED, LEAST, LIMITS, LONGEST, LookUp, look_up


def by_hand(text: list[int], most: int, least: int) -> list[int]:
    """Each place compared with the end, token by token."""
    best, length = None, least - 1
    for end in range(len(text) - 1):
        alike = 0
        while alike < min(LONGEST, end + 1) and text[end - alike] == text[len(text) - 1 - alike]:
            alike += 1
        if alike >= max(length, least):
            best, length = end, alike
    found: list[int] = []
    while best is not None and len(found) < min(most, length):
        at = best + 1 + len(found)
        found.append(text[at] if at < len(text) else found[at - len(text)])
    return found


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.integers(0, 80), st.integers(1, 4), st.integers(0, 40), st.integers(1, 9))
def test_a_look_up_is_what_comparing_by_hand_gives(seed, count, kinds, most, least):
    rng = random.Random(seed)
    text = [rng.randrange(kinds) for _ in range(count)]
    text += text[rng.randrange(count + 1) :][: rng.randrange(60)]  # the end stands somewhere before
    wanted = by_hand(text, most, least)
    assert look_up(array("i", text), most, least) == look_up(text, most, least) == wanted
    assert all(isinstance(token, int) for token in look_up(array("i", text), most, least))


def test_the_longest_match_counts_and_of_equals_the_latest():
    end = list(range(10, 20))
    text = [*end, 1, 5, 0, *end[1:], 2, 0, *end[1:], 3, 0, 9, *end]
    assert look_up(text, 1) == [1]
    assert look_up([0, *text[11:-11], 9, 9, *end], 1) == [3]


def test_a_loop_goes_on_with_itself():
    assert look_up([7, 8, 9] * 20, 8) == [7, 8, 9, 7, 8, 9, 7, 8]


def test_a_long_text_of_one_token_is_compared_in_bounded_time_and_grows_afterwards():
    text = array("i", [5] * 200_000)
    assert look_up(text, 31) == [5] * 31
    text.append(6)  # nothing holds it
    assert look_up(text, 31) == []


def given_text(text: list[int], prompt: int = 1) -> SamplingInput:
    return SamplingInput("r", Sampling(max_tokens=9, seed=1), array("i", text), prompt)


def test_trust_grows_with_whole_drafts_and_ends_with_a_miss():
    source = list(range(400))
    text, drafter, lengths = [*source, 900, *source[:20]], LookUp(), []
    while len(text) < 800:
        draft = drafter(given_text(text), 63)
        lengths.append(len(draft))
        text += [*draft, source[(len(text) + len(draft) - 401) % 400]]  # all right, and one more
    assert lengths[:4] == [7, 15, 31, 31]
    text[-3] = 950  # of the last draft, all but three were right
    assert drafter(given_text(text), 63) == [] and drafter._trust["r"].limit == 0


def test_a_first_token_that_is_wrong_silences_it_longer_each_time():
    """The same few tokens again and again, each time with another one behind them."""
    head, text, drafter, asked = list(range(LEAST)), [], LookUp(), []
    for i in range(200):
        text += head
        if drafter(given_text(text), 7):
            asked.append(len(text))
        text.append(100 + i)
    waits = [b - a for a, b in itertools.pairwise(asked)]
    assert waits[:3] == [9, 18, 36] and waits[-1] > 100 and all(wait > BARRED for wait in waits)
    assert LIMITS[0] == 7


class Priced:
    """Seconds of a step: one for the first token, `each` for every other."""

    def __init__(self, each: float):
        self.each = each

    def __call__(self, plan) -> float:
        return 1.0 + self.each * (sum(len(row.tokens) for row in plan.decode) - 1)


def wrong(given: SamplingInput, most: int) -> list[int]:
    return [VOCAB + 1] * min(most, 7)


@pytest.mark.slow
@pytest.mark.parametrize("each", [0.01, 0.15, 1.0])
def test_a_drafter_that_is_always_wrong_costs_three_in_a_hundred_and_a_step(each):
    plain, drafted = Driver(seconds=Priced(each)), Driver(seconds=Priced(each))
    drafted.scheduler.drafts = Drafts(wrong, MOST_DRAFTS, paying=True)
    for driver in (plain, drafted):
        driver.ask(prose(20), max_tokens=600)
    spent = drafted.clock.now - plain.clock.now
    assert 0 < spent <= 600 * 0.03 + 1.5
    assert drafted.cache.counters["accepted_tokens"] == 0 < drafted.cache.counters["drafted_tokens"]


def test_drafts_that_are_right_are_taken_up_to_the_border_of_a_page():
    driver = Driver(seconds=Priced(0.1))
    driver.scheduler.drafts = Drafts(oracle, MOST_DRAFTS, paying=True)
    end = driver.ask(prose(20), max_tokens=600)
    assert driver.clock.now - 100 < 600 / 3
    assert end.usage.accepted_tokens > 500 and end.usage.rejected_tokens == 0
    assert max(len(row.tokens) for plan in driver.plans for row in plan.decode) == 1 + MOST_DRAFTS


def test_what_drafts_would_cost_keeps_a_batch_from_them():
    """Four rows whose every further token costs as much as a step: nothing is ever guessed for long."""
    driver = Driver(seconds=Priced(1.0))
    driver.scheduler.drafts = Drafts(wrong, MOST_DRAFTS, paying=True)
    for seed in range(4):
        driver.submit(prose(20, seed), max_tokens=200)
    driver.run()
    assert driver.cache.counters["drafted_tokens"] <= 4 * (2 + 200 * ALLOWANCE)


def test_costs_are_read_between_and_beyond_what_was_measured():
    costs = StepCosts()
    assert costs.of(3) is None and costs.more(1, 4) == 0.0
    costs.observe(1, 1.0)
    assert costs.of(1) == 1.0 and costs.of(5) == pytest.approx(1.6)
    costs.observe(9, 2.0)
    assert costs.of(5) == pytest.approx(1.5) and costs.more(1, 8) == 1.0
    costs.observe(9, 200.0)  # a hiccup
    assert costs.of(9) == pytest.approx(3.5)


def test_usage_says_what_was_accepted_and_what_not():
    half = lambda given, most: [*first(1)(given, most), VOCAB + 1][:most]  # noqa: E731
    driver = Driver()
    driver.scheduler.drafts = Drafts(half)
    usage = driver.ask(prose(20), max_tokens=41).usage
    assert usage.completion_tokens == 41 and (usage.accepted_tokens, usage.rejected_tokens) == (
        20,
        19,
    )  # the last had room for one
    stop = driver.text["r1"][9]
    driver.scheduler.drafts = Drafts(oracle)
    end = driver.ask(prose(20), max_tokens=41, stop_token_ids=(stop,))
    assert (
        end.reason == "stop" and end.usage.completion_tokens == 10
    )  # the end token counts, what is behind it does not
    assert end.usage.accepted_tokens == 9 and end.usage.rejected_tokens > 0
    counters = driver.cache.counters
    assert (counters["drafted_tokens"], counters["accepted_tokens"]) == (39 + 39, 20 + 9)


@pytest.mark.parametrize(("right", "warned"), [(False, True), (True, False)])
def test_a_draft_layer_that_is_never_right_is_told_once(caplog, right, warned):
    """kekzl/imp#1428, z-lab/paroquant#42: a layer read wrongly loads, and is refused for ever."""
    driver = Driver()
    driver.scheduler.drafts = Drafts(None, 4, layer=True)
    driver.runner.layer = lambda given, most: oracle(given, most) if right else (VOCAB + 1,) * most
    for seed in range(3):
        usage = driver.ask(prose(20, seed), max_tokens=100).usage
        assert (usage.accepted_tokens > 50) == right
    assert len([line for line in caplog.messages if "draft layer" in line]) == warned
