"""Who may be computed ahead, and that a scheduler keeps its side of it whoever is left out of plans meanwhile."""

from __future__ import annotations

import random

import pytest
from driver import Driver, answer, prose
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.contract.step import Segment, StepPlan
from kakera.schedule.ahead import followers
from kakera.schedule.scheduler import Scheduler


def row(name: str, end: int, tokens: int = 1) -> Segment:
    return Segment(name, 0, (5,) * tokens, end - tokens, sampled=tokens)


def test_all_that_go_on_follow_or_nobody():
    a, b, c = row("a", 65), row("b", 70), row("c", 100)
    assert followers([a, b, c], last=()) == (0, 1, 2)
    assert followers([a, b, c], last={"b", "other"}) == (0, 2)
    assert followers([a, b, c], last={"a", "b", "c"}) == () == followers([], last=())
    assert followers([a, row("full", 128)], last=()) == (), "the next token needs a page, and this one is saved behind"
    assert followers([a, row("full", 128)], last={"full"}) == (0,)
    assert followers([a, row("drafted", 80, tokens=3)], last=()) == ()


def leave_out(scheduler: Scheduler, rng: random.Random, often: float, patch: pytest.MonkeyPatch) -> None:
    """As a scheduler does that pauses requests: who pauses is let ahead no more, and left out behind that."""
    all_of, paused = scheduler._decoding, set()

    def decoding():
        paused.clear()
        paused.update(s.id for s in all_of() if rng.random() < often)
        return [s for s in all_of() if s.ahead or s.id not in paused]

    scheduler._decoding = decoding
    patch.setattr("kakera.schedule.scheduler.followers", lambda rows, last: followers(rows, {*last, *paused}))


@pytest.mark.slow
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), pages=st.sampled_from([10, 60]), often=st.sampled_from([0.0, 0.1, 0.6]))
def test_rows_that_are_left_out_now_and_then_say_what_they_would(seed, pages, often):
    check_game(seed, pages, often)


def test_the_games_do_let_rows_ahead_and_leave_others_out():
    plans = check_game(seed=0, pages=10, often=0.6)
    assert sum(len(plan.may_follow) for plan in plans) > 100
    assert sum(0 < len(plan.may_follow) < len(plan.decode) for plan in plans) > 20


def check_game(seed: int, pages: int, often: float) -> list[StepPlan]:
    rng = random.Random(seed)
    driver = Driver(pages=pages, slots=4)
    wanted = {}
    with pytest.MonkeyPatch.context() as patch:
        leave_out(driver.scheduler, rng, often, patch)
        play(driver, rng, wanted)
    assert driver.finished.keys() == wanted.keys()
    for name, (prompt, most) in wanted.items():
        right = answer(prompt, most, (1, 2, 3))
        assert driver.text[name] == right[: len(driver.text[name])]
        assert driver.finished[name].reason == "abort" or driver.text[name] == right
    driver.assert_idle_is_clean()
    return driver.plans


def play(driver: Driver, rng: random.Random, wanted: dict) -> None:
    for i in range(8):
        prompt, most = prose(rng.choice([20, 63, 130]), seed=i), rng.choice([1, 3, 70, 140])
        wanted[driver.submit(prompt, most, stop_token_ids=(1, 2, 3))] = (prompt, most)
    for _ in range(3000):
        if (plan := driver.scheduler.plan_step()) is not None:
            driver.plans.append(plan)
            driver.commit(plan)
        else:
            driver.note(driver.scheduler.take_events())
            if not driver.scheduler.running:  # else all were left out of this step
                break
        if rng.random() < 0.03:
            driver.scheduler.abort(rng.choice(list(wanted)))


def test_a_scheduler_that_leaves_out_who_ran_ahead_says_so_before_anything_is_computed():
    driver = Driver()
    driver.submit(prose(20), 9)
    while not (driver.step() and driver.plans[-1].may_follow):
        pass
    driver.scheduler._decoding = list
    with pytest.raises(AssertionError, match="let ahead"):
        driver.scheduler.plan_step()


def test_nobody_follows_where_all_end_or_a_prompt_is_beside():
    driver = Driver(chunk=64)
    driver.submit(prose(20), 3)
    driver.run()
    assert [plan.may_follow for plan in driver.plans] == [(), (0,), ()]
    driver.submit(prose(20, seed=1), 30)
    driver.step()
    driver.step()
    assert driver.plans[-1].may_follow == (0,)
    driver.submit(prose(300, seed=2), 2)
    driver.step()
    assert driver.plans[-1].prefill and driver.plans[-1].may_follow == ()


def test_a_row_that_ran_ahead_may_be_preempted():
    """By what makes room for others; its slot is given up, and it computes the token again in another one."""
    driver = Driver()
    name = driver.submit(prose(80), 30)
    while not (driver.step() and driver.plans[-1].may_follow):
        pass
    driver.scheduler._preempt(driver.scheduler.running.get(name))
    driver.run()
    assert driver.text[name] == answer(prose(80), 30)
