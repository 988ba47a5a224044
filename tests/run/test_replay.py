"""Record and replay: an honest run is all equal; one wrong bit behind a hit is found, and where it lies."""

from __future__ import annotations

import contextlib
import os
import random
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import torch
from run_world import ask, tiny_plan, tokens_of

from kakera.contract.recording import LENGTH, Header, Recorder, check_place, ends_whole, read_recording
from kakera.contract.step import (
    DemotePages,
    Drop,
    PromotePages,
    ResetSlot,
    RestoreCheckpoint,
    SavePoint,
    SaveSink,
    SaveSlot,
    Segment,
    StepPlan,
    StepResult,
)
from kakera.errors import UsageError
from kakera.run.build import build_engine
from kakera.run.generate import generate
from kakera.run.process.recipe import Recording, record
from kakera.run.recording.replay import Replay
from kakera.schedule.drafts import Drafts

PREFIX = tokens_of(1, 300)


def recorded(directory, path, prompts=True, kv="int2", spoil=None, most=9, **changes):
    """A conversation with hits, sampling and several rows at once; `spoil(runner)` may break the engine in between."""
    plan = tiny_plan(directory, kv, **changes)
    engine = build_engine(directory, plan)
    inner = engine.runner
    record(engine, plan, Recording(path, "tiny", prompts))
    list(generate(engine, [ask("first", PREFIX, 5, boundaries=[256])]))
    if spoil:
        spoil(inner)
    second = ask("second", PREFIX + tokens_of(2, 80), most, temperature=0.8, seed=5, presence_penalty=0.5)
    list(generate(engine, [second, ask("third", PREFIX + tokens_of(3, 10), 6)]))
    return plan


def replayed(directory, path, plan, cold=True):
    header, steps = read_recording(path)
    steps = list(steps)
    runner = build_engine(directory, plan).runner
    replay = Replay(runner, plan, header, [given for step in steps for given in step.inputs], cold)
    return replay.report, [difference for step in steps for difference in replay.step(step)]


@pytest.mark.parametrize("kv", ["int2", "fp32"])
def test_an_honest_run_replays_to_the_bit_and_its_hits_equal_cold_runs(tiny_model, tmp_path, kv):
    plan = recorded(tiny_model, tmp_path / "run", kv=kv, most=70)
    report, differences = replayed(tiny_model, tmp_path / "run", plan)
    assert differences == []
    assert report.hits == 2 and report.hits_unknown == 0 and report.tokens >= 70


def test_a_state_that_was_spoilt_in_the_store_is_found_at_the_hit_and_named(tiny_model, tmp_path):
    def spoil(runner):
        with torch.inference_mode():
            for held in runner.store.checkpoints.values():
                held.state_LVKD.view(-1)[7] += 1e-3

    plan = recorded(tiny_model, tmp_path / "run", spoil=spoil)
    _, differences = replayed(tiny_model, tmp_path / "run", plan, cold=False)
    assert {(each.request_id, each.what) for each in differences} >= {("second", "state"), ("third", "state")}
    assert "first" not in {each.request_id for each in differences}


def test_a_page_that_a_hit_reads_and_a_cold_run_would_not_is_found(tiny_model, tmp_path):
    """What the replay itself restores is wrong here, as it would be on the machine that has the fault."""
    plan = recorded(tiny_model, tmp_path / "run")
    header, steps = read_recording(tmp_path / "run")
    steps = list(steps)
    runner = build_engine(tiny_model, plan).runner
    original = runner.store.load

    def load(slot, checkpoint, sink):
        original(slot, checkpoint, sink)
        codes, *others = runner.kv.store.read_pages(range(plan.pages))
        runner.kv.store.write_pages(range(plan.pages), [codes + 1, *others])

    runner.store.load = load
    replay = Replay(runner, plan, header, [given for step in steps for given in step.inputs])
    found = [difference for step in steps for difference in replay.step(step)]
    assert any("pages" in each.what and each.what.startswith("hit of ") for each in found)


def test_without_prompts_no_token_of_them_is_in_the_file_and_hits_are_still_checked(tiny_model, tmp_path):
    plan = recorded(tiny_model, tmp_path / "run", prompts=False)
    header, steps = read_recording(tmp_path / "run")
    assert not header.prompts
    words = [row.tokens for step in steps for row in step.plan.rows]
    text = [token for tokens in words for token in tokens][: len(PREFIX)]
    assert len(text) == len(PREFIX) and sum(a == b for a, b in zip(text, PREFIX, strict=True)) < len(PREFIX) // 10
    assert len(set(text)) == len(set(PREFIX)), "equal tokens stay equal, others stay others"
    report, differences = replayed(tiny_model, tmp_path / "run", plan)
    assert differences == [] and report.hits == 2 and report.tokens == 0


def test_a_pool_that_demotes_and_promotes_pages_replays_too(tiny_model, tmp_path):
    plan = tiny_plan(tiny_model, pages=12)
    engine = build_engine(tiny_model, plan)
    record(engine, plan, Recording(tmp_path / "run", "tiny", True))
    for seed in (1, 2, 3, 1):
        list(generate(engine, [ask(f"{seed} {engine.stats().steps}", tokens_of(seed, 500), 3)]))
    _, steps = read_recording(tmp_path / "run")
    assert any(isinstance(action, DemotePages) for step in steps for action in step.plan.before)
    report, differences = replayed(tiny_model, tmp_path / "run", plan)
    assert differences == [] and report.hits >= 1


def test_a_recording_has_a_bound_is_private_and_may_end_in_the_middle_of_a_step(tmp_path):
    header = Header(1, "0", "tiny", {}, 256, 8, prompts=True)
    recorder = Recorder(tmp_path / "run", header, most_bytes=3000)
    plan = StepPlan(1, prefill=(Segment("a", 0, tuple(range(64)), 0),))
    while not recorder.full:
        recorder.add(plan, {}, StepResult(1, (), 0.0))
    size = (tmp_path / "run").stat().st_size
    recorder.add(plan, {}, StepResult(1, (), 0.0))
    assert size == (tmp_path / "run").stat().st_size <= 3000
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0
    whole = list(read_recording(tmp_path / "run")[1])
    (tmp_path / "run").write_bytes((tmp_path / "run").read_bytes()[:-1])
    assert list(read_recording(tmp_path / "run")[1]) == whole[:-1]


@pytest.mark.parametrize("prompts", [True, False])
def test_rows_with_drafts_go_on_from_what_was_kept_then_whatever_is_chosen_now(
    tiny_model, tmp_path, prompts, monkeypatch
):
    """Stand-ins choose other tokens than were recorded; later rows and hits build on the recorded ones all the same."""
    # one draw in some twenty has a 2-bit group that decode and prefill round apart: a difference, and none of drafts
    monkeypatch.setattr(random, "SystemRandom", lambda: random.Random(3))
    texts: dict[str, list[int]] = {}

    def draft(given, most):
        right = texts.get(given.request_id, [])[given.generated :][: min(most, 4)]
        wrong = [3] * (60 if given.generated % 2 else 0)  # some reach a page's border and are not kept
        return [*right[:2], *(wrong or right[2:])][:most]

    prefix = (*PREFIX, *tokens_of(9, 10))
    for drafter in (None, draft):
        plan = tiny_plan(tiny_model)
        engine = build_engine(tiny_model, plan)
        engine.scheduler.drafts = drafter and Drafts(drafter)
        record(engine, plan, Recording(tmp_path / "run", "tiny", prompts))
        first = generate(engine, [ask("first", prefix, 100)])["first"]
        turn = (*prefix, *first.tokens, *tokens_of(8, 20))
        second = generate(engine, [ask("second", turn, 9)])["second"]
        assert second.finished.usage.cached_tokens == 384
        texts = {"first": first.tokens, "second": second.tokens}
    _, steps = read_recording(tmp_path / "run")
    rows = [row for step in steps for row in step.plan.decode]
    assert sum(len(row.drafts) for row in rows) > 50
    report, differences = replayed(tiny_model, tmp_path / "run", plan)
    assert differences == [] and report.hits == 1


def test_a_hit_whose_first_row_comes_in_a_later_step_is_held_too(tiny_model, tmp_path):
    plan = recorded(tiny_model, tmp_path / "run")
    header, steps = read_recording(tmp_path / "run")
    apart = []
    for step in steps:
        if any(isinstance(action, RestoreCheckpoint) for action in step.plan.before):
            alone = StepPlan(step.plan.step, step.plan.before, after=())
            apart.append(msgspec.structs.replace(step, plan=alone, inputs=(), yielded=()))
            step = msgspec.structs.replace(step, plan=msgspec.structs.replace(step.plan, before=()))
        apart.append(step)
    runner = build_engine(tiny_model, plan).runner
    replay = Replay(runner, plan, header, [given for step in apart for given in step.inputs])
    assert [difference for step in apart for difference in replay.step(step)] == []
    assert replay.report.hits == 2


@pytest.mark.parametrize("kv", ["fp32", "int2", "bf16"])
def test_hits_of_what_was_generated_are_no_difference(tiny_model, tmp_path, kv):
    """A conversation: decode rows and prompts round differently, which is no wrong answer."""
    plan = tiny_plan(tiny_model, kv)
    engine = build_engine(tiny_model, plan)
    record(engine, plan, Recording(tmp_path / "run", "tiny", True))
    tokens, hits = tokens_of(5, 100), 0
    for turn in range(3):
        answer = generate(engine, [ask(f"turn {turn}", tokens, 40)])[f"turn {turn}"]
        hits += answer.finished.usage.cached_tokens == (0, 128, 192)[turn]
        tokens = (*tokens, *answer.tokens, *tokens_of(20 + turn, 30))
    report, differences = replayed(tiny_model, tmp_path / "run", plan)
    assert differences == [] and report.hits == 2 and hits == 3


LIES = [
    lambda row: {"slot": 99},
    lambda row: {"slot": -1},
    lambda row: {"start": 2**40},
    lambda row: {"start": -64},
    lambda row: {"tokens": ()},
    lambda row: {"tokens": (2**40,)},
    lambda row: {"tokens": (-1,)},
    lambda row: {"known_pages": 0, "new_pages": (2**40,) * row.page_count},
    lambda row: {"known_pages": 0, "new_pages": (-1,) * row.page_count},
    lambda row: {"known_pages": 77},
    lambda row: {"known_pages": -3},
    lambda row: {"new_pages": (0,) * 5000},
    lambda row: {"sampled": 999},
    lambda row: {"scored": 999},
    lambda row: {"positions": (2**62,) * len(row.tokens)},
    lambda row: {"saves": (SavePoint(7, 7),)},
    lambda row: {"request_id": "nobody"},
]
WRONG_ACTIONS = [
    ResetSlot(99),
    RestoreCheckpoint(0, 12345, 64, None),
    RestoreCheckpoint(99, 1, 64, 1),
    SaveSink(99, 1),
    SaveSlot(99, 1, 64),
    SaveSlot(1, 7, 7),
    SaveSlot(0, 7, 2**40),
    DemotePages(((2**40, 1),)),
    PromotePages(((4711, 1),)),
    Drop((1,), (2,), (3,)),
]


@pytest.fixture(scope="module")
def honest(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("honest") / "run"
    return recorded(tiny_model, path), path


@pytest.mark.parametrize("lie", [*LIES, *WRONG_ACTIONS])
def test_a_recording_that_lies_is_told_in_words(tiny_model, honest, lie, caplog):
    """By a difference or by a refusal; the log of the runner is for those who serve."""
    plan, path = honest
    header, steps = read_recording(path)
    steps = list(steps)
    at = next(i for i, step in enumerate(steps) if step.plan.decode)
    told = steps[at].plan
    if callable(lie):
        row = told.decode[0]
        told = msgspec.structs.replace(told, decode=(msgspec.structs.replace(row, **lie(row)), *told.decode[1:]))
    else:
        told = msgspec.structs.replace(told, before=(lie,))
    steps[at] = msgspec.structs.replace(steps[at], plan=told)
    replay = Replay(build_engine(tiny_model, plan).runner, plan, header, [i for step in steps for i in step.inputs])
    try:
        for step in steps:
            list(replay.step(step))
    except UsageError as error:
        assert "the recording is damaged" in str(error)


def test_a_damaged_step_is_named_and_the_steps_before_it_are_read(honest, tmp_path):
    _, path = honest
    data = path.read_bytes()
    (length,) = LENGTH.unpack_from(data, 0)
    (tmp_path / "run").write_bytes(data[: LENGTH.size + length] + LENGTH.pack(3) + b"abc" + data)
    _, steps = read_recording(tmp_path / "run")
    with pytest.raises(UsageError, match="step number 1 can not be read"):
        next(steps)


def test_a_recording_is_read_step_by_step(tmp_path):
    """However large it is: a file of 64 MB takes no 8 beside the step in hand."""
    header = Header(1, "0", "tiny", {}, 256, 8, prompts=True)
    recorder = Recorder(tmp_path / "run", header, most_bytes=64_000_000)
    plan = StepPlan(1, prefill=(Segment("a", 0, tuple(range(200)) * 1000, 0),))
    while not recorder.full:
        recorder.add(plan, {}, StepResult(1, (), 0.0))
    tracemalloc.start()
    assert sum(1 for _ in read_recording(tmp_path / "run")[1]) > 100
    assert tracemalloc.get_traced_memory()[1] < 8_000_000
    tracemalloc.stop()


def test_what_can_not_be_recorded_is_told_and_nothing_but_a_file_is_replaced(tmp_path):
    header = Header(1, "0", "tiny", {}, 256, 8, prompts=True)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none" / "run"):
        with pytest.raises(OSError):
            Recorder(path, header)
    assert (tmp_path / "pipe").is_fifo() and tmp_path.is_dir()


def test_a_disk_that_is_full_ends_the_recording_and_no_request(tiny_model, tmp_path, caplog):
    plan = tiny_plan(tiny_model)
    engine = build_engine(tiny_model, plan)
    record(engine, plan, Recording(tmp_path / "run", "tiny", True))
    with contextlib.suppress(OSError), Path("/dev/full").open("wb") as full:
        engine.runner._recorder._file = full
        assert generate(engine, [ask("a", PREFIX, 5)])["a"].finished.reason == "length"
    assert "the recording ends at step 1: No space left on device" in caplog.text


def test_what_can_not_be_recorded_otherwise_ends_the_recording_too(tiny_model, tmp_path, caplog):
    """Ids beyond the vocabulary, of which there are no stand-ins."""
    plan = tiny_plan(tiny_model)
    engine = build_engine(tiny_model, plan)
    record(engine, plan, Recording(tmp_path / "run", "tiny", False))
    engine.runner._recorder._hidden._free = [1, 2]
    assert generate(engine, [ask("a", PREFIX, 5)])["a"].finished.reason == "length"
    assert "the recording ends at step 1" in caplog.text


@pytest.mark.parametrize("content", [b"", b"no recording", msgspec.msgpack.encode([1]), bytes(100)])
def test_what_is_no_recording_is_refused_in_words(tmp_path, content):
    (tmp_path / "run").write_bytes(content)
    with pytest.raises(UsageError, match="no recording"):
        read_recording(tmp_path / "run")


def test_a_step_that_is_damaged_is_named(tiny_model, tmp_path):
    recorded(tiny_model, tmp_path / "run")
    data = bytearray((tmp_path / "run").read_bytes())
    header = 4 + int.from_bytes(data[:4], "little")
    data[header + 4] = 0xC1  # a byte that msgpack never writes
    (tmp_path / "run").write_bytes(data)
    with pytest.raises(UsageError, match="step number 1 can not be read"):
        list(read_recording(tmp_path / "run")[1])


def test_a_recording_of_another_vocabulary_is_refused_before_its_first_step(tiny_model, tmp_path):
    plan = recorded(tiny_model, tmp_path / "run")
    header, _ = read_recording(tmp_path / "run")
    header = msgspec.structs.replace(header, vocab=header.vocab + 1)
    runner = build_engine(tiny_model, plan).runner
    with pytest.raises(UsageError, match="is another one"):
        Replay(runner, plan, header, [])


def test_a_recording_takes_no_other_files_place_and_says_so_before_anything_is_loaded(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(UsageError, match="is no recording: it is not replaced"):
        check_place(tmp_path / "notes")
    with pytest.raises(UsageError, match="no file can be made"):
        check_place(tmp_path / "missing" / "run")
    check_place(tmp_path / "new")
    Recorder(tmp_path / "old", Header(1, "0", "tiny", {}, 256, 8, prompts=True))
    check_place(tmp_path / "old")
    assert ends_whole(tmp_path / "old")
    (tmp_path / "old").write_bytes((tmp_path / "old").read_bytes() + bytes([9, 0, 0, 0, 1]))
    assert not ends_whole(tmp_path / "old")
