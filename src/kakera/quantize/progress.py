"""Show the progress of a quantisation: a bar where rich is installed, else a line per linear."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kakera.quantize.report import Progress, Reporter


@contextmanager
def console_progress() -> Iterator[Reporter]:
    """Yields what `quantize_checkpoint` takes as `progress`; writes to stderr."""
    try:
        import rich.progress as bars
        from rich.console import Console
    except ImportError:
        yield _lines()
        return
    columns = (
        bars.TextColumn("{task.description:<44}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    if not console.is_terminal:  # a log file: one line a linear reads better than a frozen bar
        yield _lines()
        return
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task("quantising", total=None)

        def report(step: Progress) -> None:
            bar.update(task, total=step.total_weights, completed=step.done_weights, description=step.last.module)

        yield report


def _lines() -> Reporter:
    start = time.monotonic()

    def report(step: Progress) -> None:
        last, share = step.last, step.done_weights / step.total_weights
        how = "found" if step.resumed else f"{time.monotonic() - start:.1f} s"
        line = f"{share:6.1%}  {last.module}  {last.bits} bits  relative error {last.error:.5f}  {how}"
        print(line, file=sys.stderr, flush=True)

    return report
