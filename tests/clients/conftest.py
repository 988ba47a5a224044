"""A real server process that plays the answers which the clients' tests expect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_server import CommandServer

CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
# A stream is chosen by a word of the prompt. What begins with "Thought." answers requests that let the model think.
STREAMS = [
    {"match": "rain at all", "text": "Thought.\n</think>\n\nIt rains."},  # a tool's result
    {"match": "umbrella", "text": f"Thought.\n</think>\n\n{CALL}"},
    {"match": "parasol", "text": CALL},
    {"match": "animal", "text": 'Thought.\n</think>\n\n{"name":"fox","legs":4}'},
    {"match": "endless", "text": "Thought.\n</think>\n\n" + "word " * 3000, "delay_ms": 10},
    {"match": "briefly", "text": "Hello there."},
    {"text": "Thought.\n</think>\n\nHello there."},
]


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandServer]:
    path: Path = tmp_path_factory.mktemp("clients") / "script.json"
    path.write_text(json.dumps({"streams": STREAMS}))
    with CommandServer(f"scripted:{path}", "--served-name", "mini") as started:
        yield started
