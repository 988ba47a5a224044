"""How prefix caches of hybrid models were seen to fail: each story with the smallest input that shows it."""

from __future__ import annotations

import random

import pytest
from driver import Driver, answer, floor64, message_ends, prose

from kakera.cache.integrity import check_integrity
from kakera.contract.grid import PAGE
from kakera.contract.request import Boundary
from kakera.contract.step import PromotePages, RestoreCheckpoint


def test_checkpoint_does_not_land_in_the_unique_tokens_only():
    """1,500 shared + 700 unique tokens, eight times: most of 1,500 from the second request on."""
    driver = Driver()
    cached = [driver.cached(prose(1500) + prose(700, seed=1 + i)) for i in range(8)]
    assert cached[0] == 0
    assert cached[1] >= 1024
    assert all(tokens == floor64(1500) for tokens in cached[2:])


BORDERS = (63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 448, 480, 511, 512, 513, 1023, 1024, 1025)


@pytest.mark.parametrize("shared", BORDERS)
def test_a_shared_prefix_of_any_length_is_reused(shared):
    """Without messages to go by: of its whole pages at least half from the second visit on, a point of the sparse grid,
    and all from the third on, the branch point that the second has saved. One after the other, or all at once."""
    prompts = [prose(shared) + prose(100, seed=1 + i) for i in range(4)]
    one_by_one, at_once = Driver(), Driver(slots=4)
    cached = [one_by_one.cached(prompt) for prompt in prompts]
    whole, least = floor64(shared), floor64(floor64(shared) // 2 + 63)
    assert cached[0] == 0 and least <= cached[1] <= whole and cached[2:] == [whole, whole]
    names = [at_once.submit(prompt) for prompt in prompts]
    at_once.run()
    assert all(at_once.finished[name].usage.cached_tokens >= least for name in names[1:])
    assert [at_once.cached(prose(shared) + prose(100, seed=9 + i)) for i in range(2)][-1] == whole


@pytest.mark.parametrize("kind", ["system", "message"])
def test_a_shared_first_message_of_any_length_is_reused_on_the_second_visit(kind):
    for shared in BORDERS:
        driver, end = Driver(), [Boundary(shared, kind)]
        cached = [driver.cached(prose(shared) + prose(100, seed=1 + i), boundaries=end) for i in range(3)]
        assert cached == [0, floor64(shared), floor64(shared)], shared


@pytest.mark.parametrize("length", range(PAGE, 3 * PAGE + 2))
def test_identical_prompt_is_reused_but_for_the_last_page(length):
    """Every length modulo 64, and at least one token is left to compute."""
    driver = Driver()
    driver.ask(prose(length))
    before = driver.runner.computed_tokens
    end = driver.ask(prose(length), max_tokens=1)
    assert length - PAGE <= end.usage.cached_tokens < length
    assert driver.runner.computed_tokens - before == length - end.usage.cached_tokens
    assert end.usage.miss_reason in ("", "shorter than a page")


def test_next_turn_resumes_where_the_answer_ended():
    """The client sends prompt + answer + new message: everything but the tail is a hit, generated tokens included."""
    driver = Driver()
    prompt = prose(300)
    driver.ask(prompt, max_tokens=200)
    history = prompt + tuple(answer(prompt, 200))
    cached = driver.cached(history + prose(50, seed=3), boundaries=message_ends(300))
    assert cached == floor64(300 + 200 - 1)


def test_client_that_drops_old_thinking_rereads_one_turn():
    """Five turns; each render lacks the former turns' thinking, so it diverges right behind the last user message."""
    driver = Driver(pages=400)
    history, ends = prose(500), []
    for turn in range(5):
        history += prose(220, seed=10 + turn)
        ends.append(len(history))
        cached = driver.cached((*history, 1, 2, 3), max_tokens=150, boundaries=message_ends(*ends, system=500))
        if turn > 0:
            assert cached >= floor64(ends[-2])
        history += (1, *prose(40, seed=50 + turn))  # the visible answer only: not the tokens that were generated


def test_two_conversations_share_a_system_prompt_from_the_first_visit():
    driver = Driver()
    system = prose(1000)
    first, second = (
        driver.cached(system + prose(300, seed=i), boundaries=message_ends(1300, system=1000)) for i in (1, 2)
    )
    assert first == 0
    assert second == floor64(1000)


def test_parallel_choices_of_one_prompt_compute_it_once():
    driver = Driver(slots=4)
    prompt = prose(2000)
    for choice in range(4):
        driver.submit(prompt, max_tokens=3, choice=choice)
    driver.run()
    assert driver.runner.computed_tokens < 2000 + 4 * (PAGE + 3)


def test_parallel_prompts_with_a_shared_prefix_compute_it_once():
    driver = Driver(slots=8, pages=400)
    for i in range(8):
        driver.submit(prose(1500) + prose(700, seed=1 + i), max_tokens=1)
    driver.run()
    unique = 8 * (700 + 1500 - floor64(1500))
    assert driver.runner.computed_tokens <= floor64(1500) + unique


def test_waiting_for_a_shared_prefix_holds_up_nobody_else():
    driver = Driver(slots=4, chunk=64, pages=400)
    driver.submit(prose(3000), id="first")
    driver.submit(prose(3000), id="same")
    driver.submit(prose(20, seed=9), id="other", max_tokens=1)
    while "other" not in driver.finished:
        driver.step()
    assert driver.scheduler.running.get("first").prefilling
    assert "same" in driver.scheduler.waiting
    driver.run()


def test_waiting_for_a_shared_prefix_ends_when_the_other_is_aborted():
    driver = Driver(slots=4, chunk=64)
    driver.submit(prose(1000), id="first")
    driver.submit(prose(1000), id="same")
    driver.step()
    driver.scheduler.abort("first")
    driver.run()
    assert driver.finished["same"].reason == "length"


@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize("in_flight", [True, False])
def test_an_aborted_prompt_goes_on_where_it_stopped(in_flight, windowed):
    """After any number of steps, also past the last save point, between steps and within one."""
    for steps in range(1, 8):
        driver = Driver(chunk=256, windowed=windowed)
        prompt = prose(2000)
        name = driver.submit(prompt)
        for _ in range(steps):
            driver.step()
        if in_flight and (plan := driver.scheduler.plan_step()):
            driver.scheduler.abort(name)
            driver.commit(plan)
        driver.scheduler.abort(name)
        assert driver.finished.get(name) or driver.scheduler.take_events()[-1].reason == "abort"
        assert driver.cached(prompt) == min(256 * (steps + in_flight), floor64(1999)), steps
        driver.assert_idle_is_clean()


def test_a_preempted_prompt_goes_on_where_it_stopped():
    driver = Driver(pages=89, chunk=64, slots=2)
    driver.submit(prose(443), id="old", max_tokens=120)
    driver.submit(prose(5120, seed=1), id="young", max_tokens=2)
    computed = 0
    while not driver.cache.counters["preemptions"] and driver.step():
        computed = max(computed, sum(a.done for a in driver.scheduler.stats().active if a.id == "young"))
    assert 256 < computed < 5120 and driver.cache.counters["preemptions"] == 1
    driver.run()
    assert driver.runner.computed_tokens == 443 + 119 + 5120 + 1, "nothing is computed twice"


def test_prompts_that_were_left_keep_few_places_and_take_none_from_better_ones():
    driver = Driver(host=12, chunk=512, pages=400)
    for i in range(3):
        driver.ask(prose(300, seed=100 + i), boundaries=message_ends(300, system=200))
    for i in range(12):
        name = driver.submit(prose(3000, seed=i))
        for _ in range(3):
            driver.step()
        driver.scheduler.abort(name)
        driver.run()
        kinds = [record.kind for record in driver.cache.checkpoints.published.values()]
        assert kinds.count("rest") <= 4
    assert driver.cached(prose(3000, seed=11)) == 1536
    driver.assert_idle_is_clean()


def test_prefix_survives_eviction_from_the_device_in_host_memory():
    """Another long prompt takes all device pages; the first is demoted, then promoted with its sink."""
    driver = Driver(pages=20, host=20)
    prompt = prose(1000)
    driver.ask(prompt)
    driver.ask(prose(1200, seed=1))
    assert driver.cache.counters["pages_demoted"] > 0
    before = len(driver.plans)
    assert driver.cached(prompt) == floor64(999)
    actions = [action for plan in driver.plans[before:] for action in plan.before]
    kinds = [type(action) for action in actions]
    assert kinds.index(PromotePages) < kinds.index(RestoreCheckpoint)
    restore = next(action for action in actions if isinstance(action, RestoreCheckpoint))
    assert restore.sink is not None
    driver.assert_idle_is_clean()


def test_without_host_room_for_pages_the_prefix_is_recomputed_and_the_reason_is_told():
    driver = Driver(pages=20, host=1.2, windowed=True)
    prompt = prose(1000)
    driver.ask(prompt)
    driver.ask(prose(1200, seed=1))
    end = driver.ask(prompt)
    assert end.usage.cached_tokens == 0
    assert end.usage.miss_reason in ("evicted pages", "evicted checkpoint")


def test_no_host_memory_at_all_still_answers():
    driver = Driver(host=0)
    assert [driver.cached(prose(500)) for _ in range(2)] == [0, 0]
    assert not any(row.saves for plan in driver.plans for row in plan.rows)


def test_sink_is_kept_once_per_first_page():
    driver = Driver()
    for i in range(3):
        driver.ask(prose(200) + prose(300, seed=1 + i))
        assert driver.cache.host.counts["sink"] == 1


def test_salt_separates_caches():
    driver = Driver()
    driver.ask(prose(500), salt=b"one")
    assert driver.cached(prose(500), salt=b"two") == 0
    assert driver.cached(prose(500), salt=b"one") == floor64(499)


def test_without_cache_nothing_is_read_and_nothing_is_left():
    driver = Driver()
    driver.ask(prose(500))
    before = driver.scheduler.stats()
    end = driver.ask(prose(500), max_tokens=200, cache=False)
    assert (end.usage.cached_tokens, end.usage.miss_reason) == (0, "not used")
    driver.ask(prose(500, seed=1), max_tokens=200, cache=False)
    after = driver.scheduler.stats()
    assert (after.pages_cached, after.host_bytes_used) == (before.pages_cached, before.host_bytes_used)
    assert driver.cached(prose(500, seed=1)) == 0 and driver.cached(prose(500)) == floor64(499)


def test_without_cache_a_request_waits_for_nobodys_checkpoint_and_nobody_for_its():
    driver = Driver(chunk=64)
    first = driver.submit(prose(2000), cache=False)
    driver.step()
    names = [driver.submit(prose(2000), cache=False), driver.submit(prose(2000))]
    driver.step()
    assert {active.id for active in driver.scheduler.stats().active} == {first, *names}
    driver.run()
    assert all(driver.text[name] == answer(prose(2000), 4) for name in (first, *names))


def test_a_running_request_keeps_two_rolling_checkpoints_at_most():
    driver = Driver()
    driver.submit(prose(100), max_tokens=400)
    while driver.step():
        kinds = [record.kind for record in driver.cache.checkpoints.published.values()]
        assert kinds.count("rolling") <= 1 and len(driver.cache.checkpoints.reserved) <= 1


@pytest.mark.slow
def test_slots_and_pages_return_after_half_of_fifty_streams_are_killed():
    rng = random.Random(3)
    driver = Driver(slots=6, pages=100, chunk=128)
    free = driver.scheduler.running.slots.free
    names = [driver.submit(prose(300) + prose(rng.randrange(200), seed=i), max_tokens=90) for i in range(50)]
    doomed = rng.sample(names, 25)
    while doomed:
        plan = driver.scheduler.plan_step()
        if rng.random() < 0.3:
            driver.scheduler.abort(doomed.pop())  # while a plan is in flight
        if plan is not None:
            driver.commit(plan)
        if doomed and rng.random() < 0.3:
            driver.scheduler.abort(doomed.pop())  # between steps, running or queued
        check_integrity(driver.cache)
    driver.run()
    assert driver.scheduler.running.slots.free == free
    reasons = [driver.finished[name].reason for name in names]
    assert 15 <= reasons.count("abort") <= 25 and len(reasons) == 50
    driver.assert_idle_is_clean()


def test_a_flush_forgets_what_nobody_holds_and_running_requests_go_on():
    driver = Driver()
    driver.ask(prose(300, seed=1))
    held = prose(700, seed=2)
    name = driver.submit(held, max_tokens=70)
    for _ in range(4):
        driver.step()
    before = driver.scheduler.stats()
    flushed = driver.flush()
    after = driver.scheduler.stats()
    assert flushed.pages == before.pages_cached > 0 and after.pages_cached == 0
    assert flushed.checkpoints > 0 and flushed.host_bytes == before.host_bytes_used - after.host_bytes_used > 0
    driver.run()
    assert driver.text[name] == answer(held, 70)
    assert driver.cached(prose(300, seed=1)) == 0
    driver.ask(held)
    assert driver.cached(held) == 640, "caching goes on"


def test_running_requests_show_how_far_they_are():
    driver = Driver(chunk=128)
    driver.ask(prose(256) + prose(1, seed=2), boundaries=message_ends(256))
    name = driver.submit(prose(256) + prose(400, seed=3), max_tokens=3)
    driver.step()
    (active,) = driver.scheduler.stats().active
    assert (active.id, active.prompt_tokens, active.cached_tokens) == (name, 656, 256)
    assert active.cached_tokens < active.done < active.target == 656 and active.generated == 0
    while not (active := driver.scheduler.stats().active[0]).generated:
        driver.step()
    assert active.done == active.target
    driver.run()
    assert driver.scheduler.stats().active == ()
