"""Random traffic on tiny pools: preemption, demotion, aborts and failures at any time. The fake runner checks reads."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from driver import Driver, answer, message_ends, prose
from fake_disk import FakeDisk
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.cache.integrity import check_integrity
from kakera.contract.request import NO_LIMIT
from kakera.contract.step import StepPlan
from kakera.errors import RequestRefused

MAX_TOKENS = 200


def conversation_prompt(rng: random.Random) -> tuple[tuple[int, ...], list]:
    """One of a few system prompts, then one of a few continuations, cut anywhere: prefixes are shared at all depths."""
    system = prose(rng.choice([30, 64, 130, 200]), seed=rng.randrange(2))
    turns, ends = system, []
    for turn in range(rng.randrange(4)):
        turns += prose(rng.randrange(1, 150), seed=10 * (turn + 1) + rng.randrange(2))
        ends.append(len(turns))
    return turns, message_ends(*ends, system=len(system))


def play(
    seed: int,
    pages: int,
    slots: int,
    host: float,
    windowed: bool,
    steps: int,
    mishaps: float = 0.1,
    drafter=None,
    disk=None,
    watch=lambda driver: None,
    lent=0.0,
) -> Driver:
    """`watch` is called first of all, and after each plan and each step. `lent`: how often memory goes or comes; all of
    it goes and comes at once, as in a sleep, as often as it is lent by parts."""
    rng, private = random.Random(seed), random.Random(seed)
    driver = Driver(
        pages=pages,
        slots=slots,
        chunk=rng.choice([64, 128, 512]),
        host=host,
        windowed=windowed,
        saves=rng.choice([1, 2, 2**31]),
        drafter=drafter,
        disk=disk,
        seconds=(lambda plan: 5.0) if disk else None,  # pauses come often
    )
    driver.scheduler.limits = replace(driver.scheduler.limits, room=private.choice([0, 0, 100]))
    watch(driver)
    wanted: dict[str, tuple] = {}
    for _ in range(steps):
        if rng.random() < 0.35:
            prompt, ends = conversation_prompt(rng)
            sampling = {"max_tokens": rng.choice([0, 1, 5, 70, MAX_TOKENS]), "stop_token_ids": (1, 2)}
            sampling["min_tokens"] = min(rng.choice([0, 0, 20]), sampling["max_tokens"])
            sampling["prompt_logprobs"] = 1 if rng.random() < 0.1 else None
            allowed = rng.choice([NO_LIMIT, NO_LIMIT, 1, 30])
            try:
                salt, cache = rng.choice([b"", b"", b"x"]), private.random() >= mishaps
                name = driver.submit(
                    prompt,
                    boundaries=ends,
                    salt=salt,
                    cache=cache,
                    allowed=allowed,
                    client=private.choice("ab"),
                    background=private.random() < 0.3,
                    **sampling,
                )
            except RequestRefused:
                assert len(prompt) + 1 > pages * 64
            else:
                wanted[name] = (prompt, sampling)
        live = [name for name in wanted if name not in driver.finished]
        if live and rng.random() < mishaps / 2:
            driver.runner.failing.add(rng.choice(live))
        if rng.random() < mishaps / 5:
            driver.flush()
        if live and rng.random() < 0.3:
            reader = rng.choice(live)
            driver.scheduler.allow(reader, len(driver.text[reader]) + rng.choice([1, 30]))
        if private.random() < lent:
            driver.resize(private.choice([1, pages // 2, pages - 1, pages]), private.randrange(slots) + 1)
        preemptions = driver.cache.counters["preemptions"]
        if private.random() < lent:
            driver.sleep()
        plan = driver.scheduler.plan_step()
        check_integrity(driver.cache)
        watch(driver)
        if plan is not None:
            check_rows(driver, plan, driver.cache.counters["preemptions"] > preemptions)
        if live and rng.random() < mishaps:
            driver.scheduler.abort(rng.choice(live))
        if plan is not None:
            driver.plans.append(plan)
            driver.commit(plan)
        else:
            driver.note(driver.scheduler.take_events())
        watch(driver)
    for name in wanted:
        driver.scheduler.allow(name, NO_LIMIT)
    driver.resize(pages, slots)
    driver.run()
    check_answers(driver, wanted)
    return driver


def check_rows(driver: Driver, plan: StepPlan, preempted: bool) -> None:
    """Whoever the last plan let follow decodes, unless it has ended or lost its slot; whoever waits for its reader does
    not."""
    latest = driver.plans[-1] if driver.plans else StepPlan(0)
    rows = {row.request_id for row in plan.decode}
    let = {latest.decode[i].request_id for i in latest.may_follow}
    assert preempted or let - driver.finished.keys() <= rows
    assert not any(driver.scheduler.running.get(name).paused for name in rows)


def check_answers(driver: Driver, wanted: dict[str, tuple]) -> None:
    assert driver.finished.keys() == wanted.keys()
    room = driver.cache.sizes.pages * 64
    for name, (prompt, sampling) in wanted.items():
        end = driver.finished[name]
        right = answer(prompt, sampling["max_tokens"], sampling["stop_token_ids"], sampling["min_tokens"])
        got = driver.text[name]
        assert got == right[: len(got)], "batching, preemption or caching changed an answer"
        if end.reason in ("stop", "length"):
            assert len(got) == len(right) or len(prompt) + len(got) >= room
            if sampling["prompt_logprobs"] is not None:
                assert [entry.token for entry in driver.echo[name]] == list(prompt[1:])


@pytest.mark.slow
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    pages=st.sampled_from([8, 12, 20, 60]),
    slots=st.sampled_from([1, 2, 5]),
    host=st.sampled_from([0, 0.5, 1.2, 2.5, 6, 40]),
    windowed=st.booleans(),
)
def test_random_traffic_is_answered_right_and_leaves_nothing_behind(seed, pages, slots, host, windowed):
    play(seed, pages, slots, host, windowed, steps=80).assert_idle_is_clean()


@pytest.mark.slow
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    pages=st.sampled_from([8, 20, 60]),
    slots=st.sampled_from([1, 2, 5]),
    host=st.sampled_from([0, 1.2, 40]),
    windowed=st.booleans(),
)
def test_memory_that_goes_and_comes_back_changes_no_answer(seed, pages, slots, host, windowed):
    play(seed, pages, slots, host, windowed, steps=80, mishaps=0.03, lent=0.2).assert_idle_is_clean()


@pytest.mark.slow
def test_the_traffic_does_reach_preemption_demotion_and_promotion():
    driver = play(seed=5, pages=20, slots=5, host=6, windowed=True, steps=400, mishaps=0.01)
    happened = driver.cache.counters
    for event in ("preemptions", "pages_demoted", "pages_promoted", "pages_evicted", "checkpoints_evicted"):
        assert happened[event] > 0, event
    assert happened["cached_tokens"] > 0.1 * happened["prompt_tokens"]
    driver.assert_idle_is_clean()


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.sampled_from([12, 20, 60]),
    host=st.sampled_from([1.2, 2.5, 6, 40]),
    windowed=st.booleans(),
)
def test_a_disk_that_breaks_and_forgets_changes_no_answer_over_restarts(seed, pages, host, windowed):
    disk = FakeDisk(seed)
    for life in range(3):
        driver = play(seed + life, pages, 3, host, windowed, steps=40, disk=disk)
        if life % 2:
            driver.stop()
        driver.assert_idle_is_clean()


@pytest.mark.slow
def test_what_conversations_held_is_hit_after_a_restart():
    disk = FakeDisk(1, faults=0.0)
    first = play(1, 60, 3, 40, True, steps=100, mishaps=0.01, disk=disk)
    first.stop()
    second = play(1, 60, 3, 40, True, steps=100, mishaps=0.01, disk=disk)
    hits, before = second.cache.counters, first.cache.counters
    assert hits["disk_hits"] >= 5 and hits["cached_tokens"] > before["cached_tokens"]
    second.assert_idle_is_clean()


def test_a_disk_that_hangs_holds_nobody_for_long():
    disk = FakeDisk(1, faults=0.0)
    prompt = prose(400, seed=1)
    first = Driver(disk=disk, seconds=lambda plan: 5.0)
    first.ask(prompt, boundaries=message_ends(400))
    first.stop()
    disk.hangs = True
    second = Driver(disk=disk)
    names = [second.submit(prompt), second.submit(prose(100, seed=2))]
    second.run()
    assert second.finished.keys() == set(names) and second.cache.imports.live
    assert second.finished[names[0]].usage.queue_seconds > 10 > second.finished[names[1]].usage.queue_seconds
    assert second.cached(prose(400, seed=1) + prose(64, seed=3)) > 0, "from memory; the disk is not asked again"
