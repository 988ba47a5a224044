"""kakera doctor: what is wrong with this machine, and the fix."""

from __future__ import annotations

from typing import Annotated

import typer

from kakera.cli.options import JsonOption

SYMBOLS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "broken": ("BROKEN", "bold red")}


def doctor(
    as_json: JsonOption = False,
    check: Annotated[bool, typer.Option("--check", help="Print only what is broken.")] = False,
) -> None:
    """Check this machine. Exit status 1 if something is broken; every finding comes with its fix."""
    from kakera.cli.checks import run_checks

    findings = [finding for finding in run_checks() if finding.status == "broken" or not check]
    broken = any(finding.status == "broken" for finding in findings)
    if as_json:
        import json

        typer.echo(json.dumps({"ok": not broken, "findings": [vars(f) for f in findings]}, indent=2))
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        for finding in findings:
            word, style = SYMBOLS[finding.status]
            console.print(Text.assemble((f"{word:<7}", style), f" {finding.name}: {finding.detail}"), soft_wrap=True)
            if finding.fix:
                console.print(Text(f"        fix: {finding.fix}", style="dim"), soft_wrap=True)
    raise typer.Exit(1 if broken else 0)
