"""The course of a proof against a real server, and against none."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace

import pytest
from traces import healthy
from typer.testing import CliRunner

from kakera.cli import app
from kakera.cli import prove as command
from kakera.cli.model import resolve_model
from kakera.errors import KakeraError, UsageError
from kakera.plan.plan import Wishes
from kakera.plan.planner import plan_for
from kakera.prove import course
from kakera.prove.course import Recorder, check, prove, sample_of
from kakera.prove.verdict import judge
from kakera.server.operate.sensors import CardReading, Reading


def test_a_reading_becomes_a_sample() -> None:
    card = CardReading("card", 12_000, 9_000, 120.5, None, None, 97, 2500, False)
    sample = sample_of(Reading(100, 40, 7, (card,)), 1.5, "filling")
    assert (sample.free, sample.watts, sample.clock_mhz, sample.utilization) == (3_000, 120.5, 2500, 97)
    assert (sample.slowed, sample.resident, sample.host_free) == (False, 7, 60)
    assert sample_of(Reading(100, 40, 7), 1.5, "filling").free is None


def test_a_server_that_is_gone_is_a_verdict(tiny_model) -> None:
    plan = plan_for(tiny_model, Wishes(gpus="cpu", context=1024))
    trace = asyncio.run(prove("http://127.0.0.1:9", Recorder(plan, None, lambda: Reading(1, 0, 0)), _silent))
    (finding,) = judge(trace).findings
    assert finding.kind == "wrong" and "127.0.0.1:9" in finding.text
    with pytest.raises(UsageError, match="1,024"):
        check(plan_for(tiny_model, Wishes(gpus="cpu", context=512)))


def test_a_proof_does_not_wait_for_memory_that_others_have(monkeypatch) -> None:
    monkeypatch.setattr(course, "LOOK_SECONDS", 0.001)
    left = []

    class Crowded:
        async def status(self) -> dict:
            return {"engine": {"held_back": 1, "pages_lent": 77}}

    async def part() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            left.append("the request")

    with pytest.raises(KakeraError, match="other programs have taken memory of the card: 77 KV pages"):
        asyncio.run(course._unless_held_back(Crowded(), part()))
    assert left == ["the request"]


@contextlib.contextmanager
def _silent(what: str, total: int):
    yield lambda more: None


def run(*arguments):
    return CliRunner().invoke(app, ["prove", *arguments], catch_exceptions=False)


@pytest.mark.slow
def test_a_cpu_is_proven_whole(tiny_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    report = tmp_path / "report.json"
    sizes = ("--gpus", "cpu", "--context", "1024", "--max-running", "1", "--chunk", "64", "--kv-group", "64")
    result = run(str(tiny_model), *sizes, "--host-cache", "50MB", "--report", str(report), "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["proven"], result.output
    assert not {finding["kind"] for finding in found["findings"]} - {"slow"}  # a busy machine may be that
    assert any("CPU" in text for text in found["not_watched"])
    assert found["second_turn"]["same"] and found["second_turn"]["cached_tokens"] == 832
    trace = json.loads(report.read_text())["trace"]
    assert [chunk["position"] for chunk in trace["chunks"]] == list(range(0, 832, 64))  # the last one says a token
    assert trace["filled"]["answered"] == 128 and len(trace["sweeps"]) == 4 and trace["samples"]
    (proof,) = json.loads((tmp_path / "kakera" / "proven.json").read_text())
    assert (proof["card"], proof["context"]) == ("cpu", 1024)
    assert "proven on" in CliRunner().invoke(app, ["plan", str(tiny_model), *sizes, "--host-cache", "50MB"]).stdout


def test_before_a_server_starts_its_plan_is_proven_once(tiny_model, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    wishes, found = Wishes(gpus="cpu", context=1024), resolve_model(str(tiny_model))
    good = replace(healthy(), card=None)
    made = []
    for trace in (replace(good, resent=None), good, good):
        monkeypatch.setattr(command, "_trace", lambda *_, trace=trace: made.append(trace) or trace)
        try:
            command.prove_first(found, str(tiny_model), wishes)
        except KakeraError as error:
            made.append(error)
    failed, error, proven = made
    assert (failed.resent, proven) == (None, good) and "--context" in str(error)
    assert "wrong: the conversation was not sent again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("report", "status", "words"),
    [("", 2, "directory"), ("no/file", 2, "no such directory"), ("/dev/full", 1, "No space")],
)
def test_a_report_that_can_not_be_written(tiny_model, tmp_path, monkeypatch, report, status, words) -> None:
    """Said before minutes of proving; what shows only then takes neither the verdict away nor what is remembered."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "_trace", lambda *_: replace(healthy(), card=None))
    found = CliRunner().invoke(app, ["prove", str(tiny_model), "--gpus", "cpu", "--report", str(tmp_path / report)])
    assert isinstance(found.exception, KakeraError) and found.exception.exit_status == status
    assert words in str(found.exception) and "--report" in str(found.exception)
    proven = (tmp_path / "kakera" / "proven.json").exists()
    assert ("proven" in found.stdout, proven) == (status == 1, status == 1)


@pytest.mark.parametrize(("failure", "status", "words"), [(None, 0, "proven"), ("it broke", 1, "wrong: it broke")])
def test_the_exit_status_is_the_verdict(tiny_model, tmp_path, monkeypatch, failure, status, words) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    trace = replace(healthy(), failure=failure)
    monkeypatch.setattr(command, "_trace", lambda *_: trace)
    result = run(str(tiny_model), "--gpus", "cpu", "--context", "1024")
    assert result.exit_code == status and words in result.stdout
    assert "RTX 5070: " in result.stdout and "second turn: 189,700 of 189,794" in result.stdout
    assert ("not proven" in result.stdout) == bool(status)


def test_what_can_not_be_proven_is_refused(tiny_model, tmp_path) -> None:
    script = tmp_path / "script.json"
    script.write_text("{}")
    for arguments, words in (
        ((f"scripted:{script}",), "no memory"),
        ((str(tiny_model), "--report", "/no/x"), "--report"),
    ):
        with pytest.raises(UsageError, match=words):
            run(*arguments)
