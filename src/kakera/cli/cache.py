"""kakera cache: what the disk cache holds, and its end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kakera.cli.options import JsonOption

if TYPE_CHECKING:
    from kakera.disk.home import Directory

app = typer.Typer(name="cache", help="The prefix cache on disk (kakera serve --disk-cache).", no_args_is_help=True)


@app.command("ls")
def ls(as_json: JsonOption = False) -> None:
    """What is there, the least recently used model first."""
    import json
    import time

    from rich.console import Console
    from rich.table import Table

    from kakera.cli.terminal import visible
    from kakera.disk.home import in_use
    from kakera.plan.table import gigabytes

    home, found = _held()
    if as_json:
        entries = [
            {"path": str(d.path), "bytes": d.bytes, "used_at": d.used_at, "in_use": in_use(d.path), "key": dict(d.key)}
            for d in found
        ]
        typer.echo(json.dumps({"home": str(home), "bytes": sum(d.bytes for d in found), "models": entries}, indent=2))
        return
    if not found:
        typer.echo(f"nothing in {home}")
        return
    table = Table(box=None, pad_edge=False)
    for column, justify in (("model", "left"), ("size", "right"), ("last used", "left"), ("made with", "left")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for each in found:
        when = "now" if in_use(each.path) else time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used_at))
        with_what = ", ".join(each.key[name] for name in ("KV codec", "states", "device") if name in each.key)
        name = each.key.get("model", each.path.name)
        table.add_row(visible(name, layout=""), gigabytes(each.bytes), when, visible(with_what, layout=""))
    Console(highlight=False, markup=False).print(table)
    typer.echo(f"{gigabytes(sum(each.bytes for each in found))} in {home}")


@app.command("purge")
def purge() -> None:
    """Remove all of it but what a running server writes. Drives keep remnants of what is removed."""
    from kakera.disk.home import in_use, remove
    from kakera.plan.table import gigabytes

    (home, found), gone = _held(), 0
    for each in found:
        if remove(each.path):
            gone += each.bytes
            continue
        why = "a server writes there; stop it first" if in_use(each.path) else "it can not be removed"
        typer.echo(f"kept {each.path}: {why}", err=True)
    if gone or not found:
        typer.echo(f"removed {gigabytes(gone)} from {home}")


def _held() -> tuple[Path, list[Directory]]:
    """The home and what is in it. Raises UsageError."""
    from kakera.disk.home import default_home, directories
    from kakera.errors import UsageError

    home = default_home()
    try:
        return home, directories(home)
    except OSError as error:
        raise UsageError(f"{home} can not be read ({error.strerror}): whose is it?") from None
