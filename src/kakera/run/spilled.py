"""Which pieces of a card's memory lie on the host: those that are read several times slower than the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kakera.contract.events import RegionRead

SLOWER = 5.0  # than the median of the first sweep. A bus gives 3 to 50 GB/s, a card's memory 250 to 8,000
TIMES = 2  # of the same piece: one slow read is a hiccup
OVERHEAD_SECONDS = 50e-6  # of one read beside the bytes; 64 MiB from the host take at least 1.2 ms
LEAST_OF_MAKERS = 0.5  # of the maker's bandwidth is what the median counts for, should most of the card have spilled
MOST_OF_MAKERS = 400e9  # bytes a second that this counts for: short reads reach 525e9 of an H200's 4,800e9


@dataclass(frozen=True)
class Spilled:
    """`bytes` in pieces of one region, the first at `offset`; bytes a second at which they and the others are read."""

    region: str
    offset: int
    bytes: int
    rate: float
    usual: float

    @property
    def text(self) -> str:
        size, where = f"{self.bytes / 1e6:,.0f} MB", f"from {self.offset / 1e6:,.0f} MB on"
        return (
            f"{size} of {self.region} ({where}) are read at {self.rate / 1e9:.1f} GB/s, {self.usual / 1e9:,.0f} usual"
        )


def usual_rate(sweep: Sequence[RegionRead], makers: float | None = None) -> float:
    """Bytes a second of the median piece."""
    rates = [read.bytes / max(seconds, 1e-9) for read in sweep for seconds in read.seconds]
    return max(median(rates) if rates else 0.0, min(LEAST_OF_MAKERS * (makers or 0.0), MOST_OF_MAKERS))


def spilled(sweeps: Sequence[Sequence[RegionRead]], makers: float | None = None) -> tuple[Spilled, ...]:
    """Regions with pieces that were read slowly `TIMES` times, in one sweep or in several."""
    if not sweeps or not sweeps[0]:
        return ()
    usual = usual_rate(sweeps[0], makers)
    slow: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for read in (read for sweep in sweeps for read in sweep):
        limit = SLOWER * read.bytes / usual + OVERHEAD_SECONDS
        slow[read.region, read.offset, read.bytes] += [seconds for seconds in read.seconds if seconds > limit]
    by_region: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for (region, offset, size), seconds in slow.items():
        if len(seconds) >= TIMES:
            by_region[region].append((offset, size, median(seconds)))
    return tuple(
        Spilled(
            region,
            min(offset for offset, _, _ in pieces),
            size := sum(size for _, size, _ in pieces),
            size / sum(seconds for _, _, seconds in pieces),
            usual,
        )
        for region, pieces in sorted(by_region.items())
    )
