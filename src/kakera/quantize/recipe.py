"""Recipe: which linears are coded, at how many bits each kind. No torch.

A fractional rate is reached by promoting whole kinds of linears by one bit, in a fixed order of how much the model
suffers from their error for the bytes they cost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from kakera.arch.spec import OF_DRAFT, ModelSpec
from kakera.arch.tensors import Kind
from kakera.errors import UsageError

Format = Literal["exl3", "escha"]
ALLOWED_BITS: dict[str, range] = {"exl3": range(1, 9), "escha": range(2, 4)}
DEFAULT_HEAD_BITS = 6
DEFAULT_DRAFT_BITS = 4


def kinds_of(spec: ModelSpec) -> dict[str, str]:
    """The kind of every linear that a recipe can give a rate, by canonical name."""
    return {name: t.kind.name for name, t in spec.tensors(draft=True).items() if t.kind is not None}


def coded_kinds(format: str, spec: ModelSpec) -> Mapping[Kind, int]:
    """Kinds of the layers that a format codes, with their weights: Escha codes experts alone where there are some, and
    keeps all other linears as int8 rows."""
    stacks = {tensor.kind for tensor in spec.tensors().values() if tensor.role == "stack"}
    return {kind: n for kind, n in spec.kinds.items() if kind in stacks or format != "escha" or not stacks}


@dataclass(frozen=True)
class Recipe:
    """`bits` maps a kind to its rate; a head that is not in it becomes int8 rows, as the embedding does."""

    format: Format
    bits: Mapping[str, int]
    seed: int = 0
    version: int = field(default=1, init=False)  # of the encoder: raise it when the same recipe gives other bytes

    def __post_init__(self) -> None:
        allowed = ALLOWED_BITS.get(self.format)
        if allowed is None:
            raise UsageError(f"format {self.format!r} is not known; choose exl3 or escha")
        for kind, bits in self.bits.items():
            if bits not in allowed:
                raise UsageError(
                    f"{kind} at {bits} bits: {self.format} has {allowed[0]} to {allowed[-1]} bits a weight"
                )
        if self.format == "escha" and "head" in self.bits:
            raise UsageError("escha keeps the head as int8 rows; leave out the head's bits or choose exl3")

    @staticmethod
    def for_bits(
        format: Format,
        bits: float,
        spec: ModelSpec,
        *,
        head_bits: int | None = None,
        overrides: Mapping[str, int] | None = None,
        seed: int = 0,
    ) -> Recipe:
        """Rates whose mean over the layers' coded weights is at most `bits`, short of it by less than one kind's share.

        Head and draft layer are extra: 6 and 4 bits (EXL3's defaults) unless given; escha has an int8 head and a
        3-bit draft layer. `overrides` fixes the rate of single kinds. Raises UsageError for rates outside the format.
        """
        allowed = ALLOWED_BITS.get(format, range(1, 9))
        if not allowed[0] <= bits <= allowed[-1]:
            raise UsageError(f"{bits} bits: {format} has {allowed[0]} to {allowed[-1]} bits a weight")
        fixed = dict(overrides or {})
        if unknown := sorted(set(fixed) - set(kinds_of(spec).values()) - {OF_DRAFT.name}):
            raise UsageError(f"unknown kinds of linears: {', '.join(unknown)}")
        sizes = coded_kinds(format, spec)
        if rows := sorted(set(fixed) & {kind.name for kind in spec.kinds} - {kind.name for kind in sizes}):
            raise UsageError(f"{', '.join(rows)}: beside experts escha keeps linears as int8 rows; choose exl3")
        rates = _promote(sizes, bits, fixed)
        if format == "exl3":
            rates["head"] = head_bits or fixed.get("head", DEFAULT_HEAD_BITS)
        elif head_bits is not None:
            rates["head"] = head_bits  # refused by the constructor, with the reason
        if spec.draft is not None:
            rates["mtp"] = fixed.get("mtp", min(DEFAULT_DRAFT_BITS, allowed[-1]))
        return Recipe(format, rates, seed)

    def digest(self) -> str:
        """Changes when the bytes that the recipe produces may change."""
        text = json.dumps({**asdict(self), "bits": dict(sorted(self.bits.items()))}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def mean_bits(self, spec: ModelSpec) -> float:
        """Bits per coded weight of the layers, without head and draft layer."""
        sizes = coded_kinds(self.format, spec)
        return sum(self.bits[kind.name] * n for kind, n in sizes.items()) / sum(sizes.values())


def _promote(sizes: Mapping[Kind, int], bits: float, fixed: Mapping[str, int]) -> dict[str, int]:
    rates = {kind.name: fixed.get(kind.name, int(bits)) for kind in sizes}
    budget = bits * sum(sizes.values()) - sum(rates[kind.name] * n for kind, n in sizes.items())
    for kind in sorted(sizes, key=lambda kind: kind.order):
        if kind.name not in fixed and sizes[kind] <= budget and rates[kind.name] < bits:
            rates[kind.name] += 1
            budget -= sizes[kind]
    return rates
