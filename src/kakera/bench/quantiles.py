"""Quantiles of measured times, named the way a table prints them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Seconds. NaN throughout if nothing was measured."""

    p50: float
    p95: float
    max: float

    @staticmethod
    def of(seconds: Iterable[float]) -> Times:
        """Nearest-rank quantiles: every figure is a time that was really measured."""
        ordered = sorted(seconds)
        if not ordered:
            return Times(math.nan, math.nan, math.nan)
        return Times(_rank(ordered, 0.5), _rank(ordered, 0.95), ordered[-1])

    def text(self) -> str:
        return " / ".join(milliseconds(value) for value in (self.p50, self.p95, self.max))


def _rank(ordered: list[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def milliseconds(seconds: float) -> str:
    """Milliseconds with as many digits as make sense; a dash if nothing was measured."""
    if math.isnan(seconds):
        return "–"
    return f"{seconds * 1000:.1f}" if seconds < 0.1 else f"{seconds * 1000:,.0f}"
