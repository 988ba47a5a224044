"""The example of kakera under Ray Serve: it starts servers, keeps a session on one, and replaces one that was killed.

Ray is 500 MB and takes half a minute and 2.5 GB to start, so it is in no extra: this runs where somebody has installed
it (`pip install 'ray[serve]==2.60.0'`), which docs/scale-out.md says was done.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from command_server import COMMAND, free_port

pytest.importorskip("ray.serve", reason="ray[serve] is not installed (500 MB; see docs/scale-out.md)")
EXAMPLES = Path(__file__).parents[2] / "examples"
START_SECONDS = 240


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """Serve's address, with two servers behind it."""
    import ray
    from ray import serve

    script = tmp_path / "script.json"
    streams = [{"text": "Thought.\n</think>\n\nWell.", "delay_ms": 5}]
    script.write_text(json.dumps({"streams": streams}))
    command = [*COMMAND, f"scripted:{script}", "--served-name", "mini", "--log-level", "error"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), *sys.path]))  # of replicas, too
    monkeypatch.syspath_prepend(EXAMPLES)
    from ray_serve import build

    port = free_port()
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build({"command": shlex.join(command), "servers": "2", "cpus": "0.5"}), blocking=False)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
        serve.shutdown()
    finally:
        ray.shutdown()


def ask(front: httpx.Client, session: str, said: str = "fox " * 200) -> httpx.Response:
    body = {"model": "mini", "messages": [{"role": "user", "content": said}]}
    return front.post("/v1/chat/completions", json=body, headers={"x-session-id": session})


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def servers() -> list[psutil.Process]:
    """Those that have not been replaced: each replica's one child."""
    below = psutil.Process().children(recursive=True)
    return [each for each in below if each.status() != "zombie" and each.cmdline()[1:4] == COMMAND[1:4]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_servers_start_a_session_stays_and_one_that_was_killed_is_replaced(front: httpx.Client) -> None:
    sessions = [f"session-{number}" for number in range(8)]
    for session in sessions:
        ask(front, session, f"{session} " * 100)
    assert all(cached(ask(front, session, f"{session} " * 100)) >= 192 for session in sessions)
    with front.stream("POST", "/v1/messages", json={"max_tokens": 20, "stream": True, "messages": []}) as answer:
        assert answer.status_code == 400, "the server's own refusals get through"
    running = servers()
    assert len(running) == 2
    running[0].kill()
    end = time.monotonic() + START_SECONDS
    while running[0] in servers() or len(servers()) < 2 or any(ask(front, s).status_code != 200 for s in sessions):
        assert time.monotonic() < end, "nobody took its place"
        time.sleep(0.5)
