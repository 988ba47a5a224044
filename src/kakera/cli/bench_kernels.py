"""kakera bench kernels: linears, attention and Gated DeltaNet on a GPU, on random data of a model's shapes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakera.cli.bench_common import PlotOption, numbers, show, waiting
from kakera.cli.options import JsonOption

if TYPE_CHECKING:
    from kakera.arch.spec import ModelSpec

KINDS = ("linear", "attention", "gdn")


def kernels(
    spec: Annotated[
        str, typer.Option("--spec", help="Shapes of a known model or of a model directory.")
    ] = "qwen3.8-27b",
    only: Annotated[
        str, typer.Option("--only", help="Which kernels: linear, attention or gdn.", metavar="NAME")
    ] = "linear",
    rows: Annotated[
        str, typer.Option("--rows", help="Rows of the input of linears.", metavar="N,...")
    ] = "1,8,32,64,128,1024,8192",
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Cards that share the model.")] = 1,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """GPU kernels on random data of a model's shapes, beside the card's ceilings and the library's kernels."""
    from kakera.bench import plot as plots
    from kakera.bench.linears import LONG_ROWS
    from kakera.cli.model import shape_of
    from kakera.errors import KakeraError, Unserved, UsageError

    if only not in KINDS:
        raise UsageError(f"--only {only}: there are {', '.join(KINDS)}")
    counts, model = numbers("--rows", rows), shape_of(spec)[0]
    if model.unserved:
        raise Unserved(model.unserved)
    if plot:
        plots.check(plot)
        if only == "gdn":
            raise UsageError("--plot: there is nothing to draw of gdn")
        if only == "linear" and min(counts) >= LONG_ROWS:
            raise UsageError(f"--plot draws milliseconds of short batches: give --rows below {LONG_ROWS} as well")
    from kakera.target.as_torch import is_there
    from kakera.target.target import CUDA

    if not is_there(CUDA):
        raise KakeraError("kakera bench kernels measures a GPU, and torch sees none here (kakera doctor says why)")
    if only == "linear":
        found, views = _linear(model, spec, counts, ranks, plot)
    elif only == "attention":
        found, views = _attention(model, spec, ranks, plot)
    else:
        found, views = _gdn(model, spec, ranks)
    show({"spec": spec, "ranks": ranks, **found}, as_json, views)


def _linear(
    model: ModelSpec, name: str, counts: list[int], ranks: int, plot: Path | None
) -> tuple[dict[str, Any], list[Any]]:
    from kakera.bench import linears
    from kakera.bench import plot as plots
    from kakera.bench.linear_tables import tables

    with waiting("measuring") as tell:
        found = linears.measure(model, counts, ranks, tell)
    if plot:
        short = [n for n in counts if n < linears.LONG_ROWS]
        lines = [
            plots.Line("trellis codes", short, [found.total(n) * 1e3 for n in short]),
            plots.Line("cuBLAS fp16", short, [found.total(n, "cublas_seconds") * 1e3 for n in short]),
        ]
        plots.draw(plot, f"all linears of {name}, {found.device}", "rows", "ms", lines)
    return asdict(found), list(tables(found, name))


def _attention(model: ModelSpec, name: str, ranks: int, plot: Path | None) -> tuple[dict[str, Any], list[Any]]:
    from kakera.bench import attention
    from kakera.bench import plot as plots
    from kakera.bench.attention_tables import lines, tables

    with waiting("measuring") as tell:
        found = attention.measure(model, ranks, tell)
    if plot:
        title = f"decode of a layer, {found.heads}/{found.kv_heads} heads x {found.head_dim}, {found.device}"
        plots.draw(plot, title, "tokens of context, one row", "us", lines(found))
    return asdict(found), list(tables(found, name))


def _gdn(model: ModelSpec, name: str, ranks: int) -> tuple[dict[str, Any], list[Any]]:
    from kakera.bench import gdn

    with waiting("measuring") as tell:
        found = gdn.measure(model, ranks, tell)
    return asdict(found), list(gdn.tables(found, name))
