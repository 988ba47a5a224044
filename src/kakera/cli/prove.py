"""kakera prove: fill the planned context once through a real server, watch the card, and say whether the plan holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kakera.cli.options import JsonOption, ModelArgument, with_memory_options
from kakera.plan.plan import Wishes

if TYPE_CHECKING:
    from kakera.cli.model import Model
    from kakera.plan.plan import Plan
    from kakera.prove.trace import Trace
    from kakera.prove.verdict import Verdict
    from kakera.target.devices import Machine


@with_memory_options
def prove(
    model: ModelArgument = "mini",
    quick: Annotated[bool, typer.Option("--quick", help="Fill one context, and not the rest of the pool.")] = False,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="Write a record to post: figures, no names or texts.", metavar="FILE"),
    ] = None,
    as_json: JsonOption = False,
    *,
    wishes: Wishes,
) -> None:
    """Fill the planned context once and judge memory, speed and answers. Exit status 0 if the plan holds, 1 if not.

    A server is started with the same options as by `kakera serve`. It takes some minutes on a card.
    """
    from kakera.cli.engine import with_drafts
    from kakera.cli.model import resolve_model
    from kakera.cli.terminal import say
    from kakera.errors import KakeraError, UsageError
    from kakera.plan.plan import AUTO
    from kakera.prove.report import record, summary
    from kakera.target.devices import resolve_to_compute

    if report is not None:
        _check_writable(report)
    found = resolve_model(model)
    if found.scripted:
        raise UsageError(f"{model}: a script takes no memory that could be proven")
    wishes = with_drafts(wishes, AUTO, resolve_to_compute(wishes.gpus))  # as serve does by itself
    verdict, trace, plan = proof_of(found, model, wishes, quick)
    if as_json:
        typer.echo(_as_json(summary(verdict, trace, plan), indent=2))
    else:
        _show(summary(verdict, trace, plan), verdict, trace)
    if report is not None:
        try:
            report.write_text(_as_json(record(verdict, trace, plan)))
        except OSError as error:  # the proof is done, shown and remembered
            raise KakeraError(f"--report {report}: {error.strerror}") from None
        say(f"{report} can be posted: it has no names of hosts, files or users, and no texts")
    raise typer.Exit(0 if verdict.proven else 1)


def _check_writable(report: Path) -> None:
    """Before minutes of proving. Raises UsageError."""
    import os

    from kakera.errors import UsageError

    where = report if report.exists() else report.resolve().parent
    if report.is_dir():
        raise UsageError(f"--report {report}: this is a directory; give a file in it")
    if not where.exists():
        raise UsageError(f"--report {report}: there is no such directory")
    if not os.access(where, os.W_OK):
        raise UsageError(f"--report {report}: {where} can not be written")


def proof_of(found: Model, model: str, wishes: Wishes, quick: bool) -> tuple[Verdict, Trace, Plan]:
    """Plan, fill, judge and remember. `model` as on the command line. Raises PlanRefused, UsageError."""
    from kakera.cli.terminal import say
    from kakera.plan.planner import plan_and_speed
    from kakera.plan.table import summary
    from kakera.prove.kept import keep
    from kakera.prove.verdict import judge
    from kakera.target.devices import resolve_to_compute

    machine = resolve_to_compute(wishes.gpus)
    plan, _ = plan_and_speed(found.path, wishes, machine)
    say(summary(plan))
    trace = _trace(model, plan, machine, wishes, quick)
    verdict = judge(trace)
    try:
        keep(verdict, trace, plan, machine)
    except OSError as error:
        say(f"warning: this is not remembered ({error.strerror})")
    return verdict, trace, plan


def prove_first(found: Model, model: str, wishes: Wishes) -> None:
    """Before a server starts, prove its plan, unless it was proven already. Raises KakeraError if it does not hold."""
    from kakera.cli.terminal import say
    from kakera.errors import KakeraError, UsageError
    from kakera.plan.planner import plan_and_speed
    from kakera.plan.proven import proof_for
    from kakera.target.devices import resolve_to_compute

    if found.scripted:
        raise UsageError(f"--prove: {model} is a script, which takes no memory that could be proven")
    machine = resolve_to_compute(wishes.gpus)
    if proof_for(plan_and_speed(found.path, wishes, machine)[0], machine):
        return
    verdict, _, _ = proof_of(found, model, wishes, quick=True)
    for finding in verdict.findings:
        say(f"{finding.kind}: {finding.text}")
    if not verdict.proven:
        raise KakeraError(
            "--prove: the plan does not hold (see above); --context, --max-running and --reserve make it smaller"
        )


def _trace(model: str, plan: Plan, machine: Machine, wishes: Wishes, quick: bool) -> Trace:
    import asyncio

    from kakera.bench.server import ServerProcess, serving
    from kakera.cli.progress import progress
    from kakera.cli.terminal import say
    from kakera.errors import EngineDied
    from kakera.prove.course import Recorder, card_of, check
    from kakera.prove.course import prove as fill
    from kakera.prove.trace import Trace
    from kakera.server.operate.sensors import Sensors

    check(plan)
    sensors = Sensors(1 if plan.target.has_cards else 0)
    recorder = Recorder(plan, card_of(plan, machine, sensors.read()), sensors.read)
    say("starting the server")
    try:
        with ServerProcess(model, serving(wishes)) as server:
            return asyncio.run(fill(server.url, recorder, progress, quick))
    except EngineDied as error:  # a server that does not come up, for want of memory say, is a verdict
        return Trace(recorder.card, failure=str(error))


def _as_json(data: dict[str, Any], indent: int | None = None) -> str:
    import json

    return json.dumps(data, indent=indent)


def _show(found: dict[str, Any], verdict: Verdict, trace: Trace) -> None:
    """Figures, what was found, what was not watched, and the verdict in one line."""
    from rich.console import Console

    from kakera.plan.table import gigabytes

    console = Console(highlight=False, soft_wrap=True, markup=False)
    if rate := found["prefill_tokens_per_second"]:
        console.print(f"{found['context']:,} tokens filled, the prompt at {rate:,.0f} tokens/s")
    steps = found["decode_seconds"]
    if steps["at_little_context"] and steps["at_the_end"]:
        little, end = (1 / steps[name] for name in ("at_little_context", "at_the_end"))
        console.print(f"decode: {little:.1f} tokens/s at little context, {end:.1f} at the end")
    if turn := found["second_turn"]:
        cached, first = turn["cached_tokens"], turn["first_token"]
        console.print(f"second turn: {cached:,} of {turn['prompt_tokens']:,} tokens cached, {first:.2f} s to the first")
    if trace.card and (peak := found["peak_bytes"]) is not None:
        planned, free = gigabytes(found["planned_bytes"]), gigabytes(found["least_free_bytes"])
        console.print(f"{trace.card.name}: {gigabytes(peak)} at most, {planned} planned, {free} free at least")
    if rate := found["read_bytes_per_second"]:
        console.print(f"memory is read at {rate / 1e9:,.0f} GB/s")
    for text in verdict.unwatched:
        console.print(f"not watched: {text}", style="dim")
    for finding in verdict.findings:
        console.print(f"{finding.kind}: {finding.text}", style="red" if finding.fails else "yellow")
    warned = ", with warnings" if verdict.findings else ""
    console.print(f"proven{warned}" if verdict.proven else "not proven", style="bold")
