"""What the bench commands share: options, numbers in options, a spinner, and how results are shown."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kakera.cli.options import token_count
from kakera.cli.progress import spinner

SpecOption = Annotated[
    str | None,
    typer.Option(
        "--spec", help="Random weights of a known model's shapes instead of MODEL, such as qwen3.8-27b.", metavar="NAME"
    ),
]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw a plot: FILE.png, .svg or .pdf.", metavar="FILE")]


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers from 1 on, separated by commas, in order; 8k is 8,192. Raises UsageError."""
    from kakera.errors import UsageError

    try:
        found = sorted({token_count(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise UsageError(f"{option} {text}: give whole numbers from 1 on, such as 1,2,4 or 8k")
    return found


def model_of(model: str, spec: str | None) -> str:
    """MODEL, or what `--spec` means as a MODEL. Raises UsageError if both are given."""
    from kakera.cli.model import SPEC
    from kakera.errors import UsageError

    if spec is None:
        return model
    if model != "mini":
        raise UsageError(f"{model} and --spec {spec}: measure one of them")
    return SPEC + spec


@contextlib.contextmanager
def waiting(what: str) -> Any:
    """A spinner on stderr; yields the function that changes its text."""
    from rich.console import Console

    with spinner(Console(stderr=True), what) as status:
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
