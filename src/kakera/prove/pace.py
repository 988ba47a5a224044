"""What a chunk of prefill should take, by how many tokens stand before it: a line through the first quarter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median, mode

from kakera.prove.trace import Chunk

LEAST_CHUNKS = 32  # in all: of fewer, a quarter makes no line that holds to the end
MOST_POINTS = 64  # of a quarter, for the line's slope
CONFIRMED = 1.1  # of the calibration: a first quarter that is slower was disturbed already


@dataclass(frozen=True)
class Pace:
    """Seconds of a whole chunk behind `p` tokens: level + slope x p. `chunks`: the whole ones of the fill, in order."""

    level: float
    slope: float
    chunks: tuple[Chunk, ...]

    @staticmethod
    def of(calm: Sequence[Chunk], filling: Sequence[Chunk]) -> Pace | None:
        """Whole chunks are those of the usual size; None if there are too few. The slope is the median of those between
        any two, so that single slow chunks do not bend it. A quarter slower than the calibration is scaled to it."""
        tokens = mode(chunk.tokens for chunk in filling) if filling else 0
        whole = tuple(chunk for chunk in filling if chunk.tokens == tokens)
        if len(whole) < LEAST_CHUNKS:
            return None
        quarter = whole[: len(whole) // 4]
        points = quarter[:: -(-len(quarter) // MOST_POINTS)]
        slopes = [(b.seconds - a.seconds) / (b.position - a.position) for a, b in combinations(points, 2)]
        slope = max(0.0, median(slopes))
        level = median(chunk.seconds - slope * chunk.position for chunk in points)
        scale = 1.0
        if ratios := [c.seconds / (level + slope * c.position) for c in calm if c.tokens == tokens]:
            scale = median(ratios)
        if scale * CONFIRMED < 1.0:
            level, slope = level * scale, slope * scale
        return Pace(level, slope, whole)

    def ratio(self, chunk: Chunk) -> float:
        """Of its seconds to what they should be."""
        return chunk.seconds / (self.level + self.slope * chunk.position)

    def runs(self, factor: float, count: int) -> list[list[Chunk]]:
        """Where at least `count` chunks in a row take more than `factor` times what they should."""
        found: list[list[Chunk]] = []
        run: list[Chunk] = []
        for chunk in self.chunks:
            if self.ratio(chunk) > factor:
                run.append(chunk)
                continue
            found += [run] if len(run) >= count else []
            run = []
        return found + ([run] if len(run) >= count else [])
