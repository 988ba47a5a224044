"""What the host does for a step does not grow with the context: the GPU waits for it."""

import time
import tracemalloc

import pytest
from msgspec.structs import replace

from kakera.cache.host import CacheSizes
from kakera.cache.prefix import PrefixCache
from kakera.contract.grid import PAGE
from kakera.contract.request import Request, Sampling, packed
from kakera.contract.step import RowResult, StepPlan, StepResult, encode_plan
from kakera.schedule.limits import Limits
from kakera.schedule.scheduler import Scheduler

SHORT, LONG = 4 * 1024, 192 * 1024
ROOM = 2 * PAGE


def make(pages: int, slots: int) -> Scheduler:
    sizes = CacheSizes(pages, 4096, checkpoint_bytes=1, sink_bytes=1, page_bytes=1, windowed=True)
    return Scheduler(Limits(LONG + 8 * ROOM, pages, slots, 8192), PrefixCache(sizes))


def prompt(tokens: int, seed: int = 0):
    return packed((seed + 7 * i) % 50_000 for i in range(tokens))


def ask(scheduler: Scheduler, name: str, tokens) -> None:
    scheduler.submit(Request(name, tokens, Sampling(max_tokens=LONG, seed=0, loop_guard=True)))


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan_step()
    assert plan is not None
    rows = tuple(RowResult(row.request_id, (plan.step % 50_000,) if row.sampled else ()) for row in plan.rows)
    scheduler.commit(plan, StepResult(plan.step, rows, 0.008))
    return plan


def decoding(context: int, batch: int = 1) -> Scheduler:
    """`batch` requests that decode behind `context` tokens, 3 tokens past a page's border."""
    scheduler = make(batch * (context + 4 * ROOM) // PAGE, batch)
    for i in range(batch):
        ask(scheduler, f"r{i}", prompt(context, seed=i))
    while len(step(scheduler).decode) < batch:
        pass
    while (len(scheduler.running.oldest_first()[-1].tokens) - 3) % PAGE:
        step(scheduler)
    return scheduler


def seconds_of_a_step(scheduler: Scheduler) -> float:
    """The quickest of many, none of which crosses a page's border: what other programs take is left out."""
    times = []
    for _ in range(PAGE - 8):
        began = time.perf_counter()
        step(scheduler)
        scheduler.stats()
        times.append(time.perf_counter() - began)
    return min(times)


def bytes_of_a_step(scheduler: Scheduler) -> int:
    """The most that a step holds at once beyond what was there before, in bytes."""
    step(scheduler)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    step(scheduler)
    most = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return most


@pytest.mark.parametrize("batch", [1, 4])
def test_a_step_takes_no_longer_behind_a_long_context(batch):
    short, long = (seconds_of_a_step(decoding(context, batch)) for context in (SHORT, LONG))
    assert long < 5 * short, "a copy of the tokens makes it 20"


def test_a_step_copies_neither_page_tables_nor_tokens():
    short, long = (bytes_of_a_step(decoding(context)) for context in (SHORT, LONG))
    assert long - short < PAGE, "a table has 4 bytes a page, 11 KB more"


def test_a_step_plan_is_a_short_message_whatever_the_context():
    scheduler = decoding(LONG)
    plans = [step(scheduler) for _ in range(2 * PAGE)]  # over two borders of pages, with a save at each
    sizes = [len(encode_plan(replace(plan, before=(), after=()))) for plan in plans]
    assert max(sizes) < 100, "less than 200 bytes with an id of 41 letters, as chat completions have"
    assert sum(map(len, map(encode_plan, plans))) < 200 * len(plans)


def test_a_page_border_costs_little_more_than_a_step():
    scheduler = decoding(LONG)
    usual = seconds_of_a_step(scheduler)
    borders = []
    for _ in range(4):
        while len(scheduler.running.oldest_first()[-1].tokens) % PAGE:
            step(scheduler)
        began = time.perf_counter()
        step(scheduler)
        step(scheduler)
        borders.append(time.perf_counter() - began)
    assert min(borders) < 20 * usual


def test_a_request_that_does_not_fit_is_not_matched_again_in_every_step(monkeypatch):
    scheduler = make(pages=(LONG + 4 * ROOM) // PAGE, slots=2)
    ask(scheduler, "first", prompt(LONG))
    while not step(scheduler).decode:
        pass
    ask(scheduler, "second", prompt(SHORT, seed=1))
    matches = []
    match = scheduler.cache.match
    monkeypatch.setattr(scheduler.cache, "match", lambda *given: matches.append(given) or match(*given))
    for _ in range(3 * PAGE):
        step(scheduler)
    assert len(scheduler.waiting) == 1 and 1 <= len(matches) <= 4, "once, and once a page that the first completes"
    scheduler.abort("first")
    step(scheduler)
    assert len(scheduler.waiting) == 0, "it is let in as soon as it fits"


def test_a_prompt_that_comes_packed_is_taken_as_it_is():
    """Its tokens never become Python's integers, of which 192K take 6 MB and, at each hand, 10 ms."""
    scheduler = make(pages=LONG // PAGE + 2, slots=1)
    tokens = prompt(LONG)
    tracemalloc.start()
    ask(scheduler, "one", tokens)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20 * LONG, "the tokens, and the keys of their pages with what they are cut from"
