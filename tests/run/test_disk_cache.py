"""Prefixes that survive a restart: what comes back from the disk has the bits of what a process kept, or is a miss."""

from __future__ import annotations

import logging
import multiprocessing
import random
import time
from dataclasses import replace
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from run_world import CODECS, World, ask, equal, tiny_plan, tokens_of

from kakera.contract.request import Boundary
from kakera.disk.home import DiskCache
from kakera.run.build import build_engine
from kakera.run.generate import Completion
from kakera.run.store import open_disk
from kakera.schedule import disk as schedule_disk

LIMIT = 256 * 2**20


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_disk, "PAUSE_SECONDS", 0.0)


def world(directory: Path, home: Path | None, kv: str = "int2", **changes: object) -> World:
    wanted = DiskCache(home, LIMIT) if home else None
    return World(build_engine(directory, tiny_plan(directory, kv, **changes), disk=wanted)).watch()


def cached(completion: Completion) -> int:
    assert completion.finished is not None
    return completion.finished.usage.cached_tokens


def stop(world: World) -> None:
    """As at SIGTERM."""
    world.engine.keep(10.0)


def idle(world: World) -> None:
    """Steps of an engine that has nothing to compute, until it has nothing to write either."""
    for _ in range(1000):
        world.engine.step()
        if not world.engine.fetching:
            break
    assert world.engine.scheduler.disk is not None
    assert world.engine.scheduler.disk.tier.tier.settle(10)  # type: ignore[attr-defined]


def turns(number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A first prompt and the next turn's, which has it as its prefix."""
    first = tokens_of(number, 200 + 70 * number)
    return first, first + tokens_of(1000 + number, 90)


@pytest.mark.parametrize("kv", CODECS)
def test_the_next_turn_in_a_new_process_is_that_of_one_that_went_on(tiny_model: Path, tmp_path: Path, kv: str) -> None:
    conversations = [turns(number) for number in range(3)]
    kept, before = world(tiny_model, None, kv), world(tiny_model, tmp_path, kv)
    for here in (kept, before):
        for number, (first, _) in enumerate(conversations):
            here.one(ask(f"a{number}", first, boundaries=[len(first)]))
    stop(before)
    after = world(tiny_model, tmp_path, kv)
    for number, (_, second) in enumerate(conversations):
        there, here = (each.one(ask(f"b{number}", second)) for each in (kept, after))
        assert here.tokens == there.tokens and cached(here) == cached(there) > 0
        assert equal(kept.seen[f"b{number}"], after.seen[f"b{number}"])
    assert after.cache.counters["disk_hits"] == 3
    after.check_idle()
    stop(after)


@pytest.mark.parametrize("length", [250, 256])
def test_a_prompt_that_is_on_the_disk_to_its_last_token_advances_no_state_twice(
    tiny_model: Path, tmp_path: Path, length: int
) -> None:
    """Sent again after a restart; the state behind 256 tokens is no use to a prompt of 256."""
    prompt = tokens_of(3, length)
    before = world(tiny_model, tmp_path)
    first = before.one(ask("a", prompt, 1, boundaries=[length]))
    stop(before)
    after = world(tiny_model, tmp_path)
    again = after.one(ask("a", prompt, 1))
    assert again.tokens == first.tokens and cached(again) == (192 if length == 250 else 0)
    stop(after)


def test_a_pause_is_written_beside_the_steps_of_others_and_each_page_once(tiny_model: Path, tmp_path: Path) -> None:
    here = world(tiny_model, tmp_path)
    first, second = turns(2)
    here.one(ask("a", first, boundaries=[len(first)]))
    idle(here)
    counted = here.engine.stats().counters
    assert counted["disk_written: checkpoint"] == 1 and counted["disk_written: page"] == len(first) // 64
    here.one(ask("b", second, boundaries=[len(second)]))
    idle(here)
    counted = here.engine.stats().counters
    assert counted["disk_written: checkpoint"] == 2 and counted["disk_written: page"] == len(second) // 64
    here.check_idle()
    stop(here)


def test_beside_others_a_little_is_written_now_and_then(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card each write ends what ran ahead: once a step it cost streams 13 % of their speed."""
    monkeypatch.setattr(schedule_disk, "BUSY_BYTES", 1)  # a page at a time
    here = world(tiny_model, tmp_path)
    disk = here.engine.scheduler.disk
    assert disk is not None
    first, _ = turns(4)
    here.one(ask("a", first, boundaries=[len(first)]))
    stands_at = time.monotonic() + 60.0
    monkeypatch.setattr(disk, "clock", lambda: stands_at)
    here.one(ask("b", tokens_of(7, 10), 30))
    assert disk.tier.tier.settle(10)  # type: ignore[attr-defined]
    assert here.engine.stats().counters["disk_written: page"] == 1 < len(first) // 64
    idle(here)
    assert here.engine.stats().counters["disk_written: page"] == len(first) // 64, "an idle engine does not wait"
    stop(here)


def test_what_is_flushed_with_the_disk_is_cold_after_a_restart_too_and_new_turns_are_kept_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    here = world(tiny_model, tmp_path)
    first, second = turns(2)
    here.one(ask("a", first, boundaries=[len(first)]))
    idle(here)
    assert here.engine.flush().disk_bytes == 0 and cached(here.one(ask("b", second))) > 0
    idle(here)
    assert here.engine.flush(disk=True).disk_bytes > 0
    assert cached(here.one(ask("c", second))) == 0
    here.engine.flush(disk=True)
    here.one(ask("d", first, boundaries=[len(first)]))
    stop(here)
    after = world(tiny_model, tmp_path)
    assert cached(after.one(ask("e", second))) == len(first) // 64 * 64
    stop(after)


def test_who_still_runs_and_whose_pause_has_begun_are_written_at_the_end(tiny_model: Path, tmp_path: Path) -> None:
    here = world(tiny_model, tmp_path)
    (first, longer), (running, next_turn) = turns(1), turns(2)
    here.one(ask("a", first, boundaries=[len(first)]))
    here.engine.scheduler.disk.write(idle=False)  # its walk has begun, and its actions are not carried out yet
    here.engine.submit(ask("b", running, 200, boundaries=[len(running)]))
    while not (sequence := here.engine.scheduler.running.get("b")) or not sequence.decoding:
        here.engine.step()
    stop(here)
    after = world(tiny_model, tmp_path)
    assert cached(after.one(ask("c", longer))) > 0 and cached(after.one(ask("d", next_turn))) > 0
    stop(after)


def test_a_shared_beginning_is_written_when_it_is_used_again(tiny_model: Path, tmp_path: Path) -> None:
    system = tokens_of(1, 192)
    marked = [Boundary(192, "system")]
    here = world(tiny_model, tmp_path)
    for number in range(2):
        here.one(replace(ask(f"a{number}", system + tokens_of(number, 150)), boundaries=tuple(marked)))
    stop(here)
    after = world(tiny_model, tmp_path)
    assert cached(after.one(ask("b", system + tokens_of(7, 100)))) == 192
    stop(after)


@pytest.mark.parametrize("change", ["numerics", "group", "window", "states", "weights"])
def test_what_other_numbers_made_is_a_miss_and_said_once(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    first, second = turns(1)
    before = world(tiny_model, tmp_path)
    before.one(ask("a", first, boundaries=[len(first)]))
    stop(before)
    changes: dict[str, object] = {}
    plan = tiny_plan(tiny_model)
    if change == "numerics":
        monkeypatch.setattr(open_disk, "NUMERICS", 2)
    elif change == "weights":
        monkeypatch.setattr(open_disk, "fingerprint", lambda _: "another")
    elif change == "states":
        changes["state_dtype"] = "fp16"
    else:
        field = {"group": "group", "window": "window_pages"}[change]
        changes["kv"] = replace(plan.kv, **{field: getattr(plan.kv, field) * 2})
    with caplog.at_level(logging.WARNING):
        engine = build_engine(
            tiny_model,
            replace(plan, **changes) if change != "states" else tiny_plan(tiny_model, **changes),
            disk=DiskCache(tmp_path, LIMIT),
        )
    after = World(engine)
    assert cached(after.one(ask("b", second))) == 0
    said = [record.getMessage() for record in caplog.records if "disk cache" in record.getMessage()]
    assert len(said) == 1 and "can not be used now" in said[0]
    stop(after)


def test_a_second_process_goes_without_and_says_so(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = world(tiny_model, tmp_path)
    with caplog.at_level(logging.WARNING):
        second = world(tiny_model, tmp_path)
    assert second.engine.scheduler.disk is None and "another kakera writes" in caplog.text
    assert second.one(ask("a", tokens_of(1, 100))).finished is not None
    stop(first)


def test_a_broken_record_is_a_miss_and_the_answer_is_right(tiny_model: Path, tmp_path: Path) -> None:
    first, second = turns(1)
    before = world(tiny_model, tmp_path)
    before.one(ask("a", first, boundaries=[len(first)]))
    stop(before)
    for path in tmp_path.rglob("*.seg"):
        data = bytearray(path.read_bytes())
        data[5000] ^= 1  # in the first page's payload
        path.write_bytes(data)
    after, fresh = world(tiny_model, tmp_path), world(tiny_model, None)
    found, right = after.one(ask("b", second)), fresh.one(ask("b", second))
    assert found.tokens == right.tokens and cached(found) == 0
    assert after.engine.stats().counters["disk_read_failed"] > 0
    after.check_idle()
    stop(after)


def victim(model: Path, home: Path, seed: int, ready: Event) -> None:
    """Answers conversations and writes them without a pause, in little room, until somebody kills it."""
    small = tiny_plan(model, pages=16, host_cache=2**20)
    here, rng = World(build_engine(model, small, disk=DiskCache(home, 2 * 2**20))), random.Random(seed)
    for turn in count():
        number = rng.randrange(8)
        first = turns(number)[0]
        here.one(ask(f"a{turn}", first, 2, boundaries=[len(first)]))
        for _ in range(rng.randrange(5)):
            here.engine.step()
        ready.set()


def test_after_kills_at_any_time_what_is_found_is_right(tiny_model: Path, tmp_path: Path) -> None:
    rng, hits, processes = random.Random(1), 0, multiprocessing.get_context("fork")
    for life in range(4):
        ready = processes.Event()
        process = processes.Process(target=victim, args=(tiny_model, tmp_path, life, ready))
        process.start()
        assert ready.wait(60)
        time.sleep(rng.uniform(0.1, 0.4))
        process.kill()
        process.join()
    after, fresh = world(tiny_model, tmp_path), world(tiny_model, None)
    for number in range(8):
        prompt = turns(number)[1]
        found, right = after.one(ask(f"b{number}", prompt)), fresh.one(ask(f"b{number}", prompt))
        assert found.tokens == right.tokens
        assert equal(after.seen[f"b{number}"], fresh.seen[f"b{number}"], 1e-3)
        hits += cached(found) > 0
    assert hits > 0
    after.check_idle()
    stop(after)
