"""Show how far an engine has come while it starts: a bar on a terminal, a line for each slow stage in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str, int, int], None]  # what is done, how much of it, of how much
SLOW_SECONDS = 2.0  # a stage that took longer deserves a line in a log


@contextmanager
def start_progress() -> Iterator[Tell]:
    """Yields what `build_engine` takes as `progress`; writes to stderr, from whatever process it is called in."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lines(lambda line: print(line, file=sys.stderr, flush=True))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, int] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield tell


def lines(write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> Tell:
    """One line for a stage that is over, if it took longer than SLOW_SECONDS."""
    began = {"": clock()}

    def tell(stage: str, done: int, total: int) -> None:
        now = clock()
        since = began.setdefault(stage, max(began.values()))
        if done == total:
            if now - since >= SLOW_SECONDS:
                write(f"{stage}: {total} in {now - since:.1f} s")
            began[stage] = now

    return tell
