"""kakera calibrate: a KV rotation made for one model, from text that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kakera.cli.options import JsonOption, ModelArgument
from kakera.cli.progress import progress


def calibrate(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory for the two rotation files.")],
    data: Annotated[Path, typer.Option("--data", help="Text like that of use, not that of a later measurement.")],
    window: Annotated[int, typer.Option("--window", min=128, help="Tokens of a window; each starts cold.")] = 2048,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most that many windows.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Draws the sample that --limit keeps.")] = 0,
    gpus: Annotated[str, typer.Option("--gpus", help="auto, cpu, cpu:4GB or sizes, as for serve.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure keys and values on a text and write the rotation that lets INT2 spend its bits where they vary."""
    from kakera.cli.model import resolve_model
    from kakera.errors import UsageError
    from kakera.evaluate.session import open_forced
    from kakera.evaluate.windows import cut_held_out
    from kakera.plan.plan import Wishes
    from kakera.quantize.kv_calibration import Recorder
    from kakera.text.tokenizer import Tokenizer

    found = resolve_model(model)
    if found.scripted:
        raise UsageError("a scripted model has no keys and values to calibrate with")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already: give a new directory, or move the old one away")
    directory = found.path
    windows = cut_held_out(Tokenizer.load(directory), window, limit, data, seed)
    forced = open_forced(directory, Wishes(gpus=gpus, kv="bf16"), window)
    spec = forced.model.spec
    recorder = Recorder(forced.attention, spec)
    forced.attention = recorder
    with progress("tokens", window * len(windows)) as advance:
        for tokens in windows:
            for _, hidden_NH in forced.hidden(tokens):
                advance(len(hidden_NH))
    recorder.moments.rotation().save(out, spec, "principal axes in three grades")
    read = int(recorder.moments.counts_L.min())
    options = ["--rotation", str(out), "--kv-group", str(spec.head_dim // 2)]
    if as_json:
        import json

        told = {"model": found.name, "rotation": str(out), "tokens": read, "options": options}
        typer.echo(json.dumps(told, indent=2))
        return
    typer.echo(f"{out}: from {read:,} tokens. Use it with {' '.join(options)}")
