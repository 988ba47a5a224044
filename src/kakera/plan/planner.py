"""make_plan: the plan for some wishes, or the refusal with ways out, each of which was planned again."""

from __future__ import annotations

from kakera.errors import PlanRefused
from kakera.plan.advice import refusal
from kakera.plan.budget import draft
from kakera.plan.plan import Plan, Wishes
from kakera.plan.spec import ModelSpec
from kakera.plan.weights import WeightBytes
from kakera.target.devices import Machine


def make_plan(spec: ModelSpec, wishes: Wishes, machine: Machine, weights: WeightBytes) -> Plan:
    """The plan for these wishes. Raises PlanRefused (table and ways out in the text), UsageError for a wrong wish."""
    found = draft(spec, wishes, machine, weights)
    if not found.fits:
        raise PlanRefused(*refusal(found, wishes, machine, weights))
    return found.plan
