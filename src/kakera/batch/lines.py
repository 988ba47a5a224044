"""Lines of a batch in OpenAI's form: what is read from a file of them, and what is written about each. A line is never
larger in memory than MOST_BYTES, and a file is never held."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kakera.errors import UsageError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MOST_BYTES = 64 * 2**20  # of a line; the server takes 32 MiB at most
Fingerprints = npt.NDArray[np.uint64]  # sorted


@dataclass(frozen=True)
class Row:
    """A request of the file: line `number` (from 1) asks for `url` with `body`, JSON as it stands there."""

    number: int
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True)
class Fault:
    """A line that can not be asked, or a request that nobody answered, and why."""

    number: int
    custom_id: str | None
    code: str
    message: str


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    stream: Any = None


_line, _body = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Body)


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank; of one that is too long MOST_BYTES + 1. Raises UsageError."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MOST_BYTES + 1):
                number += 1
                rest = line
                while len(rest) > MOST_BYTES and not rest.endswith(b"\n"):
                    rest = file.readline(MOST_BYTES + 1)
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def parse(number: int, line: bytes) -> Row | Fault:
    """A malformed line is a Fault, with its custom_id if that much can be read."""
    if len(line) > MOST_BYTES:
        return Fault(number, None, "line_too_large", f"line {number} is longer than {MOST_BYTES} bytes")
    try:
        found = _line.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Fault(number, None, "invalid_json_line", f"line {number} is no JSON object: {error}")
    name = found.custom_id
    if not isinstance(name, str) or not name:
        return Fault(number, None, "invalid_custom_id", f"line {number}: custom_id has to be a string, and not empty")
    if found.method != "POST":
        return Fault(number, name, "invalid_method", f"line {number}: method is {found.method!r}; it has to be POST")
    if found.url not in URLS:
        said = f"line {number}: url is {found.url!r}; it has to be one of {', '.join(URLS)}"
        return Fault(number, name, "invalid_url", said)
    body = bytes(found.body)
    try:
        streams = _body.decode(body).stream
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Fault(number, name, "invalid_body", f"line {number}: body has to be an object")
    if streams:
        return Fault(number, name, "invalid_body", f"line {number}: stream can not be true in a batch")
    return Row(number, name, found.url, body)


def read(path: Path) -> Iterator[Row | Fault]:
    """Raises UsageError for a file that can not be read."""
    return (parse(number, line) for number, line in raw_lines(path))


def fingerprint(custom_id: str) -> int:
    """64 bits, so that a million names are 8 MB; two of a million are alike once in 40 million files."""
    return int.from_bytes(hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def sorted_fingerprints(collected: array[int]) -> Fingerprints:
    return np.sort(np.frombuffer(collected, np.uint64)) if collected else np.empty(0, np.uint64)


def among(custom_id: str, known: Fingerprints) -> bool:
    print_ = np.uint64(fingerprint(custom_id))
    at = int(np.searchsorted(known, print_))
    return at < len(known) and bool(known[at] == print_)


def survey(path: Path) -> int:
    """How many lines a file has. Raises UsageError if it has none, or two of one custom_id, whose answers nobody could
    tell apart; and for a pipe, which can be read once alone."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no file: it is read twice, first for names that are there twice")
    seen, count = array("Q"), 0
    for line in read(path):
        count += 1
        if line.custom_id is not None:
            seen.append(fingerprint(line.custom_id))
    if not count:
        raise UsageError(f"{path}: there is no line in it")
    known = sorted_fingerprints(seen)
    if len(twice := known[1:][known[1:] == known[:-1]]):
        first = int(twice[0])
        alike = [line for line in read(path) if line.custom_id is not None and fingerprint(line.custom_id) == first]
        raise UsageError(
            f"{path}: lines {alike[0].number} and {alike[1].number} have the same custom_id {alike[0].custom_id!r}"
            f"{f', and {len(twice) - 1} more lines repeat one' if len(twice) > 1 else ''}; each line needs its own"
        )
    return count


def answer_line(row: Row, status: int, request_id: str, body: bytes) -> bytes:
    """What is written about a reply, whatever its status. A body that is no JSON becomes a string."""
    try:
        shown: Any = msgspec.Raw(msgspec.json.format(body, indent=-1))
    except msgspec.MsgspecError:
        shown = body.decode("utf-8", "replace")
    response = {"status_code": status, "request_id": request_id, "body": shown}
    return _written(row.custom_id, row.number, response, None)


def error_line(fault: Fault) -> bytes:
    """What is written where there is no reply."""
    return _written(fault.custom_id, fault.number, None, {"code": fault.code, "message": fault.message})


def _written(custom_id: str | None, number: int, response: Any, error: Any) -> bytes:
    name = f"batch_req_{fingerprint(custom_id) if custom_id is not None else number:016x}"
    line = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"
