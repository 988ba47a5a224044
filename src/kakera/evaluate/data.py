"""Where evaluation data comes from: a file that the user names, or the small suites shipped in the package."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

from kakera.errors import UsageError

Case = dict[str, Any]  # one line of a suite: id, kind, messages, expected, score, ...


def shipped(name: str) -> Path:
    """Path of a file of the package's evaluation data."""
    return Path(str(files("kakera"))) / "data" / "eval" / name


def load_lines(path: Path) -> list[Case]:
    """Read a jsonl file. Raises UsageError with the line that is not JSON."""
    rows = []
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UsageError(f"{path}, line {number}: not JSON ({error})") from None
    return rows


def load_cases(
    suite: str,
    path: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
) -> list[Case]:
    """The cases of a suite, at most `limit` of them: a sample drawn by `seed`, in the order of the file. Images that
    they name as files lie beside it, and become data URLs.

    `max_prompt_tokens` leaves out cases whose `prompt_tokens` say that they are longer. Raises UsageError if a case
    lacks a key or nothing is left.
    """
    source = path or shipped(f"{suite}.jsonl")
    if path is None and not source.is_file():
        raise UsageError(f"no suite of the kind {suite} is shipped: name one with --data FILE")
    cases = load_lines(source)
    for number, case in enumerate(cases, 1):
        if missing := [key for key in ("id", "kind", "messages", "score") if key not in case]:
            raise UsageError(
                f"{source}, case {number}: lacks {', '.join(missing)}; see docs/developers/evaluation.md for the form"
            )
    if repeated := [name for name, count in Counter(case["id"] for case in cases).items() if count > 1]:
        raise UsageError(f"{source}: several cases have the id {repeated[0]!r}; answers are told apart by it")
    if max_prompt_tokens is not None:
        cases = [case for case in cases if case.get("prompt_tokens", 0) <= max_prompt_tokens]
    if limit is not None and limit < len(cases):
        keep = sorted(random.Random(seed).sample(range(len(cases)), limit))
        cases = [cases[i] for i in keep]
    if not cases:
        raise UsageError(f"{source}: no case is left to run; raise --limit or --max-prompt-tokens")
    return [{**case, "messages": [_with_files(m, source.parent) for m in case["messages"]]} for case in cases]


def _with_files(message: Case, directory: Path) -> Case:
    """Images of a message as data URLs. Raises UsageError for a file that can not be read."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [_with_file(part, directory) if part.get("type") == "image_url" else part for part in content]
    return {**message, "content": parts}


def _with_file(part: Case, directory: Path) -> Case:
    url = part["image_url"]["url"]
    if url.startswith("data:"):
        return part
    try:
        data = base64.b64encode((directory / url).read_bytes()).decode()
    except OSError as error:
        raise UsageError(f"can not read {directory / url}: {error.strerror}") from None
    return {**part, "image_url": {"url": f"data:;base64,{data}"}}


def load_baseline(path: Path) -> dict[str, Case]:
    """Answers by case id: lines with `id`, `answer` and `ok` (`right` in suites of images)."""
    return {row["id"]: {"ok": row.get("right"), **row} for row in load_lines(path)}


def load_documents(path: Path | None) -> list[str]:
    """Held-out text: documents joined by a NUL byte (a plain text file is one document)."""
    return [text for text in _read(path or shipped("heldout.txt")).split("\0") if text]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"can not read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
