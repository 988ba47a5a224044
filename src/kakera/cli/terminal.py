"""What terminals, pipes and disks do to output: letters they lack, control characters, a full disk, a reader gone."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import unicodedata
from collections.abc import Collection
from typing import Any

import typer

from kakera.errors import KakeraError

READER_GONE = 141  # 128 + SIGPIPE, as a shell shows any program whose reader ended first
LAYOUT = "\n\t"  # control characters that text is meant to have
STEERING = {"Cc", "Cf", "Zl", "Zp", "Cs"}  # control, format (right-to-left overrides), line separators, broken letters
JOINERS = "\u200c\u200d"  # of these, what Persian words and emoji are written with


class OutputLost(KakeraError):
    """Standard output can not take more: a full disk, a terminal that is gone."""


class ReaderGone(Exception):
    """Whoever read standard output (head, less) has left: nothing is left to say."""


class _Raw(io.FileIO):
    """Not OSError: typer and the libraries below would take that for their own and exit with 1, or show where."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise ReaderGone from None
        except BlockingIOError:
            raise
        except OSError as error:
            raise OutputLost(f"can not write the output: {error.strerror}") from None


def guard_output() -> None:
    """Have standard output fail in words, and write letters that its encoding lacks as escapes."""
    if sys.stdout is None:  # `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for as long as the process lives
    try:
        descriptor, encoding, terminal = sys.stdout.fileno(), sys.stdout.encoding, sys.stdout.isatty()
    except (OSError, ValueError):  # something in memory, such as a test's
        return
    raw = _Raw(descriptor, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=terminal)


def drop_output() -> None:
    """What is still buffered goes nowhere: Python would try it again at its exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def visible(text: str, layout: str = LAYOUT, kinds: Collection[str] = STEERING) -> str:
    """Control characters as escapes (\\r, \\x1b): in a message they hide what is wrong, or steer the terminal.

    `kinds` are Unicode's categories; what is in `layout` stays.
    """
    kept = layout + JOINERS
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in kinds and c not in kept else c for c in text
    )


def visible_message(message: str, arguments: list[str]) -> str:
    """A message as `visible`; line breaks that came in with an argument's value, or one of its parts, too."""
    for argument in arguments:
        value = argument.partition("=")[2] if argument.startswith("--") and "=" in argument else argument
        for part in (value, *value.split(",")):
            if part.strip() and part != visible(part, layout=""):
                message = re.sub(
                    re.escape(part), lambda found: visible(found[0], layout=""), message, flags=re.IGNORECASE
                )
    return visible(message)


def _escaped(found: re.Match[str]) -> str:
    return visible(found[0], layout="")


def say(line: str) -> None:
    """To stderr."""
    with contextlib.suppress(OSError):  # a full disk, or a terminal that is gone, must not end a server
        typer.echo(line, err=True)
