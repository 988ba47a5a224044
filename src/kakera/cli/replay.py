"""kakera replay: the steps of a recording once more, held against what came of them, and hits against cold runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakera.cli.options import JsonOption

if TYPE_CHECKING:
    from kakera.contract.recording import Input
    from kakera.run.recording.replay import Difference, Report

SHOWN = 20  # differences; --json has them all


def replay(
    file: Annotated[Path, typer.Argument(help="What kakera serve --record wrote.", metavar="FILE")],
    model: Annotated[str | None, typer.Argument(help="MODEL as for serve. Default: the recorded one.")] = None,
    gpus: Annotated[str | None, typer.Option("--gpus", help="auto or cpu. Default: as recorded.")] = None,
    cold: Annotated[bool, typer.Option(help="Compute each restored prefix from its first token and compare.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Repeat a recorded run step by step and compare. Exit status 1 if anything differs.

    Compared are the chosen tokens, on a CPU also states and pages of every row, and what each prefix hit brought
    against a cold computation. A recording without prompts has stand-ins for tokens: then only hits are compared.
    """
    from dataclasses import replace

    import msgspec
    from rich.progress import Progress

    from kakera.cli.model import resolve_model
    from kakera.contract.recording import ends_whole, read_recording
    from kakera.errors import UsageError
    from kakera.plan.plan import Wishes
    from kakera.plan.planner import plan_for
    from kakera.run.build import build_engine
    from kakera.run.recording.replay import Replay
    from kakera.run.step.runner import TorchRunner

    header, steps = read_recording(file)
    inputs: list[Input] = []
    count = 0
    for step in steps:
        inputs += step.inputs
        count += 1
    name = model or header.model
    found = resolve_model(name)
    if found.scripted:
        raise UsageError(f"{name}: a scripted model computes nothing that could be replayed")
    try:
        Wishes(**header.wishes)  # type: ignore[arg-type]  # knows all names
        wishes = msgspec.convert(header.wishes, Wishes)  # and all values
    except (TypeError, msgspec.ValidationError) as error:
        raise UsageError(f"{file} has memory options that this kakera does not know ({error})") from None
    wishes = replace(wishes, gpus=gpus) if gpus else wishes
    try:
        plan = plan_for(found.path, wishes)
    except UsageError as error:
        raise UsageError(f"{name} does not go with the options of the recording, of {header.model}: {error}") from None
    runner = build_engine(found.path, plan).runner
    assert isinstance(runner, TorchRunner)
    replay = Replay(runner, plan, header, inputs, cold)
    differences: list[Difference] = []
    with Progress(transient=True, disable=as_json) as progress:
        for step in progress.track(read_recording(file)[1], total=count, description="steps"):
            differences += replay.step(step)
    _show(name, header.prompts, cold, replay.report, differences, as_json)
    if not ends_whole(file):
        typer.echo("the recording ends within a step (its server was killed): what came then is not in it", err=True)
    if differences:
        raise typer.Exit(1)


def _show(name: str, prompts: bool, cold: bool, report: Report, differences: list[Difference], as_json: bool) -> None:
    from dataclasses import asdict

    result: dict[str, Any] = {"model": name, "prompts": prompts, **asdict(report)}
    if as_json:
        import json

        typer.echo(json.dumps({**result, "differences": [asdict(each) for each in differences]}, indent=2))
        return
    compared = f"{report.tokens} tokens compared" if prompts else "no tokens compared (recorded without prompts)"
    unknown = f", {report.hits_unknown} could not be (their prompt is not in the recording)" * bool(report.hits_unknown)
    held = f"{report.hits} hits held against a cold computation{unknown}" if cold else "hits were not checked"
    typer.echo(f"{name}: {report.steps} steps, {report.rows} rows, {compared}; {held}.")
    for each in differences[:SHOWN]:
        typer.echo(f"step {each.step}, {each.request_id}: {each.what}: {each.detail}")
    if len(differences) > SHOWN:
        typer.echo(f"and {len(differences) - SHOWN} more (--json shows all)")
    typer.echo("all equal" if not differences else f"{len(differences)} differences; the first is where to look")
