"""Text and JSON files of a checkpoint, with words for one that is something else. No torch."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

from kakera.errors import CheckpointError

POINTER = b"version https://git-lfs"  # how the file begins that Git keeps in place of a large one
WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)  # UTF-32 LE begins as UTF-16 LE does


def refuse_pointer(path: Path, begin: bytes) -> None:
    """Raise CheckpointError if a file that begins so stands for one that was not fetched."""
    if begin.startswith(POINTER):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull` in {path.parent}")


def read_text(path: Path) -> str:
    """UTF-8, with or without a byte order mark; lines end with a line feed. Raises CheckpointError for anything else,
    or if the file can not be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can not be read ({error.strerror or error})") from None
    refuse_pointer(path, data)
    if data.startswith(WIDE) or b"\0" in data[:4]:
        raise CheckpointError(f"{path} is text in UTF-16 or UTF-32; save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 (byte {error.start} is {data[error.start]:#04x})") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises CheckpointError as `read_text`, and if it is not JSON."""
    text = read_text(path)
    try:
        return parsed(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None


def read_object(path: Path) -> dict[str, Any]:
    """As `read_json`, of a file that must hold an object; {} if there is none."""
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return found


def parsed(data: str | bytes) -> Any:
    """Raises ValueError for what is not JSON, not UTF-8, or nested deeper than a stack is."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
