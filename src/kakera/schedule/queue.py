"""WaitingQueue: requests that are not running. Clients take turns, and each one's requests come in their order.

Those in the background come behind all others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, zip_longest

from kakera.schedule.sequence import Sequence


class WaitingQueue:
    """A ring of clients: one enters behind the others with its first request, and goes behind them when a request of
    its own is admitted. Nobody overtakes the head of the ring, so who is there is admitted next, however many come.

    Preempted sequences have had their turn: they return in front of all others, in the order of their arrival.
    A client's requests in the background take turns of their own, and none while any other request waits.
    """

    def __init__(self) -> None:
        self._returned: dict[str, Sequence] = {}
        self._ring: OrderedDict[tuple[bool, str], dict[str, Sequence]] = OrderedDict()  # by `_place`
        self._waiting: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they would be admitted, if all fitted."""
        rounds = chain.from_iterable(zip_longest(*(requests.values() for requests in self._ring.values())))
        turns = [*self._returned.values(), *(sequence for sequence in rounds if sequence is not None)]
        return iter(sorted(turns, key=lambda sequence: sequence.background))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def get(self, request_id: str) -> Sequence | None:
        return self._waiting.get(request_id)

    def of(self, client: str, background: bool = False) -> int:
        """How many requests of a client wait, without those that were preempted."""
        return len(self._ring.get((background, client), ()))

    def push(self, sequence: Sequence) -> None:
        self._waiting[sequence.id] = sequence
        self._ring.setdefault(_place(sequence), {})[sequence.id] = sequence

    def push_back(self, sequence: Sequence) -> None:
        """Return a preempted sequence. Rare, so sorting is fine."""
        self._waiting[sequence.id] = sequence
        returned = sorted([sequence, *self._returned.values()], key=lambda each: each.arrival)
        self._returned = {each.id: each for each in returned}

    def pop(self, request_id: str) -> Sequence | None:
        """Take a request out; its client keeps its place in the ring."""
        sequence = self._waiting.pop(request_id, None)
        if sequence is not None and self._returned.pop(request_id, None) is None:
            place = _place(sequence)
            del self._ring[place][request_id]
            if not self._ring[place]:
                del self._ring[place]
        return sequence

    def admit(self, sequence: Sequence) -> None:
        """Take a request out to run: that was its client's turn."""
        had_its_turn = sequence.id in self._returned
        self.pop(sequence.id)
        if not had_its_turn and _place(sequence) in self._ring:
            self._ring.move_to_end(_place(sequence))


def _place(sequence: Sequence) -> tuple[bool, str]:
    return sequence.background, sequence.request.client
