"""Record and replay: an honest run is all equal; one wrong bit behind a hit is found, and where it lies."""

from __future__ import annotations

import msgspec
import pytest
import torch
from run_world import ask, tiny_plan, tokens_of

from kakera.contract.recording import Header, Recorder, read_recording
from kakera.contract.step import DemotePages, Segment, StepPlan, StepResult
from kakera.errors import UsageError
from kakera.run.build import build_engine
from kakera.run.generate import generate
from kakera.run.process.recipe import Recording, record
from kakera.run.recording.replay import Replay

PREFIX = tokens_of(1, 300)


def recorded(directory, path, prompts=True, kv="int2", spoil=None, **changes):
    """A conversation with hits, sampling and several rows at once; `spoil(runner)` may break the engine in between."""
    plan = tiny_plan(directory, kv, **changes)
    engine = build_engine(directory, plan)
    inner = engine.runner
    record(engine, plan, Recording(path, "tiny", prompts))
    list(generate(engine, [ask("first", PREFIX, 5, boundaries=[256])]))
    if spoil:
        spoil(inner)
    second = ask("second", PREFIX + tokens_of(2, 80), 70, temperature=0.8, seed=5, presence_penalty=0.5)
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
    plan = recorded(tiny_model, tmp_path / "run", kv=kv)
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
    with pytest.raises(UsageError, match="damaged at its step 1"):
        list(read_recording(tmp_path / "run")[1])


def test_a_recording_of_another_vocabulary_is_refused_before_its_first_step(tiny_model, tmp_path):
    plan = recorded(tiny_model, tmp_path / "run")
    header, _ = read_recording(tmp_path / "run")
    header = msgspec.structs.replace(header, vocab=header.vocab + 1)
    runner = build_engine(tiny_model, plan).runner
    with pytest.raises(UsageError, match="is another one"):
        Replay(runner, plan, header, [])
