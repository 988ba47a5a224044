"""kakera pull: a model from the hub onto this disk, ready to be served without a network."""

from __future__ import annotations

from typing import Annotated

import typer

from kakera.cli.options import JsonOption


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME[@REVISION]", help="owner/name, or one of its branches or tags.")],
    as_json: JsonOption = False,
) -> None:
    """Download a model from the Hugging Face Hub; an interrupted download goes on where it stopped.

    Only what serving needs is fetched, and only after the config and the headers of the weights say that kakera serves
    it, and the disk has room for it.
    """
    import json
    import shlex

    from kakera.cli.model import named_repository, pulled
    from kakera.hub.remote import look
    from kakera.plan.table import gigabytes

    remote = look(named_repository(name))
    done = pulled(remote)
    if as_json:
        found = {
            "model": name,
            **vars(remote.source),
            "path": str(done.path),
            "bytes": done.bytes,
            "downloaded": done.came,
        }
        typer.echo(json.dumps(found, indent=2))
        return
    came = f"{gigabytes(done.came)} of it came now" if done.came else "all of it was there"
    typer.echo(f"{remote.source}: {gigabytes(done.bytes)} in {done.path}, {came}")
    typer.echo(f"To serve it: kakera serve {shlex.quote(name)}")
