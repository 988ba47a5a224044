"""kakera plan: the memory table of a model on given cards, or the refusal with ways to make it fit."""

from __future__ import annotations

from pathlib import Path

from kakera.cli.options import DraftsOption, JsonOption, ModelArgument, with_memory_options
from kakera.plan.plan import Wishes


@with_memory_options
def plan(
    model: ModelArgument = "mini", as_json: JsonOption = False, drafts: DraftsOption = "auto", *, wishes: Wishes
) -> None:
    """Print what every byte of memory would be used for. Exit status 1 if it does not fit.

    MODEL may also be a well-known name such as qwen3.8-27b, so that nothing has to be downloaded.
    """
    import typer

    from kakera.cli.engine import with_drafts
    from kakera.cli.model import read_shape
    from kakera.errors import PlanRefused
    from kakera.plan.asleep import Asleep
    from kakera.plan.cautions import cautions, uneven
    from kakera.plan.costs import costs
    from kakera.plan.planner import Weigh, beside_wsl, holds_draft_layer, plan_with_layer, unserved_on, with_borrowed
    from kakera.plan.proven import proof_for, proven_line
    from kakera.plan.speed import predict
    from kakera.plan.table import to_json
    from kakera.target.devices import resolve

    shape = read_shape(model)
    machine = resolve(wishes.gpus)
    spec = shape.spec
    weigh: Weigh = shape.weights_of
    wishes = with_drafts(wishes, drafts, machine)
    if wishes.vision_tower is not None:
        spec, weigh = with_borrowed(spec, weigh, Path(wishes.vision_tower))
    held = holds_draft_layer(spec, (tensor.name for tensor in shape.headers or ()))
    try:
        made, weights = plan_with_layer(spec, wishes, machine, weigh, held)
    except PlanRefused as refused:
        if as_json:
            _print_json(refused.details)
        else:
            typer.echo(str(refused))
        raise typer.Exit(refused.exit_status) from None
    speed, notes = predict(made, machine, weights), cautions(made, machine, wishes)
    notes += uneven(made, speed, wishes, machine, weights)
    chosen = costs(made, wishes, machine, weights)
    other = beside_wsl(spec, wishes, machine, weights)
    proof, asleep = proof_for(made, machine), Asleep.of(made, machine)
    if len(made.device_bytes) > 1:
        notes += ("kakera computes on one card so far: this is what several will take, its speeds are estimates",)
    if why := unserved_on(spec, machine):
        notes += (why,)
    if as_json:
        more = {"elsewhere": other and other.to_json(), "proven": proof and proof.day}
        more["asleep"] = asleep.to_json()
        _print_json({**to_json(made, machine, speed, notes, chosen), **more})
        return
    from rich.console import Console

    from kakera.cli.terminal import visible
    from kakera.plan.table import as_table, read_line, speed_line

    console = Console(highlight=False, markup=False)
    console.print(as_table(made, machine))
    console.print(f"Weights: {visible(weights.source, layout='')}.", speed_line(speed, made, machine), style="dim")
    if made.placed:
        console.print(read_line(speed, made), style="dim")
    if made.ranks == 1:  # processes that share a model do not sleep yet
        console.print(asleep.text, style="dim", soft_wrap=True)
    if chosen:
        console.print("What kakera chose, what it gives and what it costs (estimates):")
        for cost in chosen:
            console.print(f"  {cost.text}", soft_wrap=True)
    if other is not None:
        console.print(other.text, soft_wrap=True)
    if proof is not None:
        console.print(visible(f"This plan, or a larger one, was {proven_line(proof)}."), soft_wrap=True)
    for note in notes:
        console.print(f"Warning: {note}", style="yellow", soft_wrap=True)


def _print_json(data: dict[str, object]) -> None:
    import json

    import typer

    typer.echo(json.dumps(data, indent=2))
