"""Plans: of a model's sizes, and of a model directory for whoever starts an engine on it; or the refusal with ways out,
each of which was planned again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kakera.arch.registry import load_spec
from kakera.arch.spec import ModelSpec
from kakera.arch.stored import read_config, stored_headers
from kakera.contract.grid import PAGE
from kakera.errors import PlanRefused, Unserved, UsageError
from kakera.plan.advice import refusal
from kakera.plan.plan import Plan, Wishes
from kakera.plan.search import draft
from kakera.plan.speed import Speed, predict
from kakera.plan.weights import RANDOM_WEIGHTS, WeightBytes, borrowed, from_checkpoint
from kakera.target.devices import Machine, resolve_to_compute
from kakera.target.wsl import RESERVE

Weigh = Callable[[ModelSpec], WeightBytes]
DRAFT_LAYER_YIELDS = 131072  # tokens of context up to which that counts for more than the draft layer


def make_plan(spec: ModelSpec, wishes: Wishes, machine: Machine, weights: WeightBytes) -> Plan:
    """The plan for these wishes. Raises PlanRefused (table and ways out in the text), UsageError for a wrong wish."""
    found = draft(spec, wishes, machine, weights)
    if not found.fits:
        raise PlanRefused(*refusal(found, wishes, machine, weights))
    if wishes.vision in ("device", "host") and found.plan.vision is None:
        raise UsageError(f"--vision {wishes.vision}: a model that several processes share reads no images so far")
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
    names = () if RANDOM_WEIGHTS in read_config(directory) else (t.name for t in stored_headers(directory))
    weigh: Weigh = partial(from_checkpoint, directory)
    if wishes.vision_tower is not None:
        spec, weigh = with_borrowed(spec, weigh, Path(wishes.vision_tower))
    plan, sizes = plan_with_layer(spec, wishes, machine, weigh, holds_draft_layer(spec, names))
    return plan, predict(plan, machine, sizes)


def with_borrowed(spec: ModelSpec, weigh: Weigh, tower: Path) -> tuple[ModelSpec, Weigh]:
    """A model with the vision tower of another directory. Raises CheckpointError."""
    return borrowed(spec, weigh(spec), tower)[0], lambda wanted: borrowed(wanted, weigh(wanted), tower)[1]


def plan_with_layer(
    spec: ModelSpec, wishes: Wishes, machine: Machine, weigh: Weigh, held: bool
) -> tuple[Plan, WeightBytes]:
    """With the draft layer, if the files hold one and guesses are wished for: on a CPU so far, and unless that would
    cost context below DRAFT_LAYER_YIELDS or a running request. Raises as `make_plan`."""
    weights = weigh(spec)
    plan = make_plan(spec, wishes, machine, weights)
    if not (held and wishes.drafts and machine.target.one_memory and plan.ranks == 1) or plan.vision:
        return plan, weights
    drafting = replace(spec, drafting=True)
    found = draft(drafting, wishes, machine, larger := weigh(drafting))
    enough = min(plan.context, DRAFT_LAYER_YIELDS)
    if found.fits and found.plan.context >= enough and found.plan.slots >= plan.slots:
        return found.plan, larger
    return plan, weights


def holds_draft_layer(spec: ModelSpec, names: Iterable[str]) -> bool:
    """Whether there are tensors of it among stored ones."""
    draft = spec.draft
    return draft is not None and any(spec.names.canonical(name).startswith(draft.prefix) for name in names)


def plan_for(directory: Path, wishes: Wishes) -> Plan:
    """The plan that serving would make on this machine. Raises as `plan_and_speed`."""
    return plan_and_speed(directory, wishes, resolve_to_compute(wishes.gpus))[0]
