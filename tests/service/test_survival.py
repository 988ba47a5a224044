"""Real processes and real signals: what a supervisor hears, who dies with whom, and how soon a restart answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from served import Served, Stream, gone


@pytest.mark.slow
def test_the_watchdog_is_fed_by_progress_and_a_hang_ends_the_server_with_an_error_for_who_waits(
    place: Path, script: str
) -> None:
    with Served(place / "a", script, "--stall-limit", "3") as server:
        heard = server.supervisor
        assert "kakera_steps 1.0" in server.http.get("/metrics").text, "READY before a token"
        heard.wait_for("WATCHDOG=1", 2)  # idle
        assert not [when for when in heard.times("WATCHDOG=1") if when < heard.times("READY=1")[0]]

        running = Stream(server, "slow")
        running.wait_for_text()
        fed = len(heard.times("WATCHDOG=1"))
        heard.wait_for("WATCHDOG=1", fed + 2)  # working

        engine = server.engine
        began, hanging = heard.now(), Stream(server, "hang")
        assert server.process.wait(timeout=60) == 70
        ended = heard.now()
        assert not [when for when in heard.times("WATCHDOG=1") if when > ended - 1.5], "fed while it hung, 3 s and more"
        for stream in (running, hanging):
            stream.join(60)
        assert gone(engine, 60)
    print(f"hang (limit 3 s) to exit status 70: {ended - began:.1f} s")
    assert running.error and running.error["code"] == "engine_died" and "no step finished" in running.error["message"]
    assert hanging.error and not hanging.cut_off and len(heard.times("READY=1")) == 1
    assert "stopped with exit status 70: the engine hangs: no step finished" in server.errors.read_text()


def test_a_second_server_is_refused_and_a_killed_engine_is_an_error_event_and_exit_status_70(
    place: Path, script: str
) -> None:
    with Served(place / "a", script) as server:
        second = server.second("mini")
        assert second.returncode == 2 and second.stderr.count("\n") == 1
        for part in (f"port {server.port} is held by pid {server.process.pid}", "serves script on", "kill"):
            assert part in second.stderr
        running = Stream(server, "slow")
        running.wait_for_text()
        began = time.monotonic()
        server.engine.kill()
        assert server.process.wait(timeout=60) == 70
        print(f"SIGKILL of the engine to exit status 70: {time.monotonic() - began:.1f} s")
        running.join(60)
    assert running.error and running.error["code"] == "engine_died" and not running.cut_off


@pytest.mark.sweep
def test_a_killed_server_takes_its_engine_along_and_the_next_one_answers_within_seconds(place: Path) -> None:
    """On the real bundled model, while it generates."""
    options = ("--context", "4096", "--host-cache", "64MB", "--log-level", "error")
    with Served(place / "a", "mini", *options) as server:
        Stream(server, "Once upon a time").wait_for_text()
        engine = server.engine
        server.kill()
        killed = time.monotonic()
        assert gone(engine, 60)
        print(f"SIGKILL of the server to the end of its engine: {time.monotonic() - killed:.2f} s")
        with Served(place / "b", "mini", *options, port=server.port) as again:
            stream = Stream(again, "Once upon a time")
            stream.wait_for_text()
            work = again.processor_seconds()
    wall = stream.first - killed
    print(f"restart of mini to the first token of a client: {wall:.1f} s, {work:.1f} s of processor time")
    assert work < 15  # the machine may be busy with other work
