"""Lateness: steps that take much longer than such steps took before, as they do when memory has left the card.

Of a chunk of prefill alone, and of decode rows alone, seconds grow in a line with the tokens that are read: one line
for each size, fitted to what was not late. Other steps say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from kakera.contract.step import StepPlan

LATE = 1.5  # times the line. Touching the end of a card's memory cost 1.3, being over it 2 to 6
IN_A_ROW = 3  # late ones, and they must have taken
LEAST_SECONDS = 1.0  # together: the host's own hiccups are shorter
LEARNED = 32  # steps of a size before one can be late
REACH = 4.0  # times the most tokens seen: further out a line says nothing
KEPT = 0.998  # of the weight of a step, with each further one: a line follows slowly


@dataclass
class _Line:
    """Weighted least squares, as sums."""

    steps: int = 0
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    most: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.steps += 1
        self.most = max(self.most, x)
        old = (self.weight, self.x, self.y, self.xx, self.xy)
        new = (1.0, x, y, x * x, x * y)
        self.weight, self.x, self.y, self.xx, self.xy = (KEPT * a + b for a, b in zip(old, new, strict=True))

    def at(self, x: float) -> float:
        """Never falling: a line through points that lie close together could."""
        spread = self.weight * self.xx - self.x * self.x
        slope = max(0.0, (self.weight * self.xy - self.x * self.y) / spread) if spread > 1e-6 * self.xx else 0.0
        return (self.y - slope * self.x) / self.weight + slope * x


class Lateness:
    """`found`: how often `IN_A_ROW` steps were late."""

    def __init__(self) -> None:
        self.found = 0
        self._lines: dict[tuple[str, int], _Line] = {}
        self._run: list[float] = []  # seconds of the late steps since the last one in time

    def observe(self, plan: StepPlan, seconds: float) -> None:
        if not plan.rows or (plan.decode and plan.prefill) or len(plan.prefill) > 1:
            return
        kind, size = ("prefill", plan.token_count) if plan.prefill else ("decode", len(plan.decode))
        read = float(sum(row.start for row in plan.rows))
        line = self._lines.setdefault((kind, size), _Line())
        known = line.steps >= LEARNED and read <= REACH * max(line.most, float(size))
        if not known or seconds <= LATE * line.at(read):
            line.add(read, seconds)
            if known:
                self._run.clear()
            return
        self._run.append(seconds)
        if len(self._run) >= IN_A_ROW and sum(self._run) >= LEAST_SECONDS:
            self.found += 1
            self._run.clear()
