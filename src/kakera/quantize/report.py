"""What a quantisation did: per linear and per kind, rate and relative error |W - Wq|^2 / |W|^2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LinearReport:
    """One linear or embedding. `bits` is the code's rate, `bytes` everything stored for it, scales included."""

    module: str
    kind: str
    bits: int
    weights: int
    bytes: int
    error: float


@dataclass(frozen=True)
class Progress:
    """One more linear is done. Weights count, since linears differ in size by a factor of a hundred."""

    done_weights: int
    total_weights: int
    last: LinearReport
    resumed: bool  # it was found finished on disk


@dataclass(frozen=True)
class Summary:
    """`notes` name the linears that stayed in 16 bit, and why. `bytes` is the size of all shards."""

    linears: tuple[LinearReport, ...]
    notes: tuple[str, ...]
    bytes: int
    shards: int

    def by_kind(self) -> list[LinearReport]:
        """One row per kind and rate; the error is the mean over its weights."""
        rows = []
        for kind, bits in dict.fromkeys((r.kind, r.bits) for r in self.linears):
            group = [r for r in self.linears if (r.kind, r.bits) == (kind, bits)]
            weights = sum(r.weights for r in group)
            error = sum(r.error * r.weights for r in group) / weights
            rows.append(LinearReport(f"{len(group)} linears", kind, bits, weights, sum(r.bytes for r in group), error))
        return rows

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        """Plain text: kind, bits, weights, megabytes, relative error."""
        lines = [f"{'kind':<12} {'bits':>4} {'weights':>14} {'MB':>9} {'relative error':>15}"]
        for row in sorted(self.by_kind(), key=lambda r: (r.kind, r.bits)):
            lines.append(f"{row.kind:<12} {row.bits:>4} {row.weights:>14,} {row.bytes / 1e6:>9.2f} {row.error:>15.5f}")
        lines.append(f"{self.bytes / 1e6:.2f} MB in {self.shards} file{'s' if self.shards != 1 else ''}")
        return "\n".join([*lines, *self.notes])


Reporter = Callable[[Progress], None]
