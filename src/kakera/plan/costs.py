"""What each choice that kakera made itself gives in tokens, and what it costs in tokens a second: every one is undone
alone and planned again. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kakera.contract.grid import PAGE
from kakera.plan.plan import Plan, Wishes
from kakera.plan.search import SLOT_CHOICES, draft
from kakera.plan.speed import predict
from kakera.plan.weights import WeightBytes
from kakera.target.cards import CARDS
from kakera.target.devices import Machine

SEEN = 0.005  # a change of speed below is none
REFERENCE = "rtx5070"  # whose figures stand for those of cards that are not known


@dataclass(frozen=True)
class Cost:
    """Of `option` as it is planned, against `instead`. `context` and `pool`: tokens gained, None if the other would not
    fit. Speeds are (planned, with the other), None where a card's figures are unknown."""

    option: str
    instead: str
    context: int | None
    pool: int | None
    decode: tuple[float, float] | None
    prefill: tuple[float, float] | None
    together: tuple[float, float] | None
    as_of: str | None = None  # the card whose figures were taken, because those of this one are not known

    @property
    def text(self) -> str:
        gives = f"with {self.instead} it would not fit"
        if self.context is not None and self.pool is not None:
            more, of = (self.context, "context") if self.context else (self.pool, "the pool")
            gives = f"{more:+,} tokens of {of} against {self.instead}"
        named = (("decode", self.decode), ("prefill", self.prefill), ("all together", self.together))
        slower = [
            f"{name} {self._change(*pair)}" for name, pair in named if pair and abs(pair[0] / pair[1] - 1) >= SEEN
        ]
        slower = slower or ["no loss of speed to speak of"]
        if self.option.startswith("--staging"):
            slower.append("a turn may take one short step more")
        return f"{self.option}: {gives}; {', '.join(slower)}"

    def _change(self, now: float, then: float) -> str:
        if self.as_of:
            return f"{100 * (now / then - 1):+.0f} % (as on {self.as_of}: this card's figures are not known)"
        return f"{_rate(now)} instead of {_rate(then)} tokens/s"


def costs(plan: Plan, wishes: Wishes, machine: Machine, weights: WeightBytes) -> tuple[Cost, ...]:
    """One for each choice that gives up speed or slots for room. Of one that was asked for there is none."""
    chosen = replace(plan.wishes(), gpus=wishes.gpus, context=wishes.context, pool=wishes.pool)
    chosen = replace(chosen, host_cache=wishes.host_cache, reserve=wishes.reserve)
    rated, as_of = _rated(machine)
    speed, found = predict(plan, rated, weights), []
    for option, instead, change in _undone(plan, wishes):
        other = draft(plan.spec, replace(chosen, **change), machine, weights)
        rates = predict(other.plan, rated, weights)
        found.append(
            Cost(
                option,
                instead,
                plan.context - other.plan.context if other.fits else None,
                (plan.pages - other.plan.pages) * PAGE if other.fits else None,
                _pair(speed.decode_short, rates.decode_short),
                _pair(speed.prefill, rates.prefill),
                _pair(speed.together, rates.together),
                as_of,
            )
        )
    return tuple(found)


def _rated(machine: Machine) -> tuple[Machine, str | None]:
    """The machine with figures for cards that have none, and whose they are."""
    if not machine.target.has_cards or all(device.bandwidth for device in machine.devices):
        return machine, None
    card = CARDS[REFERENCE]
    bandwidth, flops = card.bandwidth_gbs * 1e9, card.fp16_tflops * 1e12
    devices = tuple(d if d.bandwidth else replace(d, bandwidth=bandwidth, flops=flops) for d in machine.devices)
    return replace(machine, devices=devices), REFERENCE


def _undone(plan: Plan, wishes: Wishes) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(option as planned, value before it, the wish that undoes it)."""
    target = plan.target
    if wishes.embedding == "auto" and plan.embedding == "host":
        yield "--embedding host", "device", {"embedding": "device"}
    if wishes.chunk is None and plan.chunk < target.defaults.chunk:
        yield f"--chunk {plan.chunk}", f"{target.defaults.chunk}", {"chunk": target.defaults.chunk}
    if wishes.staging is None and plan.staged is not None and target.staged and plan.staged < target.staged:
        yield f"--staging {plan.staged}", f"{target.staged}", {"staging": target.staged}
    if wishes.state_dtype is None and plan.state_dtype != target.defaults.state_dtype:
        yield f"--state-dtype {plan.state_dtype}", "fp32", {"state_dtype": target.defaults.state_dtype}
    if wishes.max_running is None and plan.slots < SLOT_CHOICES[0]:
        more = min(n for n in SLOT_CHOICES if n > plan.slots)
        yield f"--max-running {plan.slots}", f"{more}", {"max_running": more}


def _pair(now: float | None, then: float | None) -> tuple[float, float] | None:
    return (now, then) if now and then else None


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
