"""How far long work has come, on stderr: a bar or a spinner on a terminal, lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

QUIET_SECONDS = 60.0  # in a log, a minute without a word looks like a hang
Advance = Callable[[int], None]


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """Yields the function that moves a bar by so many; without a terminal a line tells of every tenth or minute."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if not (console := Console(stderr=True)).is_terminal:
        yield _lines(what, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda more: bar.advance(task, more)


def _lines(what: str, total: int) -> Advance:
    done, told = 0, time.monotonic()

    def advance(more: int) -> None:
        nonlocal done, told
        before, done, now = done, done + more, time.monotonic()
        if done * 10 // total > before * 10 // total or now - told >= QUIET_SECONDS:
            typer.echo(f"{what}: {done:,} of {total:,}", err=True)
            told = now

    return advance


def spinner(console: Console, text: str) -> Status:
    """rich's spinner, in letters that the terminal has."""
    return console.status(text, spinner="dots" if console.encoding.startswith("utf") else "line")
