"""The plan of a model directory, for whoever starts an engine on it."""

from __future__ import annotations

from pathlib import Path

from kakera.arch.registry import load_spec
from kakera.plan.budget import make_plan
from kakera.plan.plan import Plan, Wishes
from kakera.plan.speed import Speed, predict
from kakera.plan.weights import from_checkpoint
from kakera.target.devices import Machine, resolve_to_compute


def plan_and_speed(directory: Path, wishes: Wishes, machine: Machine) -> tuple[Plan, Speed]:
    """The plan of a model's files and what it predicts. Raises PlanRefused, CheckpointError, UsageError."""
    spec = load_spec(directory)
    sizes = from_checkpoint(directory, spec)
    plan = make_plan(spec, wishes, machine, sizes)
    return plan, predict(plan, machine, sizes)


def plan_for(directory: Path, wishes: Wishes) -> Plan:
    """The plan that serving would make on this machine. Raises as `plan_and_speed`."""
    return plan_and_speed(directory, wishes, resolve_to_compute(wishes.gpus))[0]
