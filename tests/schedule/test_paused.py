"""Requests that wait for their readers: they cost the others nothing, and go on where they were."""

from __future__ import annotations

from driver import Driver, answer, prose

from kakera.contract.request import NO_LIMIT


def decoded(driver: Driver, steps: int) -> list[set[str]]:
    """Who decodes in each of so many steps."""
    for _ in range(steps):
        assert driver.step()
    return [{row.request_id for row in plan.decode} for plan in driver.plans[-steps:]]


def test_a_paused_request_is_left_out_while_others_go_on_and_misses_nothing():
    driver = Driver()
    slow, quick = prose(100, seed=1), prose(100, seed=2)
    driver.submit(slow, max_tokens=200, id="slow", allowed=5)
    driver.submit(quick, max_tokens=200, id="quick")
    assert decoded(driver, 100)[-90:] == [{"quick"}] * 90
    assert len(driver.text["slow"]) == 5 and driver.scheduler.stats().paused == 1
    driver.scheduler.allow("slow", 8)
    driver.scheduler.allow("slow", 7)  # what was allowed once stays so
    driver.scheduler.allow("unknown", 8)
    assert decoded(driver, 10) == [{"slow", "quick"}] * 3 + [{"quick"}] * 7
    driver.scheduler.allow("slow", NO_LIMIT)
    driver.run()
    assert driver.text["slow"] == answer(slow, 200) and driver.text["quick"] == answer(quick, 200)
    assert driver.cache.counters["preemptions"] == 0
    driver.assert_idle_is_clean()


def test_nobody_is_let_ahead_into_a_pause_and_who_comes_back_joins_at_once():
    driver = Driver()
    driver.submit(prose(100), max_tokens=200, id="slow", allowed=5)
    driver.submit(prose(100, seed=1), max_tokens=200, id="quick")
    decoded(driver, 10)
    driver.scheduler.allow("slow", 8)
    decoded(driver, 10)
    decoding = [
        ({row.request_id for row in plan.decode}, {plan.decode[i].request_id for i in plan.may_follow})
        for plan in driver.plans
        if not plan.prefill
    ]
    both, quick = {"slow", "quick"}, {"quick"}
    assert decoding[:5] == [(both, both)] * 3 + [(both, quick), (quick, quick)], "it ends before it would be ahead"
    back = next(i for i in range(5, 20) if decoding[i][0] == both)
    assert decoding[back : back + 4] == [(both, both)] * 2 + [(both, quick), (quick, quick)]


def test_with_nobody_else_there_is_nothing_to_compute_and_an_abort_ends_it():
    driver = Driver()
    driver.submit(prose(100), max_tokens=200, id="slow", allowed=3)
    while driver.step():
        pass
    stats = driver.scheduler.stats()
    assert (stats.running, stats.paused, stats.idle) == (1, 1, True)
    driver.scheduler.abort("slow")
    driver.run()
    assert driver.finished["slow"].reason == "abort" and driver.finished["slow"].usage.completion_tokens == 3
    driver.assert_idle_is_clean()


def test_whoever_can_run_gets_the_slots_of_those_that_wait_for_their_readers():
    driver = Driver(slots=2)
    prompts = {f"slow{i}": prose(300, seed=i) for i in range(5)}
    for name, prompt in prompts.items():
        driver.submit(prompt, max_tokens=100, id=name, allowed=2)
    while driver.step():
        pass
    assert [len(driver.text[name]) for name in prompts] == [2] * 5, "none of them waits for another's reader"
    driver.submit(prose(300, seed=9), max_tokens=30, id="quick")
    while driver.step():
        pass
    assert driver.finished["quick"].usage.completion_tokens == 30 and driver.scheduler.stats().paused == 5
    for name in prompts:
        driver.scheduler.allow(name, NO_LIMIT)
    before = driver.cache.counters["prefilled_tokens"]
    driver.run()
    assert {name: driver.text[name] for name in prompts} == {n: answer(p, 100) for n, p in prompts.items()}
    assert driver.cache.counters["prefilled_tokens"] - before < 5 * 2 * 64, "coming back is a prefix hit"
    driver.assert_idle_is_clean()


def test_pages_are_taken_from_those_that_wait_for_their_readers_first():
    driver = Driver(pages=12, slots=3)
    slow, quick, late = (prose(200, seed=seed) for seed in range(3))
    driver.submit(slow, max_tokens=100, id="slow", allowed=1)
    driver.submit(quick, max_tokens=250, id="quick")
    driver.submit(late, max_tokens=100, id="late")
    while "quick" not in driver.finished:
        assert driver.step()
    assert driver.cache.counters["preemptions"] == 1 and driver.scheduler.waiting.get("slow") is not None
    driver.scheduler.allow("slow", NO_LIMIT)
    driver.run()
    assert driver.text["slow"] == answer(slow, 100) and driver.text["late"] == answer(late, 100)
    driver.assert_idle_is_clean()


def test_a_paused_request_keeps_its_slot_and_pages_while_nobody_needs_them():
    driver = Driver(slots=2)
    driver.submit(prose(300), max_tokens=100, id="slow", allowed=2)
    for seed in range(1, 4):
        driver.submit(prose(300, seed=seed), max_tokens=20)
        while driver.step():
            pass
    assert driver.cache.counters["preemptions"] == 0 and driver.scheduler.stats().running == 1
