"""The memory map: every device and the host, the plan row by row beside what is used, and how near the cliff is."""

from __future__ import annotations

from dataclasses import dataclass

from kakera.contract.events import EngineStats
from kakera.contract.grid import PAGE
from kakera.plan.plan import Place, Plan, PlanRow
from kakera.plan.sizes import margin
from kakera.server.operate.answers import Memory, MemoryState
from kakera.server.operate.sensors import Reading

NEAR = 1.25  # free memory below so many margins is worth a warning; below one it is the cliff
ADVICE = "close what else uses it, or restart with a smaller --context, --max-running or --host-cache"


@dataclass(frozen=True)
class Bar:
    """One memory: `used` bytes of `capacity` are in use by everybody, and `margin` bytes are to stay free.

    `rows`: (row, bytes of it in use or None if nobody counts them).
    """

    name: str
    capacity: int
    used: int | None
    margin: int
    rows: tuple[tuple[PlanRow, int | None], ...]

    @property
    def state(self) -> MemoryState:
        """Whether the memory that must stay free is free."""
        if self.used is None:
            return "ok"
        free = self.capacity - self.used
        return "over" if free < self.margin else "near" if free < NEAR * self.margin else "ok"

    @property
    def warning(self) -> str | None:
        if self.state == "ok" or self.used is None:
            return None
        free, kept = (f"{count / 1e9:.2f} GB" for count in (self.capacity - self.used, self.margin))
        if self.state == "near":
            return f"{self.name}: {free} are free, near the {kept} that must stay free"
        return f"{self.name}: only {free} are free. Below {kept} memory spills and everything slows down: {ADVICE}"

    def as_json(self) -> Memory:
        return {
            "name": self.name,
            "capacity": self.capacity,
            "used": self.used,
            "margin": self.margin,
            "state": self.state,
            "rows": [{"name": r.name, "note": r.note, "planned": r.bytes, "used": used} for r, used in self.rows],
        }


def bars(plan: Plan, stats: EngineStats, reading: Reading) -> list[Bar]:
    """Each card and the host; on a CPU they are one memory."""
    if plan.target.one_memory:
        rows = _rows(plan, stats, "device") + _rows(plan, stats, "host")
        return [Bar("this machine's memory", reading.host_bytes, reading.host_used, margin(reading.host_bytes), rows)]
    device = _rows(plan, stats, "device")
    found = []
    for i, (name, capacity) in enumerate(zip(plan.device_names, plan.device_bytes, strict=True)):
        used = reading.cards[i].used if i < len(reading.cards) else None
        found.append(Bar(f"GPU {i}: {name}", capacity, used, margin(capacity), device))
    host = _rows(plan, stats, "host")
    return [*found, Bar("host", reading.host_bytes, reading.host_used, margin(reading.host_bytes), host)]


def lent_line(plan: Plan, stats: EngineStats) -> str | None:
    """In words, what is given back while other programs need the card."""
    if not stats.pages_lent:
        return None
    there = stats.pages_total - stats.pages_lent
    size = stats.pages_lent * plan.page_bytes / len(plan.device_names) / 1e9
    waits = f"; {stats.held_back} such wait now" if stats.held_back else ""
    return (
        f"other programs need the card's memory: {size:.2f} GB of KV pages are given back until it is free again. "
        f"Requests under {there * PAGE:,} tokens run, longer ones wait{waits}"
    )


def _rows(plan: Plan, stats: EngineStats, place: Place) -> tuple[tuple[PlanRow, int | None], ...]:
    apart = not plan.target.one_memory  # else level 1 leaves the weights where they are
    left = _page_bytes(plan, stats)  # fills the page rows in their order
    found: list[tuple[PlanRow, int | None]] = []
    for row in plan.rows:
        if row.place != place:
            continue
        used: int | None = None
        match row.meter:
            case "load":
                used = 0 if stats.asleep > 1 or (stats.asleep and place == "device" and apart) else row.bytes
            case "slots":
                used = row.bytes * (stats.slots_total - stats.slots_free) // max(stats.slots_total, 1)
            case "pages":
                used = min(row.bytes, left)
                left -= used
            case "cache":
                used = stats.host_bytes_used
        found.append((row, used))
    return tuple(found)


def _page_bytes(plan: Plan, stats: EngineStats) -> int:
    """Bytes on one device of the pages that hold something: those of running requests and cached ones."""
    filled = stats.pages_used + stats.pages_cached
    return filled * plan.page_bytes // len(plan.device_names)
