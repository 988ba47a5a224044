"""What of a proof is remembered: by card and driver, for the next plan."""

from __future__ import annotations

import time

from kakera.plan.plan import Plan
from kakera.plan.sizes import left_over
from kakera.prove.trace import Trace
from kakera.prove.verdict import Verdict, least_free
from kakera.target.devices import Machine
from kakera.target.remembered import Proof, forget, remember


def proof(trace: Trace, plan: Plan, machine: Machine) -> Proof:
    """Its `reserve` is what stayed free beyond the margin, by the plan where the driver does not say; 0 of a CPU."""
    device, card, free = machine.devices[0], trace.card, least_free(trace.samples)
    kept = 0
    if card is not None:
        kept = left_over(plan, machine) + plan.reserve if free is None else free - card.margin
    return Proof(
        card=card.name if card else device.name,
        driver=card.driver if card else None,
        reserve=max(0, kept),
        shape=plan.shape,
        context=plan.context,
        planned=plan.total("device"),
        day=time.strftime("%Y-%m-%d"),
    )


def keep(verdict: Verdict, trace: Trace, plan: Plan, machine: Machine) -> None:
    """Remember a proof. One that failed takes back what was proven before with as little free. Raises OSError."""
    found = proof(trace, plan, machine)
    (remember if verdict.proven else forget)(found)
