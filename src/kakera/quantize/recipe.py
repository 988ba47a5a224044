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

from kakera.errors import UsageError
from kakera.plan.spec import ModelSpec

Format = Literal["exl3", "escha"]
ALLOWED_BITS: dict[str, range] = {"exl3": range(1, 9), "escha": range(2, 4)}
LEAF_KINDS = {
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o",
    "linear_attn.in_proj_qkv": "gdn.qkv",
    "linear_attn.in_proj_z": "gdn.z",
    "linear_attn.out_proj": "gdn.out",
}
# Small and sensitive first (k, v feed a cache that is itself rounded), then whatever writes into the residual stream.
# Escha's published mix (up and down at 3 of 2.47 bits) agrees with the order among the MLP linears.
PROMOTION = (
    *("attention.v", "attention.k", "mlp.down", "attention.o", "gdn.out"),
    *("mlp.up", "gdn.qkv", "attention.q", "gdn.z", "mlp.gate"),
)
DEFAULT_HEAD_BITS = 6
DEFAULT_DRAFT_BITS = 4


def kind_of(module: str) -> str | None:
    """Kind of the linear `module` (canonical name): one of LEAF_KINDS' values, `mtp`, `head`; else None."""
    if module == "lm_head":
        return "head"
    leaf = ".".join(module.split(".")[-2:])
    if module == "mtp.fc" or (module.startswith("mtp.") and leaf in LEAF_KINDS):
        return "mtp"
    return LEAF_KINDS.get(leaf) if module.startswith("model.layers.") else None


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
        unknown = sorted(set(self.bits) - set(LEAF_KINDS.values()) - {"head", "mtp"})
        if unknown:
            raise UsageError(f"unknown kinds of linears: {', '.join(unknown)}")
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
        rates = _promote(coded_weights(spec), bits, fixed)
        if format == "exl3":
            rates["head"] = head_bits or fixed.get("head", DEFAULT_HEAD_BITS)
        elif head_bits is not None:
            rates["head"] = head_bits  # refused by the constructor, with the reason
        if spec.mtp_layers:
            rates["mtp"] = fixed.get("mtp", min(DEFAULT_DRAFT_BITS, allowed[-1]))
        return Recipe(format, rates, seed)

    def digest(self) -> str:
        """Changes when the bytes that the recipe produces may change."""
        text = json.dumps({**asdict(self), "bits": dict(sorted(self.bits.items()))}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def mean_bits(self, spec: ModelSpec) -> float:
        """Bits per coded weight of the layers, without head and draft layer."""
        sizes = coded_weights(spec)
        return sum(self.bits[kind] * n for kind, n in sizes.items()) / sum(sizes.values())


def coded_weights(spec: ModelSpec) -> dict[str, int]:
    """Number of weights of each kind over all layers."""
    full, every, hidden = len(spec.full_layers), len(spec.layers), spec.hidden
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    sizes = {
        **dict.fromkeys(("mlp.gate", "mlp.up", "mlp.down"), every * hidden * spec.intermediate),
        **dict.fromkeys(("attention.k", "attention.v"), full * hidden * kv),
        "attention.q": full * hidden * query * (2 if spec.gated else 1),
        "attention.o": full * hidden * query,
    }
    if spec.gdn is not None:
        value = spec.gdn.v_heads * spec.gdn.v_dim
        gdn = len(spec.gdn_layers) * hidden
        sizes |= {"gdn.qkv": gdn * spec.gdn.conv_channels, "gdn.z": gdn * value, "gdn.out": gdn * value}
    return sizes


def _promote(sizes: Mapping[str, int], bits: float, fixed: Mapping[str, int]) -> dict[str, int]:
    rates = {kind: fixed.get(kind, int(bits)) for kind in sizes}
    budget = bits * sum(sizes.values()) - sum(rates[kind] * n for kind, n in sizes.items())
    for kind in PROMOTION:
        if kind in sizes and kind not in fixed and sizes[kind] <= budget and rates[kind] < bits:
            rates[kind] += 1
            budget -= sizes[kind]
    return rates
