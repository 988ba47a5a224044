"""Cases about starting, dying and starting again."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from command_server import COMMAND, CommandServer


def test_case_26_and_28_a_killed_server_takes_its_engine_along_and_can_be_started_again_at_once(script: str) -> None:
    with CommandServer(script) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        server.process.kill()
        server.process.wait()
        with CommandServer(script, port=server.port) as again:
            assert again.chat("hi").status_code == 200
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


def test_case_71_a_model_without_its_tokenizer_does_not_start(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "tokenizer.json").unlink()
    done = subprocess.run([*COMMAND, str(model)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "lacks tokenizer.json" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("stops", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])  # and SIGINT: cli/test_serve.py
def test_a_stopped_server_ends_within_seconds_with_status_0_and_nobody_waits_in_silence(
    script: str, stops: list[int]
) -> None:
    answers: list[httpx.Response] = []
    with CommandServer(script) as server:

        def ask(stream: bool) -> None:
            answers.append(server.chat("slow", stream=stream))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        while "kakera_running 2.0" not in server.http.get("/metrics").text:
            time.sleep(0.02)
        for stop in stops:  # the second one is for those who do not want to wait the three seconds
            server.process.send_signal(stop)
            time.sleep(0.3)
        assert server.process.wait(timeout=60) == 0
        for thread in threads:
            thread.join(60)
    assert sorted(answer.status_code for answer in answers) == [200, 503]
    assert all('"error"' in answer.text for answer in answers)
