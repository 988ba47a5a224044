"""Plans: of a model's sizes, and of a model directory for whoever starts an engine on it; or the refusal with ways out,
each of which was planned again."""

from __future__ import annotations

from pathlib import Path

from kakera.arch.registry import load_spec
from kakera.arch.spec import ModelSpec
from kakera.errors import PlanRefused
from kakera.plan.advice import refusal
from kakera.plan.budget import draft
from kakera.plan.plan import Plan, Wishes
from kakera.plan.speed import Speed, predict
from kakera.plan.weights import WeightBytes, from_checkpoint
from kakera.target.devices import Machine, resolve_to_compute


def make_plan(spec: ModelSpec, wishes: Wishes, machine: Machine, weights: WeightBytes) -> Plan:
    """The plan for these wishes. Raises PlanRefused (table and ways out in the text), UsageError for a wrong wish."""
    found = draft(spec, wishes, machine, weights)
    if not found.fits:
        raise PlanRefused(*refusal(found, wishes, machine, weights))
    return found.plan


def plan_and_speed(directory: Path, wishes: Wishes, machine: Machine) -> tuple[Plan, Speed]:
    """The plan of a model's files and what it predicts. Raises PlanRefused, CheckpointError, UsageError."""
    spec = load_spec(directory)
    sizes = from_checkpoint(directory, spec)
    plan = make_plan(spec, wishes, machine, sizes)
    return plan, predict(plan, machine, sizes)


def plan_for(directory: Path, wishes: Wishes) -> Plan:
    """The plan that serving would make on this machine. Raises as `plan_and_speed`."""
    return plan_and_speed(directory, wishes, resolve_to_compute(wishes.gpus))[0]
