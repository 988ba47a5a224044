"""The server against its own /openapi.json: a model with random weights answers what schemathesis makes up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_server import CommandServer

HERE = Path(__file__).parent
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
OPTIONS = (
    f"--checks={','.join(CHECKS)}",
    "--phases=examples,coverage",  # what is at and beyond each bound; fuzzing found no more and took as long
    "--generation-deterministic",
    "--no-shrink",
    "--continue-on-failure",
    "--exclude-path-regex=/render$",  # the same bodies as without it; tests/server has what they answer
    "--exclude-path=/model_info",  # the new spelling of a route that is tested
    "--exclude-path=/server_info",
)


@pytest.fixture(scope="module")
def random_weights(tiny_model: Path) -> Iterator[CommandServer]:
    with CommandServer(str(tiny_model), "--gpus", "cpu", "--context", "256") as server:
        yield server


def test_every_example_of_the_document_is_answered(random_weights: CommandServer) -> None:
    document = random_weights.http.get("/openapi.json").json()
    posts = {path: ways["post"] for path, ways in document["paths"].items() if "post" in ways}
    posts = {path: post for path, post in posts.items() if post.get("requestBody", {}).get("required")}
    assert len(posts) == 10
    for path, post in posts.items():
        reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        examples = document["components"]["schemas"][reference.rpartition("/")[2]]["examples"]
        for example in examples:
            answer = random_weights.http.post(path, json=example)
            assert answer.status_code == 200, (path, example, answer.text)
            streams = bool(example.get("stream")) and not path.endswith("/render")
            assert answer.headers["content-type"].startswith("text/event-stream") == streams


@pytest.mark.sweep
def test_made_up_requests_get_the_answers_that_the_document_promises(
    random_weights: CommandServer, tmp_path: Path
) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis comes with the extra `clients`")
    address = f"http://127.0.0.1:{random_weights.port}/openapi.json"
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", address, *OPTIONS],
        cwd=tmp_path,  # where it leaves its files
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def python_path() -> str:
    return os.pathsep.join(path for path in (str(HERE), os.environ.get("PYTHONPATH")) if path)
