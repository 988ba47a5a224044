"""The files that a batch writes: answers, which a later run goes on from, and errors, which each run writes anew."""

from __future__ import annotations

import fcntl
import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from kakera.batch.lines import Fingerprints, fingerprint, sorted_fingerprints
from kakera.errors import UsageError


class _Written(msgspec.Struct):
    custom_id: str | None
    response: Any
    error: Any


_written = msgspec.json.Decoder(_Written)


def errors_beside(out: Path) -> Path:
    """answers.jsonl -> answers.errors.jsonl"""
    return out.with_name(f"{out.stem}.errors{out.suffix}")


class Output:
    """Lines go out one a write, so that a kill leaves whole lines and at most one torn one, the last.

    Raises UsageError for a file that is none of a batch's, or that another run is writing.
    """

    def __init__(self, out: Path, source: Path):
        self.errors_path = errors_beside(out)
        for path in (out, self.errors_path):
            if path.exists() and path.samefile(source):
                raise UsageError(f"{path} is the file that is read; give another one for the answers")
        self._answers = _opened(out)
        try:
            self.answered = _mend(self._answers, out)
            self._errors = _opened(self.errors_path)
            _mend(self._errors, self.errors_path)
        except BaseException:
            os.close(self._answers)
            raise
        os.truncate(self._errors, 0)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """A file without errors is none."""
        for descriptor in (self._answers, self._errors):
            os.fsync(descriptor)
        if kind is None and os.fstat(self._errors).st_size == 0:
            self.errors_path.unlink(missing_ok=True)
        os.close(self._answers)
        os.close(self._errors)

    def answer(self, line: bytes) -> None:
        _write(self._answers, line)

    def error(self, line: bytes) -> None:
        _write(self._errors, line)


def _opened(path: Path) -> int:
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no file: what is in it already could not be read")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(f"{path}: another kakera batch is writing it") from None
    except OSError:
        pass  # a file system without locks
    return descriptor


def _mend(descriptor: int, path: Path) -> Fingerprints:
    """Who is in the file. A last line that a kill tore is taken out, or completed if only its end is missing."""
    found, end, number = array("Q"), 0, 0
    with open(descriptor, "rb", closefd=False) as file:
        for number, line in enumerate(file, 1):
            try:
                written = _written.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                if not line.endswith(b"\n") and (number > 1 or _is_beginning(line)):
                    break
                raise UsageError(f"{path}: line {number} is none of a batch's answers; give another file") from None
            if written.custom_id is not None:
                found.append(fingerprint(written.custom_id))
            end += len(line)
            if not line.endswith(b"\n"):
                end += _write(descriptor, b"\n")
    os.truncate(descriptor, end)
    return sorted_fingerprints(found)


def _is_beginning(line: bytes) -> bool:
    """Whether a file's only line, torn, is one of ours; what else somebody named is not cut to nothing."""
    ours = b'{"id":"batch_req_'
    return line.startswith(ours) or ours.startswith(line)


def _write(descriptor: int, data: bytes) -> int:
    """All of it, in one write as a rule; a full disk raises OSError."""
    left = data
    while left:
        left = left[os.write(descriptor, left) :]
    return len(data)
