"""The command line: one file a command. Importing this package imports typer and nothing heavy.

Every command imports what it needs when it runs, so that `kakera --help` and `kakera plan` never wait for torch.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from kakera import __version__
from kakera.cli import (
    batch,
    bench,
    cache,
    calibrate,
    chat,
    doctor,
    eval,
    info,
    models,
    plan,
    prove,
    pull,
    quantize,
    replay,
    serve,
    service,
    up,
)
from kakera.cli.terminal import READER_GONE, OutputLost, ReaderGone, drop_output, guard_output, visible_message
from kakera.errors import KakeraError

app = typer.Typer(
    name="kakera",
    help="Large hybrid language models with 2-bit weights and a 2-bit KV cache on small graphics cards.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit it
    pretty_exceptions_enable=False,
)
app.command("up")(up.up)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.command("batch")(batch.batch)
app.command("plan")(plan.plan)
app.command("prove")(prove.prove)
app.command("pull")(pull.pull)
app.command("models")(models.models)
app.command("quantize")(quantize.quantize)
app.command("calibrate")(calibrate.calibrate)
app.command("info")(info.info)
app.command("replay")(replay.replay)
app.command("doctor")(doctor.doctor)
app.add_typer(service.app, name="service")
app.add_typer(eval.app, name="eval")
app.add_typer(bench.app, name="bench")
app.add_typer(cache.app, name="cache")


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
    """Entry point. Exit status: 0 done, 1 failed or refused, 2 wrong usage, 70 the engine died, 130 interrupted, 141
    when the reader of standard output is gone."""
    guard_output()
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except KakeraError as error:
        if isinstance(error, OutputLost):
            drop_output()
        _complain(str(error))
        sys.exit(error.exit_status)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _complain(f"{error.strerror}{f': {error.filename}' if error.filename else ''}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ReaderGone, BrokenPipeError):
        drop_output()
        sys.exit(READER_GONE)


def _complain(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with contextlib.suppress(OSError):  # where errors can not be written either, the exit status has to do
        console.print(Text.assemble(("kakera: ", "bold red"), visible_message(message, sys.argv[1:])))
