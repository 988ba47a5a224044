"""The soak: its checks on made-up snapshots, its traffic, and a few seconds of it against a real server."""

import asyncio
import itertools
import json
import os
import signal
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kakera.arch.registry import load_spec
from kakera.bench.figure import Figure
from kakera.bench.server import ServerProcess, flags
from kakera.bench.text import Prose
from kakera.errors import EngineDied, UsageError
from kakera.plan.plan import Wishes
from kakera.plan.search import draft
from kakera.plan.sizes import margin
from kakera.plan.weights import from_checkpoint
from kakera.target.devices import resolve
from tools.soak import Report, Soak, app
from tools.soak_checks import Peak, ProcessReading, Snapshot, Tally, judge
from tools.soak_traffic import CHAT, COMPLETIONS, MESSAGES, PATHS, RESPONSES, Shot, Traffic, read_answer

SMALL = Wishes(context=1024, max_running=4, kv_group=64, host_cache=20_000_000)
IDLE = {
    "running": 0,
    "waiting": 0,
    "pages_free": 64,
    "pages_cached": 60,
    "pages_total": 64,
    "slots_free": 4,
    "slots_total": 4,
    "host_bytes_used": 30_000_000,
    "host_bytes_total": 64_000_000,
    "counters": {"preemptions": 0},
}
SERVER, ENGINE = ProcessReading("server", 20, 100_000_000), ProcessReading("engine", 14, 600_000_000)
BEFORE = Snapshot(IDLE, True, 1, (SERVER, ENGINE))


def failed(after=BEFORE, tally=None, tracebacks=0):
    return [check.name for check in judge(BEFORE, after, tally or Tally(canaries=3), tracebacks) if not check.ok]


def test_a_server_that_has_everything_back_passes():
    assert failed() == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"running": 1}, "requests still running or waiting"),
        ({"waiting": 1}, "requests still running or waiting"),
        ({"pages_free": 63}, "pages nobody can have"),
        ({"slots_free": 3}, "slots nobody can have"),
        ({"pages_cached": 65}, "cached pages that are not free"),
        ({"host_bytes_used": 64_000_001}, "host cache in use"),
    ],
)
def test_what_the_engine_keeps_is_found(change, name):
    assert failed(replace(BEFORE, engine={**IDLE, **change})) == [name]


def test_what_the_processes_keep_is_found():
    grown = (replace(SERVER, files=25), replace(ENGINE, resident=661_000_000))
    assert failed(replace(BEFORE, processes=grown)) == ["server: open files, grown by", "engine: resident, grown by"]
    for resident, names in ((125_000_000, []), (127_000_000, ["server: resident, grown by"])):  # 10 % and its cache
        assert failed(replace(BEFORE, processes=(replace(SERVER, resident=resident), ENGINE))) == names
    fuller = {**IDLE, "host_bytes_used": 40_000_000}  # the cache took 10 MB of the 61
    assert failed(replace(BEFORE, engine=fuller, processes=(SERVER, grown[1]))) == []


def test_memory_is_not_judged_before_the_server_is_warm():
    grown = replace(BEFORE, processes=(replace(SERVER, files=25), replace(ENGINE, resident=900_000_000)))
    checks = judge(BEFORE, grown, Tally(canaries=3), 0, warm=False)
    assert [check.name for check in checks if not check.ok] == ["server: open files, grown by"]
    assert not any("resident" in check.name for check in checks)


def test_a_process_that_is_gone_has_not_passed():
    found = failed(replace(BEFORE, processes=(SERVER,)))
    assert found == ["engine: open files, grown by", "engine: resident, grown by"]


def test_what_clients_saw_is_judged():
    tally = Tally(canaries=2, canaries_changed=1, server_errors=1, unexpected=1)
    assert failed(replace(BEFORE, healthy=False, failed_requests=2), tally, tracebacks=1) == [
        "canary answers that differ",
        "canary answers",
        "5xx, broken connections and streams",
        "answers of an unexpected status",
        "requests that the engine failed",
        "tracebacks in the server's log",
        "engine dead or hanging",
    ]


def test_statuses_are_sorted_by_what_was_sent():
    tally = Tally()
    sorted_well = [tally.count_status(*case) for case in ((200, False), (404, True), (429, False))]
    sorted_ill = [tally.count_status(*case) for case in ((400, False), (200, True), (500, True))]
    assert all(sorted_well) and not any(sorted_ill)
    assert (tally.refused, tally.queue_full, tally.unexpected, tally.server_errors) == (1, 1, 2, 1)


def test_faults_take_bounded_memory():
    tally = Tally()
    for number in range(1000):
        tally.note(f"fault {number}")
    assert tally.faults[0] == "fault 0" and len(tally.faults) < 20


def test_a_failed_check_is_exit_status_1(monkeypatch):
    leak = Figure("pages nobody can have", 1, "<=", 0)

    async def run(*_):
        return Report(1.0, Tally(), Peak(), BEFORE, BEFORE, [leak])

    monkeypatch.setattr(Soak, "run", run)
    result = CliRunner().invoke(app, ["--url", "http://127.0.0.1:9", "--json"])
    document = json.loads(result.stdout)
    assert (result.exit_code, document["subject"], document["checks"]) == (1, "http://127.0.0.1:9", [leak.json()])


def shots(seed, worker, count=200):
    traffic = Traffic(Prose(), 1024, seed, worker)
    found = []
    for shot in itertools.islice(traffic.shots(), count):
        found.append(shot)
        if shot.kind not in ("bad", "canary"):
            traffic.answered("An answer.")
    return found


def test_a_seed_decides_the_traffic_and_workers_differ():
    assert shots(7, 0) == shots(7, 0)
    assert shots(7, 0) != shots(7, 1) and shots(7, 0) != shots(8, 0)


def test_the_traffic_is_mixed():
    found = shots(0, 0)
    assert {shot.kind for shot in found} == {"fresh", "shared", "turn", "form", "bad", "canary"}
    sound = [shot for shot in found if shot.kind not in ("bad", "canary")]
    assert {(shot.path, shot.stream) for shot in sound} == set(itertools.product(PATHS, (False, True)))
    assert any(shot.leave_after for shot in sound) and any(shot.leave_after is None for shot in sound)
    assert any(len(shot.body.get("messages", ())) > 2 for shot in sound)


def stream(path, *events):
    body = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    return read_answer(Shot("fresh", path, {"stream": True}), body)


def test_streams_are_read_in_every_dialect():
    delta = {"choices": [{"index": 0, "delta": {"content": "hi"}}, {"index": 1, "delta": {"content": "no"}}]}
    block = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}}
    piece = {"type": "response.output_text.delta", "delta": "hi"}
    answers = [
        stream(CHAT, delta, "[DONE]"),
        stream(COMPLETIONS, {"choices": [{"index": 0, "text": "hi"}]}, "[DONE]"),
        stream(MESSAGES, block, {"type": "message_stop"}),
        stream(RESPONSES, piece, {"type": "response.completed", "response": {"error": None}}),
    ]
    assert [(answer.text, answer.fault) for answer in answers] == [("hi", None)] * 4


@pytest.mark.parametrize("path", PATHS)
def test_cut_streams_and_errors_within_are_faults(path):
    assert "ended early" in stream(path).fault
    assert "ended early" in stream(path, {"type": "ping"}).fault
    assert "out of memory" in stream(path, {"type": "error", "error": {"message": "out of memory"}}, "[DONE]").fault


def at_the_ceiling(model, wishes):
    """The same wishes on a machine with memory for one full request and no page more."""
    spec = load_spec(model)
    need = draft(spec, wishes, resolve("cpu:1TB"), from_checkpoint(model, spec)).need
    return replace(wishes, gpus=f"cpu:{need + margin(need)}")


@pytest.fixture(scope="module")
def server(tiny_model):
    """The tests below run in order; the last one kills it."""
    with ServerProcess(str(tiny_model), [*flags(at_the_ceiling(tiny_model, SMALL)), "--drafts", "off"]) as running:
        yield running


def test_a_short_soak_of_a_real_server_finds_nothing(server):
    report = asyncio.run(Soak(server.url, seed=1, process=server).run(minutes=4 / 60))
    assert report.tally.faults == []
    assert [check.name for check in report.checks if not check.ok] == []
    assert {"server", "engine"} <= {process.name for process in report.after.processes}
    assert report.peak.running >= 2 and report.tally.requests > 8
    total = report.after.engine["pages_total"]
    assert total == 16 and report.peak.pages_filled == total, "not at its ceiling"
    assert json.loads(json.dumps(report.json()))["tally"]["sent"]["canary"] >= 4


def test_a_context_that_is_too_small_is_refused(server, monkeypatch):
    monkeypatch.setattr("tools.soak.LEAST_CONTEXT", 2048)
    with pytest.raises(UsageError, match="2048 tokens, not 1024"):
        asyncio.run(Soak(server.url, seed=0).run(0.01))


def test_a_server_that_dies_ends_the_soak(server):
    async def run():
        soak = Soak(server.url, seed=0, process=server)
        running = asyncio.create_task(soak.run(1))
        while soak.tally.requests < 8:
            await asyncio.sleep(0.01)
        os.kill(server.pid, signal.SIGKILL)
        await running

    with pytest.raises(EngineDied, match="no longer answers"):
        asyncio.run(run())
