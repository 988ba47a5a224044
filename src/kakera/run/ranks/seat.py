"""Seat: what a rank's process is given to meet the others. No torch."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from kakera.run.ranks.meeting import Meeting
from kakera.run.ranks.memory import mapped
from kakera.run.ranks.wire import BUILD, Peer, Wire


@dataclass(frozen=True)
class Seat:
    """`memory`, `ends`, which lead to the other ranks by their number, and `segment`, if the ranks have cards, are
    descriptors of this process."""

    rank: int
    processes: tuple[int, ...]  # by rank
    memory: int
    ends: dict[int, int]
    segment: int | None = None

    def meeting(self) -> Meeting:
        """To be called once: the descriptors are taken over."""
        wires = {
            rank: Wire(socket.socket(fileno=end), Peer(rank, self.processes[rank])) for rank, end in self.ends.items()
        }
        return Meeting(self.rank, mapped(self.memory), wires, BUILD, self.segment)
