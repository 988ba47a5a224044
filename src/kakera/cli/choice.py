"""Which of the published checkpoints a machine should serve, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kakera.cli.model import read_shape
from kakera.errors import PlanRefused
from kakera.plan.known import PUBLISHED, Published
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import make_plan, unserved_on
from kakera.plan.speed import Speed, predict
from kakera.target.devices import Machine

SMALL_CHUNK = 512  # a display on the card takes what the default chunk's scratch would need
SLOWEST = 4.0  # tokens per second; people read faster, so a small model serves them better


@dataclass(frozen=True)
class Candidate:
    """`against`: why it is not served here, "" for what could be. `wishes` are those of its plan."""

    checkpoint: Published
    wishes: Wishes
    plan: Plan | None = None
    speed: Speed | None = None
    against: str = ""

    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.checkpoint.name, "about": self.checkpoint.about, "against": self.against}
        if self.plan and self.speed:
            found |= {"context": self.plan.context, "max_running": self.plan.slots, "chunk": self.plan.chunk}
            found["decode_tokens_per_s"] = self.speed.decode_short
        return found


def considered(name: str | None, wishes: Wishes, machine: Machine) -> list[Candidate]:
    """All that are published, best first, or the one that was named, also by its shape alone. Raises CheckpointError,
    UsageError."""
    if name is None:
        return [weighed(checkpoint, wishes, machine) for checkpoint in PUBLISHED]
    known = next((checkpoint for checkpoint in PUBLISHED if name in (checkpoint.name, checkpoint.shape)), None)
    return [weighed(known or Published(name, name, 0, "as you asked"), wishes, machine, named=True)]


def weighed(checkpoint: Published, wishes: Wishes, machine: Machine, *, named: bool = False) -> Candidate:
    """Planned as `kakera plan` would; once more with a small chunk if that is what it takes."""
    if checkpoint.unserved:
        return Candidate(checkpoint, wishes, against=checkpoint.unserved)
    shape = read_shape(checkpoint.shape)
    if why := unserved_on(shape.spec, machine):
        return Candidate(checkpoint, wishes, against=why)
    weights, refusal = shape.weights(), ""
    smaller = [replace(wishes, chunk=SMALL_CHUNK)] if wishes.chunk is None and machine.target.has_cards else []
    for tried in (wishes, *smaller):
        try:
            plan = make_plan(shape.spec, tried, machine, weights)
        except PlanRefused as refused:
            refusal = refusal or _short(refused)
            continue
        speed = predict(plan, machine, weights)
        slow = not named and speed.decode_short is not None and speed.decode_short < SLOWEST
        against = f"it would write {speed.decode_short:.1f} tokens/s here (an estimate)" if slow else ""
        return Candidate(checkpoint, tried, plan, speed, against)
    return Candidate(checkpoint, wishes, against=refusal)


def _short(refused: PlanRefused) -> str:
    """The verdict, and the cheapest way out."""
    ways = refused.details.get("ways") or []
    reason = str(refused.details.get("reason") or refused).rstrip(".")
    reason = reason[0].lower() + reason[1:]
    return f"{reason}; the cheapest way: {ways[0]['change']}" if ways else reason
