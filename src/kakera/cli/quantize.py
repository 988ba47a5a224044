"""kakera quantize: plain weights in, a 1 to 8 bit model directory out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from kakera.cli.options import JsonOption


def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Directory or repo id of a 16 or 32 bit checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory, or that of an interrupted run.")],
    bits: Annotated[float, typer.Option("--bits", help="Mean bits per weight of the coded layers.")] = 2.5,
    format: Annotated[str, typer.Option("--format", help="escha or exl3.")] = "escha",
    head_bits: Annotated[int | None, typer.Option("--head-bits", help="Bits of lm_head (exl3).")] = None,
    kind_bits: Annotated[
        list[str] | None, typer.Option("--kind-bits", metavar="KIND=BITS", help="One kind's own rate: mlp.down=4.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sign vectors.")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Quantise a checkpoint to trellis codes. An interrupted run resumes; the same input gives the same bytes."""
    from kakera.arch.registry import load_spec
    from kakera.errors import UsageError
    from kakera.quantize.convert import quantize_checkpoint
    from kakera.quantize.progress import console_progress
    from kakera.quantize.recipe import ALLOWED_BITS, Format, Recipe
    from kakera.target.as_torch import device_called

    if format not in ALLOWED_BITS:
        raise UsageError(f"--format {format}: choose {' or '.join(ALLOWED_BITS)}")
    where = device_called(device)
    path = source_directory(source)
    spec = load_spec(path)
    overrides = dict(_kind_bits(item) for item in kind_bits or [])
    recipe = Recipe.for_bits(cast("Format", format), bits, spec, head_bits=head_bits, overrides=overrides, seed=seed)
    with console_progress() as progress:
        summary = quantize_checkpoint(path, out, recipe, where, progress)
    if as_json:
        import json

        typer.echo(json.dumps({"out": str(out), "format": format, **summary.as_json()}, indent=2))
    else:
        typer.echo(summary.table())


def source_directory(name: str) -> Path:
    """As it is, or the snapshot of a repository, which is downloaded."""
    from kakera.cli.model import resolve_model
    from kakera.hub.names import Repository

    path = Path(name).expanduser()
    return resolve_model(name).path if not path.is_dir() and Repository.called(name) else path


def _kind_bits(item: str) -> tuple[str, int]:
    from kakera.errors import UsageError

    kind, _, bits = item.partition("=")
    if not bits.isdigit():
        raise UsageError(f"--kind-bits {item}: write KIND=BITS, such as mlp.down=4")
    return kind, int(bits)
