"""kakera bench: how fast. A server under load, or the engine in this process, and the promised figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakera.cli import bench_kernels
from kakera.cli.bench_common import PlotOption, SpecOption, model_of, numbers, show, waiting
from kakera.cli.options import JsonOption, ModelArgument, with_memory_options
from kakera.plan.plan import Wishes

if TYPE_CHECKING:
    from kakera.bench.engine import EngineBench
    from kakera.bench.load import Beside, Level, SecondTurn
    from kakera.plan.plan import Plan

app = typer.Typer(help="Measure speed: serve, decode, prefill, kernels, figures.", no_args_is_help=True)

app.command()(bench_kernels.kernels)
ContextsOption = Annotated[str, typer.Option("--contexts", help="Context lengths in tokens.", metavar="N,N,...")]
BatchesOption = Annotated[str, typer.Option("--batches", help="Requests at once.", metavar="N,N,...")]


@app.command()
@with_memory_options
def serve(
    model: ModelArgument = "mini",
    spec: SpecOption = None,
    url: Annotated[str | None, typer.Option("--url", help="Measure this server instead of starting one.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="The key of the server at --url.")] = None,
    streams: Annotated[str, typer.Option("--streams", help="Parallel streams.", metavar="N,N,...")] = "1,2,4,8",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=16, help="Of each stream.")] = 256,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2, help="Of each answer.")] = 128,
    long: Annotated[int, typer.Option("--long", min=0, help="Tokens of the long prompt; 0 leaves it out.")] = 8000,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """A server under load: parallel streams, a second turn, a long prompt beside running streams."""
    import asyncio  # 70 ms that `kakera --help` need not wait for

    from kakera.bench import plot as plots
    from kakera.bench import tables
    from kakera.bench.server import ServerProcess, serving

    counts = numbers("--streams", streams)
    if plot:
        plots.check(plot)
    subject = model_of(model, spec)
    plan = None if url else _plan_of(subject, wishes)  # before a server takes memory, as it will make it itself
    memory = None
    with contextlib.ExitStack() as stack:
        if url is None:
            with waiting("starting the server"):
                process = stack.enter_context(ServerProcess(subject, serving(wishes)))
        with waiting("measuring") as tell:
            found = asyncio.run(_load(url or process.url, api_key, counts, prompt_tokens, new_tokens, long, tell))
        if plan:
            memory = process.memory(plan)
    levels, turn, beside = found
    if plot:
        line = plots.Line("all streams", counts, [level.tokens_per_second for level in levels])
        plots.draw(plot, f"{subject}: {prompt_tokens} + {new_tokens} tokens", "streams", "tokens/s", [line])
    result = {
        "model": subject,
        "levels": [asdict(level) for level in levels],
        "second_turn": asdict(turn) if turn else None,
        "prefill_beside": asdict(beside) if beside else None,
        "memory": memory.json() if memory else None,
    }
    views = [tables.levels(subject, levels)]
    if turn and beside:
        views += [tables.second_turn(turn), tables.beside(beside)]
    if memory:
        views.append(memory.view())
    show(result, as_json, views)


async def _load(
    url: str,
    api_key: str | None,
    counts: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    long: int,
    tell: Callable[[str], None],
) -> tuple[list[Level], SecondTurn | None, Beside | None]:
    from kakera.bench import load
    from kakera.bench.client import Client
    from kakera.bench.text import Prose

    prose = Prose()
    levels = []
    async with Client(url, api_key) as client:
        await load.calibrate(client, prose)
        for count in counts:
            tell(f"{count} streams")
            levels.append(await load.level(client, prose, count, prompt_tokens, new_tokens))
        if not long:
            return levels, None, None
        tell("second turn")
        turn = await load.second_turn(client, prose, long)
        tell("a long prompt beside running streams")
        return levels, turn, await load.prefill_beside(client, prose, load.BESIDE_STREAMS, long)


@app.command()
@with_memory_options
def decode(
    model: ModelArgument = "mini",
    spec: SpecOption = None,
    contexts: ContextsOption = "256,1024,4096",
    batches: BatchesOption = "1,2,4,8",
    steps: Annotated[int, typer.Option("--steps", min=2, help="Steps that are timed.")] = 32,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """Tokens per second of decoding, by context and batch, without a server."""
    subject = model_of(model, spec)
    _grid("decode", subject, contexts, batches, plot, as_json, wishes, lambda bench, n, b: bench.decode(n, b, steps))


@app.command()
@with_memory_options
def prefill(
    model: ModelArgument = "mini",
    spec: SpecOption = None,
    contexts: ContextsOption = "256,1024,4096",
    batches: BatchesOption = "1",
    plot: PlotOption = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """Tokens per second of reading prompts, by length and number, without a server."""
    subject = model_of(model, spec)
    _grid("prefill", subject, contexts, batches, plot, as_json, wishes, lambda bench, n, b: bench.prefill(n, b))


def _grid(
    what: str,
    model: str,
    contexts: str,
    batches: str,
    plot: Path | None,
    as_json: bool,
    wishes: Wishes,
    one: Callable[[EngineBench, int, int], Any],
) -> None:
    from kakera.bench import plot as plots
    from kakera.bench import tables
    from kakera.bench.engine import EngineBench
    from kakera.bench.memory_watch import MemoryWatch
    from kakera.plan.planner import plan_for
    from kakera.run.ranks.engine import open_engine

    if plot:
        plots.check(plot)
    lengths, counts = numbers("--contexts", contexts), numbers("--batches", batches)
    directory = _directory(model)
    plan = plan_for(directory, wishes)
    watch = MemoryWatch.start()
    rows = []
    with waiting(f"loading {model}") as tell:
        engine = open_engine(directory, plan)
        bench = EngineBench(engine, plan.spec.vocab, lengths, warm_tokens=plan.target.warm_up_tokens)
        for length in reversed(lengths):  # the longest first: the shorter ones can begin it
            for count in counts:
                tell(f"{what}: {count} x {length} tokens")
                rows.append(one(bench, length, count))
    rows.sort(key=lambda row: row.context)
    memory = watch.tables(engine, plan)
    if plot:
        lines = [
            plots.Line(f"{n:,} tokens", counts, [row.tokens_per_second for row in rows if row.context == n])
            for n in lengths
        ]
        plots.draw(plot, f"{what}: {model}, KV {wishes.kv}", "requests at once", "tokens/s", lines)
    result = {
        "what": what,
        "model": model,
        "kv": wishes.kv,
        "rows": [asdict(row) for row in rows],
        **{key: table.json() for key, table in memory.items()},
    }
    views = [table.view() for table in memory.values()]
    show(result, as_json, [tables.grid(f"{what}: {model}, KV {wishes.kv}", rows), *views])


@app.command()
@with_memory_options
def figures(
    model: ModelArgument = "mini",
    only: Annotated[str | None, typer.Option("--only", help="Groups, such as turn,kld.", metavar="NAME,...")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Retrieval prompts instead of the shipped ones.")] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option("--max-prompt-tokens", min=1, help="Leave out retrieval prompts that are longer.")
    ] = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """The promised figures, each against its bar. Exit status 1 if one is missed."""
    from kakera.bench import figure
    from kakera.bench.figures import GROUPS, Subject, measure

    names = tuple(only.split(",")) if only else GROUPS
    subject = Subject(model, _directory(model), wishes, data, max_prompt_tokens)
    with waiting("measuring") as tell:
        found = measure(subject, names, tell)
    show({"model": model, "figures": [f.json() for f in found]}, as_json, [figure.table(found, model)])
    if not all(f.ok for f in found):
        raise typer.Exit(1)


def _plan_of(model: str, wishes: Wishes) -> Plan | None:
    """The plan that a server on this machine makes, too; None for a script, which has no memory to plan."""
    from kakera.cli.model import resolve_model
    from kakera.plan.planner import plan_for

    found = resolve_model(model, wishes.gpus)
    return None if found.scripted else plan_for(found.path, wishes)


def _directory(model: str) -> Path:
    from kakera.cli.model import resolve_model
    from kakera.errors import UsageError

    found = resolve_model(model)
    if found.scripted:
        raise UsageError("a scripted model can only be measured through a server: kakera bench serve scripted:FILE")
    return found.path
