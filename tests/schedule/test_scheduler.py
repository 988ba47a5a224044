"""What a step holds, who waits for whom, and how requests end."""

from __future__ import annotations

import pytest
from driver import Driver, answer, message_ends, prose
from fake_runner import next_token

from kakera.contract.events import Progress, Tokens
from kakera.contract.grid import PAGE
from kakera.errors import RequestRefused


def test_prompt_that_can_never_fit_the_pool_is_refused_and_blocks_nobody():
    driver = Driver(pages=8)
    with pytest.raises(RequestRefused) as refused:
        driver.submit(prose(8 * PAGE + 1))
    assert (refused.value.status, refused.value.code, refused.value.param) == (
        400,
        "context_length_exceeded",
        "prompt",
    )
    assert driver.ask(prose(5)).reason == "length"


def test_prompt_that_fills_the_context_is_refused():
    driver = Driver(context=200)
    with pytest.raises(RequestRefused) as refused:
        driver.submit(prose(200), boundaries=message_ends(200))
    assert refused.value.param == "messages" and "200 tokens" in str(refused.value)
    assert driver.ask(prose(199), max_tokens=50).usage.completion_tokens == 1


def test_full_queue_is_429_and_an_id_is_used_once_at_a_time():
    """Free slots count: the queue's limit is for those who must wait, and all arrive between two steps."""
    driver = Driver(slots=3, max_waiting=2)
    driver.submit(prose(5), id="a")
    with pytest.raises(RequestRefused, match="not finished"):
        driver.submit(prose(5), id="a")
    for _ in range(4):
        driver.submit(prose(5))
    with pytest.raises(RequestRefused) as refused:
        driver.submit(prose(5))
    assert refused.value.status == 429
    driver.run()
    driver.submit(prose(5))


def test_large_max_tokens_runs_to_the_context_limit():
    driver = Driver(context=300)
    end = driver.ask(prose(100), max_tokens=10**9)
    assert end.reason == "length" and end.usage.completion_tokens == 200


def test_request_that_fills_the_whole_pool_alone_ends_with_length():
    driver = Driver(pages=4)
    end = driver.ask(prose(100), max_tokens=10**9)
    assert end.reason == "length" and end.usage.completion_tokens >= 4 * PAGE - 100
    assert driver.ask(prose(100), max_tokens=2).reason == "length"


def test_stop_token_ends_the_text_and_is_counted_but_not_shown():
    driver = Driver()
    prompt = prose(70)
    text = answer(prompt, 5)
    end = driver.ask(prompt, max_tokens=50, stop_token_ids=(text[3],))
    assert end.reason == "stop" and end.stop_token == text[3] and end.usage.completion_tokens == 4
    assert driver.text[end.request_id] == text[:3]


def test_min_tokens_keeps_the_stop_token_away():
    driver = Driver()
    prompt = prose(70)
    stop = next_token(prompt)
    end = driver.ask(prompt, max_tokens=5, min_tokens=5, stop_token_ids=(stop,))
    assert end.reason == "length" and end.usage.completion_tokens == 5


def test_echo_computes_the_whole_prompt_and_reports_it_once():
    driver = Driver(chunk=128)
    prompt = prose(300)
    driver.ask(prompt)
    end = driver.ask(prompt, max_tokens=0, prompt_logprobs=1)
    assert [entry.token for entry in driver.echo[end.request_id]] == list(prompt[1:])
    assert end.usage.cached_tokens == 0 and end.usage.miss_reason == "not used"
    assert end.reason == "length" and end.usage.completion_tokens == 0


def test_failing_row_fails_its_request_only():
    driver = Driver()
    good, bad = driver.submit(prose(500), max_tokens=30), driver.submit(prose(500, seed=1), max_tokens=30)
    driver.step()
    driver.runner.failing.add(bad)
    driver.run()
    assert driver.finished[bad].reason == "error" and driver.finished[bad].message == "told to fail"
    assert driver.text[good] == answer(prose(500), 30)
    driver.assert_idle_is_clean()


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_abort_frees_everything_within_a_step(when):
    driver = Driver(slots=1, chunk=64)
    if when == "queued":
        driver.submit(prose(500, seed=1), max_tokens=2)
        driver.step()
    name = driver.submit(prose(200), max_tokens=4000)
    for _ in range({"queued": 1, "prefill": 2, "decode": 20}[when]):
        driver.step()
    driver.scheduler.abort(name)
    driver.note(driver.scheduler.take_events())
    assert driver.finished[name].reason == "abort"
    driver.run()
    driver.assert_idle_is_clean()


def test_abort_of_an_unknown_id_is_ignored():
    driver = Driver()
    driver.scheduler.abort("nobody")
    assert driver.scheduler.take_events() == []


def test_preempted_request_gives_the_same_text_and_usage():
    driver = Driver(pages=12, slots=2)
    prompts = [prose(200), prose(200, seed=1)]
    names = [driver.submit(prompt, max_tokens=350) for prompt in prompts]
    driver.run()
    assert driver.cache.counters["preemptions"] > 0
    for name, prompt in zip(names, prompts, strict=True):
        assert driver.text[name] == answer(prompt, 350)
        assert driver.finished[name].usage.prompt_tokens == 200
    resumed = driver.cache.counters["checkpoints_restored"]
    assert resumed >= 1, "resuming is a prefix hit"


@pytest.mark.slow
def test_preempted_requests_do_not_come_back_too_early():
    driver = Driver(pages=40, slots=8)
    for i in range(8):
        driver.submit(prose(100 + 64 * i, seed=i), max_tokens=500)
    driver.run()
    assert 0 < driver.cache.counters["preemptions"] <= 3


def test_short_prompt_does_not_wait_behind_a_long_one():
    driver = Driver(pages=3000, chunk=512)
    driver.submit(prose(150_000), id="long", max_tokens=1)
    driver.step()
    driver.submit(prose(100, seed=1), id="short", max_tokens=1)
    for _ in range(2):
        driver.step()
    assert "short" in driver.finished and "long" not in driver.finished


def test_long_prompt_moves_on_under_a_stream_of_short_ones():
    driver = Driver(pages=3000, chunk=256, slots=4)
    driver.submit(prose(10_000), id="long", max_tokens=1)
    for i in range(60):
        driver.submit(prose(150, seed=1 + i), max_tokens=1)
        driver.step()
    assert "long" in driver.finished


def test_short_prompts_share_a_step():
    driver = Driver(slots=4)
    for i in range(4):
        driver.submit(prose(60, seed=i), max_tokens=2)
    driver.step()
    assert len(driver.plans[0].prefill) == 4
    driver.run()


@pytest.mark.slow
def test_streams_stay_fluent_beside_a_long_prefill():
    """A device that takes 20 ms a step and 1 ms a prompt token: full chunks would be 4 s, the target is 0.25 s."""
    driver = Driver(
        pages=3000, chunk=4096, seconds=lambda plan: 0.02 + 0.001 * sum(len(r.tokens) for r in plan.prefill)
    )
    driver.submit(prose(70), max_tokens=300, id="stream")
    for _ in range(5):
        driver.step()
    driver.submit(prose(60_000, seed=1), max_tokens=1, id="long")
    gaps, widths = [], []
    for _ in range(100):
        before = driver.clock.now
        driver.step()
        gaps.append(driver.clock.now - before)
        widths.append(sum(len(row.tokens) for row in driver.plans[-1].prefill))
    assert max(gaps) < 0.30
    assert min(widths[10:]) >= 128, "and the prompt gets what the target leaves"


def test_prefill_segments_stay_on_the_page_grid():
    driver = Driver(chunk=200, slots=3)
    lengths = {driver.submit(prose(777 + i, seed=i), max_tokens=2): 777 + i for i in range(3)}
    driver.run()
    for plan in driver.plans:
        for row in plan.prefill:
            assert row.start % PAGE == 0 and (row.end % PAGE == 0 or row.end == lengths[row.request_id])
            assert row.sampled == (row.end == lengths[row.request_id])


def test_long_prefill_reports_progress():
    driver = Driver(chunk=128)
    name = driver.submit(prose(300), max_tokens=1)
    events = []
    while plan := driver.scheduler.plan_step():
        assert driver.scheduler.stats().steps == plan.step - 1, "a planned step has not finished"
        events += driver.scheduler.take_events()
        if plan.step == 1:
            assert events == [Progress(name, 0, 300)], "known before the first step is executed"
        events += driver.scheduler.commit(plan, driver.runner.execute(plan, driver.scheduler.sampling_of(plan)))
    assert events[1:3] == [Progress(name, 128, 300), Progress(name, 256, 300)]
    assert isinstance(events[3], Tokens)


def test_the_first_progress_is_what_the_cache_had():
    driver = Driver(chunk=128)
    driver.ask(prose(300), max_tokens=1)
    name = driver.submit(prose(300), max_tokens=1)
    plan = driver.scheduler.plan_step()
    (progress,) = driver.scheduler.take_events()
    (active,) = driver.scheduler.stats().active
    assert progress == Progress(name, 256, 300) and (active.done, active.cached_tokens) == (256, 256)
    driver.scheduler.commit(plan, driver.runner.execute(plan, driver.scheduler.sampling_of(plan)))


def test_usage_has_times_and_stats_count():
    driver = Driver(slots=1, chunk=64)
    driver.submit(prose(128), max_tokens=3, id="a")
    driver.submit(prose(128, seed=1), max_tokens=3, id="b")
    driver.run()
    usage = driver.finished["b"].usage
    assert usage.queue_seconds == pytest.approx(0.04) and usage.prefill_seconds == pytest.approx(0.02)
    assert usage.decode_seconds == pytest.approx(0.02)
    stats = driver.scheduler.stats()
    assert stats.steps == 8 and stats.counters["finished: length"] == 2 and stats.pages_free == stats.pages_total
    assert 0 < stats.host_bytes_used <= stats.host_bytes_total
