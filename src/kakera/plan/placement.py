"""Where parts of a model lie that need not lie on a card: experts, an embedding, a table of rows. No torch.

What a token reads most of goes to the card first. Experts go there expert by expert, the same number in every layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction

from kakera.plan.plan import Place, PlanRow
from kakera.plan.weights import Part, Placed
from kakera.target.target import Target


def part_rows(placed: Placed) -> Iterator[PlanRow]:
    """Of a plan: on each card, on the host, or both."""
    part = placed.part
    if part.units == 1:
        place: Place = "device" if placed.device else "host"
        where = "" if placed.device or placed.host else f"{part.bytes / 1e9:.2f} GB stay in the file; "
        note = f"{where}a token reads {part.taken} row{'s' * (part.taken > 1)}"
        yield PlanRow(part.name, place, placed.device or placed.host, note, "load")
        return
    if placed.device:
        note = f"{placed.units} of {part.units} in every layer; a token takes {part.taken}"
        read = f", reads {placed.read_on_device / 1e6:.0f} MB here"
        yield PlanRow(part.name, "device", placed.device, note + read, "load")
    if placed.host:
        which = f"all {part.units}" if placed.host == part.bytes else f"the other {part.units - placed.units}"
        read = f"; a token reads {placed.read_on_host / 1e6:.0f} MB from here if all are chosen alike"
        yield PlanRow(part.name, "host", placed.host, f"{which}, pinned{read}", "load")


def wished(parts: Iterable[Part], embedding: str) -> tuple[Part, ...]:
    """The parts with the places that `--embedding` leaves to the one of that name."""
    return tuple(
        replace(part, places=(embedding,)) if part.name == "embedding" and embedding in part.places else part
        for part in parts
    )


def must(parts: Iterable[Part], target: Target) -> int:
    """Bytes on the device that no placement can do without: of a CPU, whose memory is one, all but what files keep."""
    return sum(part.decoded for part in parts if target.one_memory and "file" not in part.places)


def place(parts: Iterable[Part], target: Target, ranks: int, room: int, host_room: int) -> tuple[Placed, ...]:
    """`room` on each device beyond what `must` be there, `host_room` on the host. What fits nowhere counts on the host,
    which then lacks it. Experts that are on the card lie on the host, too, only if that leaves room for the rest."""
    found = _placed(parts, target, ranks, room, host_room, twice=True)
    if sum(placed.host for placed in found) > host_room:
        found = _placed(parts, target, ranks, room, host_room, twice=False)
    return found


def _placed(
    parts: Iterable[Part], target: Target, ranks: int, room: int, host_room: int, twice: bool
) -> tuple[Placed, ...]:
    found = []
    for part in sorted(parts, key=lambda p: -Fraction(p.read, p.bytes)):
        one = -(-part.on_device(target, ranks) // part.units)
        if target.one_memory:
            units = part.units if "file" not in part.places or one <= room else 0
            placed = Placed(part, units, part.decoded if units else 0, 0)
            room -= placed.device if "file" in part.places else 0
        else:
            units = min(part.units, max(0, room) // one) if "device" in part.places else 0
            placed = Placed(part, units, units * one, _on_host(part, units, host_room, twice))
            room, host_room = room - placed.device, host_room - placed.host
        found.append(placed)
    return tuple(found)


def _on_host(part: Part, units: int, room: int, twice: bool) -> int:
    """All of it if there is room, so that other experts may take their turn on the card; else what the card lacks."""
    if units == part.units or ("file" in part.places and part.bytes > room):
        return 0
    return part.bytes if twice and part.bytes <= room else part.bytes * (part.units - units) // part.units
