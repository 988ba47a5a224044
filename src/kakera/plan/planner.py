"""Plans: of a model's sizes, and of a model directory for whoever starts an engine on it; or the refusal with ways out,
each of which was planned again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kakera.arch.registry import load_spec
from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE
from kakera.errors import PlanRefused, Unserved
from kakera.plan.advice import refusal
from kakera.plan.plan import Plan, Wishes
from kakera.plan.search import draft
from kakera.plan.speed import Speed, predict
from kakera.plan.weights import WeightBytes, from_checkpoint
from kakera.target.devices import Machine, resolve_to_compute
from kakera.target.wsl import RESERVE


def make_plan(spec: ModelSpec, wishes: Wishes, machine: Machine, weights: WeightBytes) -> Plan:
    """The plan for these wishes. Raises PlanRefused (table and ways out in the text), UsageError for a wrong wish."""
    found = draft(spec, wishes, machine, weights)
    if not found.fits:
        raise PlanRefused(*refusal(found, wishes, machine, weights))
    return found.plan


def unserved_on(spec: ModelSpec, machine: Machine) -> str:
    """Why the model can not be computed on such a machine; "" if it can."""
    return spec.unserved or (spec.cpu_only if machine.target.has_cards else "")


def refuse_unserved_on(spec: ModelSpec, gpus: str) -> None:
    """Raise Unserved for a model that can not be computed there; of one that can be anywhere nobody looks at cards."""
    if spec.cpu_only and (why := unserved_on(spec, resolve_to_compute(gpus))):
        raise Unserved(why)


@dataclass(frozen=True)
class Elsewhere:
    """The same under the other driver: Windows', through WSL2, or Linux' own."""

    under_wsl: bool
    reserve: int
    plan: Plan | None  # None: it does not fit

    @property
    def text(self) -> str:
        where = f"Under WSL2, where {self.reserve / 1e9:.1f} GB more stay free," if self.under_wsl else "On Linux"
        if self.plan is None:
            return f"{where} it does not fit."
        return f"{where} it is {self.plan.context:,} tokens of context and {self.plan.slots} running."

    def to_json(self) -> dict[str, Any]:
        where = "wsl2" if self.under_wsl else "linux"
        if self.plan is None:
            return {"where": where, "reserve_bytes": self.reserve, "fits": False}
        sizes = {"context": self.plan.context, "max_running": self.plan.slots, "pool_tokens": self.plan.pages * PAGE}
        return {"where": where, "reserve_bytes": self.reserve, "fits": True, **sizes}


def beside_wsl(spec: ModelSpec, wishes: Wishes, machine: Machine, weights: WeightBytes) -> Elsewhere | None:
    """What the other driver would leave of cards that were named, unless somebody says what to reserve."""
    if not machine.target.has_cards or wishes.gpus == "auto" or wishes.reserve is not None:
        return None
    reserve = 0 if machine.reserve else RESERVE
    found = draft(spec, wishes, replace(machine, reserve=reserve), weights)
    return Elsewhere(reserve > 0, reserve, found.plan if found.fits else None)


def plan_and_speed(directory: Path, wishes: Wishes, machine: Machine) -> tuple[Plan, Speed]:
    """The plan of a model's files and what it predicts. Raises PlanRefused, CheckpointError, UsageError; Unserved for
    a model that such a machine can not compute."""
    spec = load_spec(directory)
    if why := unserved_on(spec, machine):
        raise Unserved(why)
    sizes = from_checkpoint(directory, spec)
    plan = make_plan(spec, wishes, machine, sizes)
    return plan, predict(plan, machine, sizes)


def plan_for(directory: Path, wishes: Wishes) -> Plan:
    """The plan that serving would make on this machine. Raises as `plan_and_speed`."""
    return plan_and_speed(directory, wishes, resolve_to_compute(wishes.gpus))[0]
