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
PREFILL_EFFICIENCY = 0.35  # share of the peak fp16 rate; a guess until measured
HOST_BANDWIDTH = 24e9  # bytes per second from pinned memory to a card, PCIe 4 x 16; less on narrower slots
ROWS_BANDWIDTH = 12e9  # of rows of some KB that a kernel reads there
HOST_LATENCY = 2e-6  # seconds until the first of them is there
DECODED_BYTES = 4  # a coded value is written and read once a chunk in 16 bit: 27 ms of the 27B on an H200, 4 TB/s
DENSE_BYTES = 1.5  # a value, from which on weights are not coded


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one stream, None where a card's figures are unknown; bytes of weights that a token reads on
    each device, and on the host beside it. `together`: of all slots, at little context each."""

    decode_short: float | None
    decode_full: float | None  # at the planned context
    prefill: float | None  # in whole chunks, at little context
    read_on_device: int = 0
    read_on_host: int = 0
    together: float | None = None


def predict(plan: Plan, machine: Machine, weights: WeightBytes) -> Speed:
    """Decode: bytes read per token / bandwidth x a stated efficiency. Prefill: 2 operations per weight / peak x a
    stated efficiency, for each chunk one pass over all weights (every expert is chosen by a token), and between cards
    a sum behind each block, of which nothing is hidden. Rows of an embedding on the host come in both."""
    ranks = len(plan.device_names)
    target = plan.target
    slowest = min(machine.devices, key=lambda d: d.bandwidth or target.bandwidth or 0.0)
    bandwidth, flops = slowest.bandwidth or target.bandwidth, slowest.flops or target.flops
    states = 2 * live_state_bytes(of_rank(plan.spec, 0, ranks), target)  # read and written
    fixed = weights.read_per_token(target, ranks)
    read = fixed + sum(placed.read_on_device for placed in plan.placed)
    experts = sum(placed.read_by(plan.slots) for placed in plan.placed)
    read_on_host = sum(placed.read_on_host for placed in plan.placed)
    row = weights.embedding // plan.spec.vocab if plan.embedding == "host" else 0
    host = read_on_host / HOST_BANDWIDTH + (HOST_LATENCY + row / ROWS_BANDWIDTH if row else 0.0)  # the cards wait
    history = plan.kv.read_bytes(plan.spec, plan.context) // ranks
    rate = bandwidth and DECODE_EFFICIENCY * bandwidth
    slots = plan.slots
    prefill = None
    if flops and bandwidth:
        computed = 2 * plan.spec.active / (PREFILL_EFFICIENCY * flops * ranks)
        coded = target.has_cards and weights.coded < DENSE_BYTES * plan.spec.active
        a_pass = DECODED_BYTES * sum(plan.spec.kinds.values()) / (bandwidth * ranks) if coded else 0.0
        sums = 0 if ranks == 1 else (1 + sum(len(layer.sites) for layer in plan.spec.layers)) * plan.spec.hidden
        exchanged = sums * target.activation_bytes / HOST_BANDWIDTH  # each way, both at once
        prefill = 1 / (computed + a_pass / plan.chunk + row / ROWS_BANDWIDTH + exchanged)
    return Speed(
        decode_short=rate and rate / (read + states + host * rate),
        decode_full=rate and rate / (read + states + history + host * rate),
        prefill=prefill,
        read_on_device=read,
        read_on_host=read_on_host + row,
        together=rate and slots * rate / (fixed + experts + slots * (states + host * rate)),
    )
