"""Fixtures: places for servers, and a scripted model."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

STREAMS = [
    {"match": "slow", "text": "word " * 2000, "delay_ms": 20},
    {"match": "hang", "text": "word", "delay_ms": 3_600_000},
    {"match": "flood", "text": "word " * 60_000},
    {"text": "Hello."},
]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name: the path of a socket has at most 107 characters."""
    directory = Path(tempfile.mkdtemp(prefix="k-"))
    (directory / "a").mkdir()
    (directory / "b").mkdir()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"streams": STREAMS, "context": 65_536}))
    return f"scripted:{path}"
