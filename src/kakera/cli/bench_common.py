"""What the bench commands share: options, numbers in options, a spinner, and how results are shown."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw a plot: FILE.png, .svg or .pdf.", metavar="FILE")]


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers from 1 on, separated by commas, in order. Raises UsageError."""
    from kakera.errors import UsageError

    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise UsageError(f"{option} {text}: give whole numbers from 1 on, such as 1,2,4")
    return found


@contextlib.contextmanager
def waiting(what: str) -> Any:
    """A spinner on stderr; yields the function that changes its text."""
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield status.update


def show(result: dict[str, Any], as_json: bool, views: Sequence[Any]) -> None:
    """One JSON document, or the views one below the other."""
    if as_json:
        import json

        typer.echo(json.dumps(result, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for view in views:
        console.print(view)
