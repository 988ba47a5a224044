"""kakera serve: an OpenAI-compatible server in front of one engine process."""

from __future__ import annotations

from typing import Annotated

import typer

from kakera.cli.options import ModelArgument, with_memory_options
from kakera.plan.plan import Wishes

LEVELS = ("debug", "info", "warning", "error")


@with_memory_options
def serve(
    model: ModelArgument = "mini",
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 30000,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Refuse requests without this key.")] = None,
    served_name: Annotated[str | None, typer.Option("--served-name", help="Model name that clients see.")] = None,
    log_level: Annotated[str, typer.Option("--log-level", help=f"One of {', '.join(LEVELS)}.")] = "info",
    *,
    wishes: Wishes,
) -> None:
    """Serve a model to OpenAI clients until interrupted. Exit status 70 if the engine dies."""
    import asyncio
    import signal

    from kakera.cli.engine import recipe_for, served_model
    from kakera.cli.model import resolve_model
    from kakera.errors import UsageError
    from kakera.plan.devices import resolve

    if log_level not in LEVELS:
        raise UsageError(f"--log-level {log_level}: choose {', '.join(LEVELS)}")
    check_port(host, port)
    found = resolve_model(model)
    offered = served_model(found, served_name)
    recipe = recipe_for(found, wishes, say)

    async def run() -> int:
        from kakera.run.client import EngineClient
        from kakera.server.run import serve as serve_engine

        engine = await EngineClient.start(recipe, bind_threads=resolve(wishes.gpus).kind == "cpu")
        try:
            say(f"{offered.name} answers on http://{host}:{port}/v1")
            return await serve_engine(engine, offered, host=host, port=port, api_key=api_key, log_level=log_level)
        finally:
            await engine.close()

    # SIGTERM unwinds like Ctrl-C, so that the engine process is ended and waited for; both are an orderly end
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = asyncio.run(run())
    except KeyboardInterrupt:
        status = 0
    raise typer.Exit(status)


def check_port(host: str, port: int) -> None:
    """Refuse before minutes of loading. Raises UsageError."""
    import socket

    from kakera.errors import UsageError

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror or error}") from None
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does; a listener still refuses
        try:
            probe.bind(address)
        except OSError as error:
            why = error.strerror or str(error)
            raise UsageError(f"{host}:{port} can not be used ({why}): is kakera running already? Try --port") from None


def say(line: str) -> None:
    typer.echo(line, err=True)
