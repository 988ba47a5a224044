"""Memory that was really taken, beside the plan: row by row where it can be told apart, and in all.

Each measured byte stands in exactly one row, so the rows add up to what the device says that it gave away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from kakera.plan.plan import PlanRow
from kakera.plan.table import gigabytes

WITH_ABOVE, IN_TOTAL = "measured with the row above", "in the total"
PAGES, SCRATCH = ("KV pages, one full request", "KV pages, further"), "activations and scratch"
STAGING = "checkpoint staging"
CONTEXT, GRAPHS, PROCESSES = "CUDA context and modules", "CUDA graphs", "server and engine processes"
GAPS = "gaps in torch's allocator"


@dataclass(frozen=True)
class Held:
    """Bytes of the tensors that live as long as the engine, by purpose."""

    weights: int
    states: int
    windows: int
    pages: int
    scratch: int
    staging: int = 0  # records on their way to the host or from it, if they have a place of their own

    @property
    def total(self) -> int:
        return self.weights + self.states + self.windows + self.pages + self.scratch + self.staging


@dataclass(frozen=True)
class Taken:
    """What a device has given away. Most bytes: `allocated` in tensors at once, `reserved` by torch's allocator, of
    which `graphs` lie idle in pools of graphs, `device` in all, without what was in use before the engine came."""

    held: Held
    allocated: int
    reserved: int
    graphs: int
    device: int


@dataclass(frozen=True)
class MemoryRow:
    """Bytes. `measured` None: it can not be told apart, `note` says where it is counted."""

    name: str
    planned: int
    measured: int | None
    note: str = ""


@dataclass(frozen=True)
class MemoryTable:
    """`total`: all that was planned, and all that was in use."""

    title: str
    rows: tuple[MemoryRow, ...]
    total: MemoryRow

    @property
    def difference(self) -> float:
        """Of the total: 0.02 means that 2 % more were taken than planned."""
        return (self.total.measured or 0) / self.total.planned - 1

    def json(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows],
            "planned": self.total.planned,
            "measured": self.total.measured,
            "difference": self.difference,
        }

    def view(self) -> Table:
        view = Table(title=f"{self.title}: planned and taken")
        view.add_column("")
        for column in ("planned", "taken", "difference"):
            view.add_column(column, justify="right")
        view.add_column("")
        for row in self.rows:
            view.add_row(*_cells(row), end_section=row is self.rows[-1])
        name, planned, taken, _, note = _cells(self.total)
        view.add_row(name, planned, taken, f"{self.difference:+.1%}", note, style="bold")
        return view


def compare_gpu(planned: Sequence[PlanRow], taken: Taken) -> MemoryTable:
    """Rows of the plan for one card beside what one card gave away."""
    held, idle = taken.held, taken.reserved - taken.allocated
    graphs = min(taken.graphs, idle)  # they may have been full at the fullest moment
    rows = [row for row in planned if row.place == "device"]
    measured = {
        **_at_rest(rows, held),
        "weights": held.weights,
        SCRATCH: taken.allocated - held.total + held.scratch,
        CONTEXT: taken.device - taken.reserved,
        GRAPHS: graphs,
        GAPS: idle - graphs,
    }
    if held.staging:
        measured[STAGING] = held.staging
    transient = f"{gigabytes(held.scratch)} held, the rest at the fullest moment of loading and running"
    notes = {
        SCRATCH: transient,
        CONTEXT: "what torch's allocator did not take",
        GRAPHS: "idle in their own pools",
        GAPS: "reserved beyond the fullest moment",
    }
    found = [_row(row, measured.get(row.name), WITH_ABOVE, notes.get(row.name, "")) for row in _in_order(rows)]
    return MemoryTable("memory of the card", tuple(found), _total(rows, taken.device))


def compare_cpu(planned: Sequence[PlanRow], held: Held, store: int, resident: int) -> MemoryTable:
    """All rows of a plan for a CPU. `store`: bytes in the prefix cache's store; `resident`: the process's peak.

    Weights in the order of a CPU's library, and what Python and torch take, can only be measured together.
    """
    measured = {**_at_rest(planned, held), "prefix cache store": store}
    found = [_row(row, measured.get(row.name), IN_TOTAL) for row in planned]
    note = "peak resident set of this process; pages never written are not in it"
    return MemoryTable("memory", tuple(found), _total(planned, resident, note))


def compare_host(planned: Sequence[PlanRow], store: int, anonymous: int) -> MemoryTable:
    """Rows of a plan for the host of cards. `store`: bytes pinned for the prefix cache's store, which Linux counts as
    shared memory; `anonymous`: of the process, in memory and of no file."""
    rows = [row for row in planned if row.place == "host"]
    table = sum(row.bytes for row in rows if row.name == "embedding")  # read whole, into the process's own memory
    measured = {PROCESSES: anonymous - table, "embedding": table, "prefix cache store": store}
    notes = {PROCESSES: "anonymous memory, without a server's process", "prefix cache store": "pinned at the start"}
    found = [_row(row, measured.get(row.name), "not told apart", notes.get(row.name, "")) for row in rows]
    return MemoryTable("memory of the host", tuple(found), _total(rows, anonymous + store))


def compare_total(planned: Sequence[PlanRow], taken: int, note: str) -> MemoryTable:
    """For a server, of which only the sum can be seen."""
    rows = tuple(_row(row, None, IN_TOTAL) for row in planned)
    return MemoryTable("memory", rows, _total(planned, taken, note))


def _at_rest(planned: Sequence[PlanRow], held: Held) -> dict[str, int]:
    """Pages fill the rows that planned them one after the other."""
    found = {"recurrent states": held.states, "KV windows and sinks": held.windows}
    left = held.pages
    rows = [row for row in planned if row.name in PAGES]
    for row in rows:
        found[row.name] = left if row is rows[-1] else min(left, row.bytes)
        left -= found[row.name]
    return found


def _total(planned: Sequence[PlanRow], measured: int, note: str = "") -> MemoryRow:
    return MemoryRow("total", sum(row.bytes for row in planned), measured, note)


def _row(row: PlanRow, measured: int | None, elsewhere: str, note: str = "") -> MemoryRow:
    return MemoryRow(row.name, row.bytes, measured, elsewhere if measured is None else note)


def _in_order(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """What is measured in the row above comes behind that row."""
    behind = {STAGING: SCRATCH}
    found = [row for row in rows if row.name not in behind]
    for row in rows:
        if row.name in behind:
            place = next((i for i, other in enumerate(found) if other.name == behind[row.name]), len(found) - 1)
            found.insert(place + 1, row)
    return found


def _cells(row: MemoryRow) -> tuple[str, str, str, str, str]:
    if row.measured is None:
        return row.name, gigabytes(row.planned), "", "", row.note
    return row.name, gigabytes(row.planned), gigabytes(row.measured), gigabytes(row.measured - row.planned), row.note
