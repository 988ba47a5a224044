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


def _count(number: int) -> str:
    return f"{number:,}"


@contextmanager
def progress(what: str, total: int, shown: Callable[[int], str] = _count) -> Iterator[Advance]:
    """Yields the function that moves a bar by so many; without a terminal a line tells of every tenth or minute."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if not total:
        yield lambda more: None
        return
    if not (console := Console(stderr=True)).is_terminal:
        yield _lines(what, total, shown)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total, done=shown(0))

        def advance(more: int) -> None:
            bar.advance(task, more)
            bar.update(task, done=f"{shown(int(bar.tasks[0].completed))} of {shown(total)}")

        yield advance


def _lines(what: str, total: int, shown: Callable[[int], str]) -> Advance:
    done, told = 0, time.monotonic()

    def advance(more: int) -> None:
        nonlocal done, told
        before, done, now = done, done + more, time.monotonic()
        if done * 10 // total > before * 10 // total or now - told >= QUIET_SECONDS:
            typer.echo(f"{what}: {shown(done)} of {shown(total)}", err=True)
            told = now

    return advance


def spinner(console: Console, text: str) -> Status:
    """rich's spinner, in letters that the terminal has."""
    return console.status(text, spinner="dots" if console.encoding.startswith("utf") else "line")
