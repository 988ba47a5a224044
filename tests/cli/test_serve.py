"""kakera serve in a process of its own, with a scripted model. Second starts and dead engines: tests/service."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.command_server import CommandServer

from kakera.cli.engine import with_kv_events
from kakera.cli.serve import check_port
from kakera.errors import UsageError
from kakera.run.process.kv_events import KvEvents
from kakera.run.scripted import ScriptedRecipe

COMMAND = [sys.executable, "-m", "kakera.cli"]
DATED = re.compile(r"\d{4}-\d\d-\d\d \S+ [A-Z]+ ")
STREAMS = [{"match": "weather", "text": "Sunny 😀 today."}, {"text": "Hello there."}]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "friend.json"
    path.write_text(json.dumps({"streams": STREAMS, "context": 512}))
    return f"scripted:{path}"


@pytest.fixture
def server(script: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*COMMAND, "serve", script, "--port", str(port), "--served-name", "friend"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(600):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.1)
        yield process, port
    finally:
        process.kill()
        process.wait()


def test_serve_answers_and_ends_cleanly(server: tuple[subprocess.Popen[str], int]) -> None:
    process, port = server
    body = json.dumps({"model": "friend", "prompt": "the weather?", "max_tokens": 20}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    assert json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["text"] == "Sunny 😀 today."

    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    psutil.wait_procs(children, timeout=60)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert process.stderr
    first, *others = process.stderr.read().splitlines()
    site = f"http://127.0.0.1:{port}"
    assert first == f"friend answers on {site}/v1, its page is {site}/"
    assert others and all(DATED.match(line) for line in others), others
    assert not [line for line in others if "uvicorn" in line]


def test_the_ready_line_stands_behind_an_open_port(script: str) -> None:
    with CommandServer(script, "--served-name", "friend", wait=False) as server:
        assert server.process.stderr
        line = server.process.stderr.readline()
        assert line.startswith("friend answers on ")
        assert urllib.request.urlopen(line.split()[-1], timeout=30).status == 200


@pytest.mark.parametrize(
    ("host", "said"), [("192.0.2.1", "no such address; give --host"), ("127.0.0.1", "is kakera running already?")]
)
def test_why_a_port_can_not_be_used_decides_what_is_advised(host: str, said: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match=said):
            check_port(host, taken.getsockname()[1])


def test_where_events_go_is_read_and_strangers_are_warned_of() -> None:
    script, said = ScriptedRecipe(Path("script.json")), []
    told = with_kv_events(script, "tcp://*:5557,kv@pod@mini", said.append)
    assert told == ScriptedRecipe(Path("script.json"), KvEvents("*", 5557, "kv@pod@mini"))
    assert "tokens of prompts to whoever can reach ports 5557 and 5558" in said.pop()
    for place in ("tcp://127.0.0.1:5557", "tcp://[::1]:5557"):
        assert with_kv_events(script, place, said.append).kv_events.topic == "" and not said
    for wrong in ("5557", "tcp://a", "ipc://x", "tcp://*:65535", "tcp://*:0", "tcp://a:b:1", "tcp://*:1,a b"):
        with pytest.raises(UsageError, match="write tcp://127"):
            with_kv_events(script, wrong, said.append)


@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.6])
def test_ctrl_c_while_the_engine_process_still_imports_is_a_quiet_end(script: str, seconds: float) -> None:
    """It goes to the whole group, as a terminal sends it. Imports take a second."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*COMMAND, "serve", script, "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        ours = psutil.Process(process.pid)
        while not any("spawn_main" in " ".join(child.cmdline()) for child in ours.children()):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in said and "KeyboardInterrupt" not in said, said


def test_broken_script_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    done = subprocess.run(
        [*COMMAND, "chat", f"scripted:{tmp_path / 'x.json'}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "streams" in done.stderr and "Traceback" not in done.stderr


def test_a_level_of_sleep_without_a_time_is_refused() -> None:
    from typer.testing import CliRunner

    from kakera.cli import app
    from kakera.errors import UsageError

    done = CliRunner().invoke(app, ["serve", "mini", "--sleep-level", "2"])
    assert isinstance(done.exception, UsageError) and "needs --sleep-after" in str(done.exception)


def test_the_command_lines_default_of_keep_alive_is_the_servers() -> None:
    from kakera.cli.options import DEFAULT_KEEP_ALIVE
    from kakera.server.http.connection import KEEP_ALIVE_SECONDS

    assert DEFAULT_KEEP_ALIVE == KEEP_ALIVE_SECONDS
