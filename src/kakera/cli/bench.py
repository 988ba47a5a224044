"""kakera bench: how fast. A server under load, or the engine in this process, and the promised figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakera.cli.options import JsonOption, ModelArgument, with_memory_options
from kakera.plan.plan import Wishes

if TYPE_CHECKING:
    from kakera.bench.engine import EngineBench
    from kakera.bench.load import Beside, Level, SecondTurn

app = typer.Typer(
    help="Measure speed and endurance: serve, decode, prefill, kernels, figures, soak.", no_args_is_help=True
)

PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw a plot: FILE.png, .svg or .pdf.", metavar="FILE")]
ContextsOption = Annotated[str, typer.Option("--contexts", help="Context lengths in tokens.", metavar="N,N,...")]
BatchesOption = Annotated[str, typer.Option("--batches", help="Requests at once.", metavar="N,N,...")]


@app.command()
@with_memory_options
def serve(
    model: ModelArgument = "mini",
    url: Annotated[str | None, typer.Option("--url", help="Measure this server instead of starting one.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="The key of the server at --url.")] = None,
    streams: Annotated[str, typer.Option("--streams", help="Parallel streams.", metavar="N,N,...")] = "1,2,4,8",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=16)] = 256,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2)] = 128,
    long: Annotated[int, typer.Option("--long", min=0, help="Tokens of the long prompt; 0 leaves it out.")] = 8000,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """A server under load: parallel streams, a second turn, a long prompt beside running streams."""
    import asyncio  # 70 ms that `kakera --help` need not wait for

    from kakera.bench import plot as plots
    from kakera.bench.server import ServerProcess, flags

    counts = _numbers("--streams", streams)
    if plot:
        plots.check(plot)
    with contextlib.ExitStack() as stack:
        if url is None:
            with _waiting("starting the server"):
                url = stack.enter_context(ServerProcess(model, flags(wishes))).url
        with _waiting("measuring") as tell:
            levels, turn, beside = asyncio.run(_load(url, api_key, counts, prompt_tokens, new_tokens, long, tell))
    if plot:
        line = plots.Line("all streams", counts, [level.tokens_per_second for level in levels])
        plots.draw(plot, f"{model}: {prompt_tokens} + {new_tokens} tokens", "streams", "tokens/s", [line])
    result = {
        "model": model,
        "levels": [asdict(level) for level in levels],
        "second_turn": asdict(turn) if turn else None,
        "prefill_beside": asdict(beside) if beside else None,
    }
    from kakera.bench import tables

    views = [tables.levels(model, levels)]
    if turn and beside:
        views += [tables.second_turn(turn), tables.beside(beside)]
    _show(result, as_json, views)


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
    contexts: ContextsOption = "256,1024,4096",
    batches: BatchesOption = "1,2,4,8",
    steps: Annotated[int, typer.Option("--steps", min=2, help="Steps that are timed.")] = 32,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """Tokens per second of decoding, by context and batch, without a server."""
    _grid("decode", model, contexts, batches, plot, as_json, wishes, lambda bench, n, b: bench.decode(n, b, steps))


@app.command()
@with_memory_options
def prefill(
    model: ModelArgument = "mini",
    contexts: ContextsOption = "256,1024,4096",
    batches: BatchesOption = "1",
    plot: PlotOption = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """Tokens per second of reading prompts, by length and number, without a server."""
    _grid("prefill", model, contexts, batches, plot, as_json, wishes, lambda bench, n, b: bench.prefill(n, b))


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
    from kakera.evaluate.session import open_engine
    from kakera.plan.spec import ModelSpec

    if plot:
        plots.check(plot)
    lengths, counts = _numbers("--contexts", contexts), _numbers("--batches", batches)
    directory = _directory(model)
    bench = EngineBench(open_engine(directory, wishes), ModelSpec.load(directory).vocab)
    rows = []
    with _waiting(what) as tell:
        for length in lengths:
            for count in counts:
                tell(f"{what}: {count} x {length} tokens")
                rows.append(one(bench, length, count))
    if plot:
        lines = [
            plots.Line(f"{n:,} tokens", counts, [row.tokens_per_second for row in rows if row.context == n])
            for n in lengths
        ]
        plots.draw(plot, f"{what}: {model}, KV {wishes.kv}", "requests at once", "tokens/s", lines)
    result = {"what": what, "model": model, "kv": wishes.kv, "rows": [asdict(row) for row in rows]}
    _show(result, as_json, [tables.grid(f"{what}: {model}, KV {wishes.kv}", rows)])


@app.command()
@with_memory_options
def figures(
    model: ModelArgument = "mini",
    only: Annotated[str | None, typer.Option("--only", help="Groups, such as turn,kld.", metavar="NAME,...")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Retrieval prompts instead of the shipped ones.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option("--max-prompt-tokens", min=1)] = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """The promised figures, each against its bar. Exit status 1 if one is missed."""
    from kakera.bench import figure
    from kakera.bench.figures import GROUPS, Subject, measure

    names = tuple(only.split(",")) if only else GROUPS
    subject = Subject(model, _directory(model), wishes, data, max_prompt_tokens)
    with _waiting("measuring") as tell:
        found = measure(subject, names, tell)
    _show({"model": model, "figures": [f.json() for f in found]}, as_json, [figure.table(found, model)])
    if not all(f.ok for f in found):
        raise typer.Exit(1)


@app.command()
def kernels(
    spec: Annotated[
        str, typer.Option("--spec", help="Shapes of a known model or of a model directory.")
    ] = "qwen3.8-27b",
    only: Annotated[str, typer.Option("--only", help="Which kernels: linear.", metavar="NAME,...")] = "linear",
    rows: Annotated[
        str, typer.Option("--rows", help="Rows of the input.", metavar="N,...")
    ] = "1,8,32,64,128,1024,8192",
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Cards that share the model.")] = 1,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """GPU kernels on random data of a model's shapes, beside the card's ceilings and the library's kernels."""
    from kakera.bench import plot as plots
    from kakera.bench.linears import LONG_ROWS
    from kakera.cli.model import shape_of
    from kakera.errors import KakeraError, UsageError

    if only != "linear":
        raise UsageError(f"--only {only}: there is linear")
    counts, model = _numbers("--rows", rows), shape_of(spec)[0]
    if plot:
        plots.check(plot)
        if min(counts) >= LONG_ROWS:
            raise UsageError(f"--plot draws milliseconds of short batches: give --rows below {LONG_ROWS} as well")
    import torch

    if not torch.cuda.is_available():
        raise KakeraError("kakera bench kernels measures a GPU, and torch sees none here (kakera doctor says why)")
    from kakera.bench import linears
    from kakera.bench.linear_tables import tables

    with _waiting("measuring") as tell:
        found = linears.measure(model, counts, ranks, tell)
    if plot:
        short = [n for n in counts if n < linears.LONG_ROWS]
        lines = [
            plots.Line("trellis codes", short, [found.total(n) * 1e3 for n in short]),
            plots.Line("cuBLAS fp16", short, [found.total(n, "cublas_seconds") * 1e3 for n in short]),
        ]
        plots.draw(plot, f"all linears of {spec}, {found.device}", "rows", "ms", lines)
    _show({"spec": spec, "ranks": ranks, **asdict(found)}, as_json, tables(found, spec))


@app.command()
@with_memory_options
def soak(
    model: ModelArgument = "mini",
    minutes: Annotated[float, typer.Option("--minutes", min=0.01, help="Time of all traffic.")] = 10,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Decides what each worker sends.")] = 0,
    url: Annotated[str | None, typer.Option("--url", help="Use this server instead of starting one.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="The key of the server at --url.")] = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """Endurance: random mixed traffic, then an idle server that must have everything back. Exit status 1 if not."""
    import asyncio

    from kakera.bench import figure
    from kakera.bench.server import ServerProcess, flags
    from kakera.bench.soak import Soak

    with contextlib.ExitStack() as stack:
        process, subject = None, url
        if url is None:
            with _waiting("starting the server"):
                process = stack.enter_context(ServerProcess(model, flags(wishes)))
            url, subject = process.url, model
        with _waiting("soaking") as tell:
            report = asyncio.run(Soak(url, seed, api_key, process).run(minutes, tell))
    title = f"{subject}: {report.tally.requests} requests in {report.seconds:.0f} s, seed {seed}"
    _show(
        {"subject": subject, "seed": seed, **report.json()},
        as_json,
        [figure.table(report.checks, title), report.lines()],
    )
    if not all(check.ok for check in report.checks):
        raise typer.Exit(1)


def _numbers(option: str, text: str) -> list[int]:
    from kakera.errors import UsageError

    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise UsageError(f"{option} {text}: give whole numbers from 1 on, such as 1,2,4")
    return numbers


def _directory(model: str) -> Path:
    from kakera.cli.model import resolve_model
    from kakera.errors import UsageError

    found = resolve_model(model)
    if found.scripted:
        raise UsageError("a scripted model can only be measured through a server: kakera bench serve scripted:FILE")
    return found.path


@contextlib.contextmanager
def _waiting(what: str) -> Any:
    """A spinner on stderr; yields the function that changes its text."""
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield status.update


def _show(result: dict[str, Any], as_json: bool, views: Sequence[Any]) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(result, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for view in views:
        console.print(view)
