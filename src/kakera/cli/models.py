"""kakera models: what is on this disk, whether it is whole, and what of it fits on these cards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakera.cli.options import JsonOption, with_memory_options
from kakera.plan.plan import Wishes

if TYPE_CHECKING:
    from rich.table import Table

    from kakera.arch.weigh import Entry
    from kakera.hub.disk import Snapshot
    from kakera.hub.names import Source
    from kakera.target.devices import Machine

DAY = 86400.0


@dataclass(frozen=True)
class Found:
    """A model directory. `problem`: why it can not be served as it is, "" if it can. `fits`: None if that is not
    known; `context` and `max_running` are those of the plan."""

    name: str
    path: Path
    bytes: int
    used: float | None
    source: Source | None = None
    format: str = ""
    problem: str = ""
    fits: bool | None = None
    context: int | None = None
    max_running: int | None = None

    def json(self) -> dict[str, Any]:
        found = asdict(self)
        used = found.pop("used")
        last_used = used and time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(used))
        return {**found, "path": str(self.path), "last_used": last_used}


@with_memory_options
def models(
    directories: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIR]...", help="Also model directories in here, or these.")
    ] = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """List models on this disk: `mini`, the Hugging Face cache, and what lies in DIR.

    With bytes, format, revision, and whether it fits on this machine's cards, or on those of --gpus.
    """
    import json

    from kakera.hub.disk import snapshots
    from kakera.target.devices import resolve_to_compute

    machine = resolve_to_compute(wishes.gpus)
    kept, broken = snapshots()
    rows = (*_given(directories or ()), *(_of_cache(row) for row in kept if not row.only_looked_at))
    found = [judged(row, wishes, machine) for row in rows]
    if as_json:
        typer.echo(json.dumps({"models": [row.json() for row in found], "broken": broken}, indent=2))
        return
    from rich.console import Console

    from kakera.cli.terminal import visible

    console = Console(highlight=False, markup=False)
    console.print(_table(found))
    for row in found:
        if row.problem:
            console.print(visible(f"{row.name}: {row.problem}"), style="yellow", soft_wrap=True)
    for line in broken:
        console.print(visible(f"broken: {line}"), style="yellow", soft_wrap=True)


def _given(directories: Sequence[Path]) -> list[Found]:
    """`mini`, and each directory with a config.json among those named and those directly in them."""
    from kakera.cli.model import BUNDLED
    from kakera.errors import UsageError
    from kakera.hub.disk import source_of

    found = [Found("mini", BUNDLED, _bytes_in(BUNDLED), None)]
    for given in directories:
        if not given.is_dir():
            raise UsageError(f"{given}: no such directory")
        for path in (given, *sorted(given.iterdir())):
            if (path / "config.json").is_file():
                found.append(Found(str(path), path, _bytes_in(path), _last_read(path), source_of(path)))
    return found


def _of_cache(kept: Snapshot) -> Found:
    from kakera.hub.disk import source_of

    return Found(kept.name, kept.path, kept.bytes + kept.waiting, kept.used, source_of(kept.path))


def judged(row: Found, wishes: Wishes, machine: Machine) -> Found:
    """With its format and fit, by what `plan` and `serve` would say of it."""
    from dataclasses import replace

    from kakera.cli.model import read_shape, whole
    from kakera.errors import KakeraError, PlanRefused
    from kakera.plan.planner import make_plan, unserved_on

    try:
        whole(row.path)
    except KakeraError as error:
        goes_on = f"; kakera pull {row.name} fetches what is missing" if row.source else ""
        return replace(row, problem=f"{error}{goes_on}")
    try:
        shape = read_shape(str(row.path))
        row = replace(row, format=format_of(shape.entries()))
        if why := unserved_on(shape.spec, machine):
            return replace(row, problem=why)
        plan = make_plan(shape.spec, wishes, machine, shape.weights())
    except PlanRefused:
        return replace(row, fits=False)
    except KakeraError as error:
        return replace(row, problem=str(error))
    return replace(row, fits=True, context=plan.context, max_running=plan.slots)


def format_of(entries: list[Entry]) -> str:
    """ "escha 2.5 bits": what most bytes are stored as, and the mean of all."""
    import math

    by_kind: dict[str, int] = {}
    for entry in entries:
        by_kind[entry.kind] = by_kind.get(entry.kind, 0) + entry.bytes
    values = sum(math.prod(entry.shape) for entry in entries)
    mean = 8 * sum(by_kind.values()) / max(1, values)
    return f"{max(by_kind, key=by_kind.__getitem__)} {mean:.2g} bits" if by_kind else ""


def _bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _last_read(directory: Path) -> float:
    return max(path.stat().st_atime for path in directory.iterdir() if path.is_file())


def _table(found: list[Found]) -> Table:
    from rich.table import Table

    from kakera.cli.terminal import visible
    from kakera.plan.table import gigabytes

    table = Table(box=None, pad_edge=False)
    for column in ("model", "bytes", "format", "fit", "last used"):
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for row in found:
        table.add_row(visible(row.name, layout=""), gigabytes(row.bytes), row.format, _fit(row), _ago(row.used))
    return table


def _fit(row: Found) -> str:
    if row.problem:
        return "not as it is, see below"
    return f"{row.context:,} tokens, {row.max_running} running" if row.fits else "no: kakera plan says what would help"


def _ago(used: float | None) -> str:
    if used is None:
        return ""
    days = int((time.time() - used) / DAY)
    return "today" if days < 1 else f"{days} day{'s' if days > 1 else ''} ago"
