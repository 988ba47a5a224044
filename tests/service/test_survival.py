"""Real processes and real signals: what a supervisor hears, who dies with whom, and how soon a restart answers."""

from __future__ import annotations

import os
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
        heard.wait_for("WATCHDOG=1", 2, 5)  # idle
        assert not [when for when in heard.times("WATCHDOG=1") if when < heard.times("READY=1")[0]]

        running = Stream(server, "slow")
        running.wait_for_text()
        fed = len(heard.times("WATCHDOG=1"))
        heard.wait_for("WATCHDOG=1", fed + 2, 5)  # working

        engine = server.engine
        hanging = Stream(server, "hang")
        time.sleep(0.5)
        began = heard.now()
        assert server.process.wait(timeout=20) == 70
        took = heard.now() - began
        assert not [when for when in heard.times("WATCHDOG=1") if when > began + 1.5], "fed while it hung"
        for stream in (running, hanging):
            stream.join(5)
        assert gone(engine, 5)
    print(f"hang (limit 3 s) to exit status 70: {took:.1f} s")
    assert took < 3 + 6
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
        assert server.process.wait(timeout=20) == 70
        print(f"SIGKILL of the engine to exit status 70: {time.monotonic() - began:.1f} s")
        running.join(5)
    assert running.error and running.error["code"] == "engine_died" and not running.cut_off


@pytest.mark.slow
def test_a_killed_server_takes_its_engine_along_and_the_next_one_answers_within_seconds(place: Path) -> None:
    """On the real bundled model, while it generates."""
    options = ("--context", "4096", "--host-cache", "64MB", "--log-level", "error")
    with Served(place / "a", "mini", *options) as server:
        Stream(server, "Once upon a time").wait_for_text()
        engine = server.engine
        server.kill()
        killed = time.monotonic()
        assert gone(engine, 5)
        print(f"SIGKILL of the server to the end of its engine: {time.monotonic() - killed:.2f} s")
        with Served(place / "b", "mini", *options, port=server.port) as again:
            stream = Stream(again, "Once upon a time")
            stream.wait_for_text()
            work = again.processor_seconds()
    wall, busy = stream.first - killed, os.getloadavg()[0] > (os.cpu_count() or 1)
    print(f"restart of mini to the first token of a client: {wall:.1f} s, {work:.1f} s of processor time, {busy=}")
    assert (work if busy else wall) < 15
