"""How long and how much: seconds that a hang is told by, seconds that a start may take, bytes that a service may hold.

All follow from the plan. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kakera.plan.asleep import asleep_bytes
from kakera.plan.plan import Plan
from kakera.plan.speed import Speed

STALL_LEAST = 30.0  # seconds; shorter ones are swapping, a busy neighbour, a disk that spins up
START_LEAST = 120.0  # seconds for doctor's checks, imports, allocation, first token; `mini` 7 to 16 on two busy cores
DISK_BYTES = 100e6  # bytes per second of a slow disk
# Of the planned host bytes. `mini` at 8,192 tokens: 1.31 GB planned; 0.67 GB loaded, without a peak before that, and
# 0.82 GB after four prompts of 1,000 tokens (both processes, highest resident sets).
HIGH_SHARE, MAX_SHARE = 1.15, 1.5
HIGH_EXTRA, MAX_EXTRA = 512 * 2**20, 1024 * 2**20  # files that are read while loading count as the service's memory


@dataclass(frozen=True)
class Bounds:
    """Seconds and bytes of the unit."""

    stall_seconds: float  # without progress, then the server ends itself
    start_seconds: float  # until the first token
    memory_high: int  # bytes; above, the kernel reclaims and slows down
    memory_max: int  # bytes; above, the kernel kills


SCRIPTED_BOUNDS = Bounds(STALL_LEAST, START_LEAST, HIGH_EXTRA, MAX_EXTRA)  # plays text back: no weights, no torch


def step_seconds(plan: Plan, speed: Speed) -> float:
    """The longest sound step: a whole chunk of prefill beside decoding at full context. Unknown cards count as 0."""
    prefill = plan.chunk / speed.prefill if speed.prefill else 0.0
    return prefill + (1 / speed.decode_full if speed.decode_full else 0.0)


def stall_seconds(plan: Plan, speed: Speed) -> float:
    patience = plan.target.patience
    return max(STALL_LEAST, patience.stall_steps * step_seconds(plan, speed)) + patience.compile_seconds


def host_bytes(plan: Plan) -> int:
    """What the plan takes of the host's memory; on a CPU that is all of it."""
    return plan.total("host") + (plan.total("device") if plan.target.one_memory else 0)


def bounds(plan: Plan, speed: Speed, file_bytes: int) -> Bounds:
    first = plan.target.patience.first_token_seconds
    planned = host_bytes(plan) + asleep_bytes(plan)  # a service may be told to sleep at any time
    return Bounds(
        stall_seconds=stall_seconds(plan, speed),
        start_seconds=START_LEAST + file_bytes / DISK_BYTES + first,
        memory_high=int(planned * HIGH_SHARE) + HIGH_EXTRA,
        memory_max=int(planned * MAX_SHARE) + MAX_EXTRA,
    )


def file_bytes(directory: Path) -> int:
    """Bytes of a model's weight files."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
