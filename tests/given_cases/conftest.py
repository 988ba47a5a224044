"""Two real servers that the cases share: a scripted model and a tiny one with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_server import CommandServer

STREAMS = [
    {"match": "fox", "pieces": ["The quick br", "own", " f", "ox", " jumps"]},
    {"match": "turns", "pieces": ["Hi", "\n", "User", ":", " more"]},
    {"match": "half", "pieces": ["Hi", "\n", "Use"]},
    {"match": "endless", "text": "word " * 3000},
    {"match": "slow", "text": "word " * 3000, "delay_ms": 20},
    {"text": "Hello there."},
]


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps({"streams": STREAMS, "context": 512}))
    return f"scripted:{path}"


@pytest.fixture(scope="package")
def scripted(script: str) -> Iterator[CommandServer]:
    with CommandServer(script) as server:
        yield server


@pytest.fixture(scope="package")
def tiny(tiny_model: Path) -> Iterator[CommandServer]:
    with CommandServer(str(tiny_model), "--gpus", "cpu", "--context", "1024") as server:
        yield server
