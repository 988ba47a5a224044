"""A mean with its 5-95 % interval, by the bootstrap over blocks of neighbouring positions."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

BLOCK = 256  # positions of one block: neighbours share their context, so single positions would look too certain
RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """`low` and `high` are the 5th and 95th percentile of the mean under resampling."""

    mean: float
    low: float
    high: float

    def json(self) -> dict[str, float]:
        return asdict(self)

    def text(self, form: str = ".4f") -> str:
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


def estimate(values: np.ndarray, *, block: int = BLOCK, seed: int = 0) -> Estimate:
    """Mean of `values` (1-D, in text order) and its interval. The last block may be shorter and weighs as much less."""
    if values.size == 0:
        raise ValueError("no values")
    starts = np.arange(0, values.size, block)
    sums = np.add.reduceat(values.astype(np.float64), starts)
    counts = np.diff(np.append(starts, values.size))
    pick = np.random.default_rng(seed).integers(0, starts.size, (RESAMPLES, starts.size))
    means = sums[pick].sum(1) / counts[pick].sum(1)
    low, high = np.percentile(means, (5, 95))
    return Estimate(float(values.mean(dtype=np.float64)), float(low), float(high))


def share(right: int, total: int) -> Estimate:
    """A share of right answers with its Wilson 5-95 % interval (z = 1.645)."""
    z = 1.6449
    p = right / total
    centre = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * (p * (1 - p) / total + z * z / (4 * total * total)) ** 0.5
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half))
