"""Rows of several tokens: with drafts, whatever they are, requests say and leave in the cache what they do without."""

from __future__ import annotations

import functools

import pytest
from drafters import Adversary, Random, first, oracle
from driver import Driver, answer, floor64, message_ends, prose
from fake_runner import next_token
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fuzz import play

from kakera.contract.grid import PAGE
from kakera.plan.plan import MOST_DRAFTS
from kakera.schedule.drafts import Drafts
from kakera.schedule.look_up import LookUp

DRAFTERS = {
    "none": lambda seed: None,
    "oracle": lambda seed: oracle,
    "two": lambda seed: first(2),
    "random": Random,
    "adversary": Adversary,
}


@pytest.mark.slow
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    pages=st.sampled_from([8, 20, 60]),
    host=st.sampled_from([0, 1.2, 6, 40]),
    windowed=st.booleans(),
    drafter=st.sampled_from(["oracle", "two", "random", "adversary"]),
)
def test_random_traffic_with_drafts_is_answered_right_and_leaves_nothing_behind(seed, pages, host, windowed, drafter):
    driver = play(seed, pages, slots=3, host=host, windowed=windowed, steps=80, drafter=DRAFTERS[drafter](seed))
    driver.assert_idle_is_clean()


def talk(driver: Driver) -> list:
    """Conversations, one request after the other; what each says and how much of it was cached."""
    told = []
    for seed in range(4):
        tokens = prose(90 + 41 * seed, seed=seed % 3)
        for turn, most in enumerate((70, 1, 300, 64)):
            sampling = {"stop_token_ids": (5, 6, 7), "min_tokens": 20 * (turn % 2)}
            end = driver.ask(tokens, max_tokens=most, boundaries=message_ends(len(tokens)), **sampling)
            text = driver.text[f"r{driver._serial}"]
            assert text == answer(tokens, most, (5, 6, 7), min(most, sampling["min_tokens"]))
            told.append((text, end.reason, end.stop_token, end.usage.completion_tokens, end.usage.cached_tokens))
            tokens = (*tokens, *text, *prose(30, seed=50 + turn))
    return told


@functools.cache
def plainly(host: int) -> tuple[Driver, list]:
    """Without drafts, for all drafters to be held against."""
    driver = Driver(pages=400, host=host)
    return driver, talk(driver)


def held(driver: Driver) -> dict:
    """What the cache holds, by the prefixes it is for."""
    nodes = {driver.runner.prefix_of(node): node for node in driver.cache.tree.nodes()}
    return {prefix: (n.device is None, n.host is None, kind_of(n), n.sink is None) for prefix, n in nodes.items()}


def kind_of(node) -> str | None:
    return node.checkpoint.kind if node.checkpoint is not None else None


@pytest.mark.slow
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    pages=st.sampled_from([8, 20, 60]),
    paying=st.booleans(),
    layer=st.sampled_from(["oracle", "two", "random", "adversary"]),
    looks_up=st.booleans(),
)
def test_random_traffic_with_a_draft_layer_and_look_ups_is_answered_right(seed, pages, paying, layer, looks_up):
    """Whatever is proposed, and whoever is preempted, fails or leaves between a proposal and its check."""

    def watch(driver: Driver) -> None:
        driver.runner.layer = DRAFTERS[layer](seed)

    drafts = Drafts(LookUp() if looks_up else None, MOST_DRAFTS, paying=paying, layer=True)
    driver = play(seed, pages, slots=3, host=6, windowed=True, steps=80, drafter=drafts, watch=watch)
    driver.assert_idle_is_clean()
    rows = [row for plan in driver.plans for row in plan.decode]
    assert all(sum(len(row.drafts) for row in plan.decode) <= MOST_DRAFTS for plan in driver.plans)
    assert not rows or any(row.propose for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("host", [100, 3])
@pytest.mark.parametrize("drafter", ["oracle", "two", "random", "adversary"])
def test_pages_checkpoints_and_hits_are_the_same_with_and_without(drafter, host):
    (plain, said), drafted = plainly(host), Driver(pages=400, host=host, drafter=DRAFTERS[drafter](1))
    assert talk(drafted) == said
    assert held(drafted) == held(plain)
    for counter in ("cached_tokens", "checkpoints_saved", "checkpoints_evicted", "pages_demoted"):
        assert drafted.cache.counters[counter] == plain.cache.counters[counter]
    drafted.runner.check_stores()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_row_ends_at_the_border_of_its_page_and_within_what_may_be_said(drafter):
    driver = Driver(context=400, drafter=DRAFTERS[drafter](3))
    for prompt, most in ((60, 120), (64, 1), (63, 2), (385, 1000)):
        start = len(driver.plans)
        driver.ask(prose(prompt), max_tokens=most)
        for row in (row for plan in driver.plans[start:] for row in plan.decode):
            assert row.start // PAGE == (row.end - 1) // PAGE and row.page_count == row.start // PAGE + 1
            assert row.end < min(prompt + most, 400) and row.sampled == len(row.tokens) == 1 + len(row.drafts)
    assert any(len(row.tokens) > 3 for plan in driver.plans for row in plan.decode) == (drafter not in ("none", "two"))


def test_rows_of_three_tokens_save_at_each_border():
    """60 to 180: the rows before a border are shorter, or the borders would be jumped over."""
    driver = Driver(drafter=first(2))
    driver.ask(prose(60), max_tokens=121)
    rows = [row for plan in driver.plans for row in plan.decode]
    assert max(len(row.tokens) for row in rows) == 3 and len(rows) < 45
    assert [save.position for row in rows for save in row.saves] == [64, 128]
    assert driver.cache.counters["checkpoints_saved"] == 2


def test_what_was_to_be_saved_behind_a_draft_that_is_not_kept_is_saved_in_its_turn():
    wrong = lambda given, most: [0] * min(most, 3)  # noqa: E731
    driver = Driver(drafter=wrong)
    driver.ask(prose(60), max_tokens=80)
    saves = [(row.end, save.position) for plan in driver.plans for row in plan.decode for save in row.saves]
    assert len(saves) > 2 and {position for _, position in saves} == {64, 128}
    assert driver.cache.counters["checkpoints_saved"] == 2
    driver.runner.check_stores()


@pytest.mark.parametrize("at", [100, 127, 128, 129, 150])
def test_13_an_end_inside_an_accepted_draft_keeps_the_answer_in_the_cache(at):
    """llama.cpp#28049: the end token is one of several accepted at once; the next turn hits the whole answer."""
    plain, drafted = Driver(), Driver(drafter=oracle)
    text, hits = answer(prose(60), at), []
    stop = next_token((*prose(60), *text))
    for driver in (plain, drafted):
        end = driver.ask(prose(60), max_tokens=400, stop_token_ids=(stop,))
        said = driver.text["r1"]
        assert end.reason == "stop" and said == text[: len(said)] and end.usage.completion_tokens == len(said) + 1
        hits.append(driver.cached((*prose(60), *said, stop, *prose(30, 9)), max_tokens=1))
    assert hits[0] == hits[1] == floor64(60 + len(said))


@pytest.mark.parametrize("mishap", ["abort", "preempt"])
def test_17_who_leaves_while_a_step_with_drafts_runs_leaves_nothing(mishap):
    """vllm#49620, tt-plugin#131: at every step of an answer; whoever comes back says the same."""
    for at in range(1, 12):
        driver = Driver(pages=8, drafter=first(5))
        names = [driver.submit(prose(40, seed), max_tokens=60) for seed in (1, 2)]
        for number in range(40):
            plan = driver.scheduler.plan_step()
            if plan is None:
                break
            if number == at and mishap == "abort":
                driver.scheduler.abort(names[1])
            driver.commit(plan)
            if number == at and mishap == "preempt" and names[1] in driver.scheduler.running:
                driver.scheduler._preempt(driver.scheduler.running.get(names[1]))
        driver.run()
        assert driver.text[names[0]] == answer(prose(40, 1), 60)
        whole = answer(prose(40, 2), 60)
        assert driver.text[names[1]] == (whole if mishap == "preempt" else whole[: len(driver.text[names[1]])])
        driver.assert_idle_is_clean()


def test_nothing_runs_ahead_of_drafts():
    driver = Driver(drafter=first(2))
    driver.ask(prose(20), max_tokens=30)
    assert not any(plan.may_follow for plan in driver.plans)


def test_drafts_save_steps():
    plain, drafted = Driver(), Driver(drafter=first(3))
    for driver in (plain, drafted):
        driver.ask(prose(20), max_tokens=200)
    assert len(plain.plans) == 200 and len(drafted.plans) < 60
