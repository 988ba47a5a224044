"""Predicted speed of a plan from bytes and operations. Estimates, and marked as such wherever they are shown."""

from __future__ import annotations

from dataclasses import dataclass

from kakera.arch.shard import of_rank
from kakera.plan.plan import Plan
from kakera.plan.sizes import live_state_bytes
from kakera.plan.weights import WeightBytes
from kakera.target.devices import Machine

# Share of the memory bandwidth that a whole decode step reaches: a 27B on two RTX 5060 Ti was reported at 70 %
# (37 of 52 tokens/s); faster cards wait longer for launches and all-reduce. To be replaced by a measurement.
DECODE_EFFICIENCY = 0.6
PREFILL_EFFICIENCY = 0.35  # share of the peak fp16 rate, trellis decoding included; a guess until measured
HOST_BANDWIDTH = 24e9  # bytes per second from pinned memory to a card, PCIe 4 x 16; less on narrower slots


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one stream, None where a card's figures are unknown; bytes of weights that a token reads on
    each device, and on the host beside it."""

    decode_short: float | None
    decode_full: float | None  # at the planned context
    prefill: float | None
    read_on_device: int = 0
    read_on_host: int = 0


def predict(plan: Plan, machine: Machine, weights: WeightBytes) -> Speed:
    """Bytes read per token / bandwidth x a stated efficiency; 2 operations per weight / peak x a stated efficiency."""
    ranks = len(plan.device_names)
    target = plan.target
    slowest = min(machine.devices, key=lambda d: d.bandwidth or target.bandwidth or 0.0)
    bandwidth, flops = slowest.bandwidth or target.bandwidth, slowest.flops or target.flops
    states = 2 * live_state_bytes(of_rank(plan.spec, 0, ranks), target)  # read and written
    read = weights.read_per_token(target, ranks) + sum(placed.read_on_device for placed in plan.placed)
    read_on_host = sum(placed.read_on_host for placed in plan.placed)
    fixed, host = read + states, read_on_host / HOST_BANDWIDTH  # seconds, in which the cards wait
    history = plan.kv.read_bytes(plan.spec, plan.context) // ranks
    rate = bandwidth and DECODE_EFFICIENCY * bandwidth
    return Speed(
        decode_short=rate and rate / (fixed + host * rate),
        decode_full=rate and rate / (fixed + history + host * rate),
        prefill=flops and PREFILL_EFFICIENCY * flops * ranks / (2 * plan.spec.active),
        read_on_device=read,
        read_on_host=read_on_host,
    )
