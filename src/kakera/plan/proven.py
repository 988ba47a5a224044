"""What earlier proofs on this machine say about a plan."""

from __future__ import annotations

from kakera.plan.plan import Plan
from kakera.target.devices import Machine
from kakera.target.remembered import Proof, proof_of


def proof_for(plan: Plan, machine: Machine) -> Proof | None:
    """A proof on this card, under its driver, of a plan of this shape that was at least as large."""
    device = machine.devices[0]
    proof = proof_of(device.name, device.driver, plan.shape)
    return proof if proof and proof.context >= plan.context and proof.planned >= plan.total("device") else None


def proven_line(proof: Proof) -> str:
    return f"proven on {proof.day}: {proof.context:,} tokens were filled here (kakera prove)"
