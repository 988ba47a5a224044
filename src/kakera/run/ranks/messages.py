"""What rank 0 and the ranks that follow it say to each other: msgpack over a wire each. No torch.

Rank 0 to the others: Execute per step, Sweep. They: Built or CanNotBuild once, then Done per Execute and Swept per
Sweep, in order. What a step exchanges on its way (sums, logits, tokens) goes by the exchange, not here.
"""

from __future__ import annotations

import hashlib

import msgspec

from kakera.contract.events import RegionRead
from kakera.contract.step import StepPlan


class Execute(msgspec.Struct, frozen=True, array_like=True, tag=True):
    plan: StepPlan


class Sweep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Time reads of the device's memory."""


class Built(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank is warm."""


class CanNotBuild(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`message` is for a person."""

    message: str
    exit_status: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step was carried out: `plan`, the digest of what arrived, and every decision that was taken on the way."""

    step: int
    plan: bytes
    branch: tuple[int, ...]


class Swept(msgspec.Struct, frozen=True, array_like=True, tag=True):
    reads: list[RegionRead]


encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(Execute | Sweep).decode
decode_from_rank = msgspec.msgpack.Decoder(Built | CanNotBuild | Done | Swept).decode


def digest(message: bytes) -> bytes:
    """Of a message as it was sent or as it came."""
    return hashlib.blake2b(message, digest_size=8).digest()
