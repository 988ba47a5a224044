"""The command line: one file a command. Importing this package imports typer and nothing heavy.

Every command imports what it needs when it runs, so that `kakera --help` and `kakera plan` never wait for torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from kakera import __version__
from kakera.cli import bench, calibrate, chat, doctor, eval, info, plan, quantize, replay, serve, service
from kakera.errors import KakeraError

app = typer.Typer(
    name="kakera",
    help="Large hybrid language models with 2-bit weights and a 2-bit KV cache on small graphics cards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.command("plan")(plan.plan)
app.command("quantize")(quantize.quantize)
app.command("calibrate")(calibrate.calibrate)
app.command("info")(info.info)
app.command("replay")(replay.replay)
app.command("doctor")(doctor.doctor)
app.add_typer(service.app, name="service")
app.add_typer(eval.app, name="eval")
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kakera {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(command: Callable[[], object] = app) -> None:
    """Entry point. Exit status: 0 done, 1 failed or refused, 2 wrong usage, 70 the engine died, 130 interrupted."""
    try:
        command()
    except KakeraError as error:
        from rich.console import Console
        from rich.text import Text

        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(Text.assemble(("kakera: ", "bold red"), str(error)))
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # the reader (head, less) went away: nothing is left to say, and Python must not try again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
