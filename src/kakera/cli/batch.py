"""kakera batch: a file of requests in OpenAI's batch form, answered behind what people ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakera.cli.options import MODEL_HELP, JsonOption, NameOption, with_memory_options
from kakera.cli.progress import progress
from kakera.plan.plan import Wishes

if TYPE_CHECKING:
    from kakera.batch.output import Output
    from kakera.batch.run import Tally
    from kakera.batch.servers import Server

    Work = Callable[[Server], Any]  # a coroutine function


@with_memory_options
def batch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="One request a line, as for OpenAI's batches.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Answers; what is there already is not asked again.")],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Default: mini; none with --url.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Ask a running server, such as http://127.0.0.1:30000."),
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Its key, with --url.")] = None,
    parallel: Annotated[int, typer.Option("--parallel", min=1, max=256, help="Requests at a time.")] = 8,
    served_name: NameOption = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """Answer every line of a file, with a model or by a running server. Exit status 1 if some have errors.

    Run it again to go on, after a kill too: lines with an answer in OUT are not asked again, those with errors are.
    """
    from kakera.batch.lines import read, survey
    from kakera.batch.output import Output
    from kakera.batch.run import Batch
    from kakera.errors import UsageError

    if url is None and api_key is not None:
        raise UsageError("--api-key needs --url")
    names = served_name or []
    work_for = _remote(url, api_key, model, names, wishes) if url else _local(file, model, names, wishes)
    lines = survey(file)
    with Output(out, file) as output, progress("lines", lines) as advance:

        async def work(server: Server) -> Tally:
            return await Batch(server, output, parallel, advance).run(read(file))

        tally = work_for(work)
    _show(tally, output, out, as_json)
    raise typer.Exit(tally.failed > 0)


def _remote(
    url: str, key: str | None, model: str | None, names: Sequence[str], wishes: Wishes
) -> Callable[[Work], Tally]:
    import asyncio

    from kakera.batch.endpoint import Endpoint
    from kakera.batch.servers import RemoteServer
    from kakera.errors import UsageError

    if model is not None or names or wishes != Wishes():
        raise UsageError("--url: the server has its model and memory already; give these to kakera serve")
    server = RemoteServer(Endpoint.of(url, key))
    return lambda work: asyncio.run(work(server))


def _local(file: Path, model: str | None, names: Sequence[str], wishes: Wishes) -> Callable[[Work], Tally]:
    """The engine and the application of `kakera serve`, without its port."""
    import asyncio
    import os

    from kakera.cli.engine import recipe_for, seeing, served_model, stall_limit_for
    from kakera.cli.model import resolve_model
    from kakera.cli.serve import claim_for
    from kakera.cli.terminal import say
    from kakera.errors import UsageError
    from kakera.service.instance import Holder
    from kakera.service.predecessor import wait_for
    from kakera.target.devices import device_bytes_used, resolve_to_compute

    found = resolve_model(model or "mini")
    machine = resolve_to_compute(wishes.gpus)
    cards = len(machine.devices) if machine.target.has_cards and not found.scripted else 0
    offered = served_model(found, names)

    def start(work: Work) -> Tally:
        holder = Holder(os.getpid(), f"behalf of {file}", offered.name)
        try:
            claim = claim_for(cards, None, holder)
        except UsageError as error:
            raise UsageError(f"{error}; or ask that server, with --url") from None
        if claim:
            wait_for(claim.left, device_bytes_used, say)
        recipe = recipe_for(found, wishes, say)
        limit = stall_limit_for(found, wishes, machine)

        async def run() -> Tally:
            from kakera.run.process.client import EngineClient

            starting = asyncio.create_task(EngineClient.start(recipe))
            await asyncio.sleep(0)  # the engine's process loads while this one imports the application
            from kakera.batch.servers import LocalServer
            from kakera.server.watchdog import first_token

            engine = await starting
            try:
                await first_token(engine)
                model = seeing(offered, found, recipe, say)
                async with LocalServer.over(engine, model, recipe.plan, limit) as server:
                    tally: Tally = await work(server)
                    return tally
            finally:
                await engine.close()

        try:
            return asyncio.run(run())
        finally:
            if claim:
                claim.close(orderly=True)

    return start


def _show(tally: Tally, output: Output, out: Path, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    errors = str(output.errors_path) if tally.failed else None
    if as_json:
        typer.echo(json.dumps({"out": str(out), "errors": errors, **asdict(tally)}, indent=2))
        return
    before = f", {tally.before:,} before" if tally.before else ""
    typer.echo(f"{out}: {tally.answered:,} of {tally.lines:,} lines answered in {tally.seconds:.0f} s{before}")
    typer.echo(
        f"{tally.prompt_tokens:,} prompt tokens, {tally.cached_tokens:,} of them cached; "
        f"{tally.completion_tokens:,} generated"
    )
    if tally.failed:
        typer.echo(f"lines with errors: {tally.failed:,}, in {errors}; the same command asks them again")
