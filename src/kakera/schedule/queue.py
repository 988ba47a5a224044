"""WaitingQueue: requests that are not running, in the order of their arrival."""

from __future__ import annotations

from collections.abc import Iterator

from kakera.schedule.sequence import Sequence


class WaitingQueue:
    """A preempted sequence keeps its arrival number, so it returns in front of everything that came later."""

    def __init__(self) -> None:
        self._waiting: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._waiting.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def get(self, request_id: str) -> Sequence | None:
        return self._waiting.get(request_id)

    def push(self, sequence: Sequence) -> None:
        self._waiting[sequence.id] = sequence

    def push_back(self, sequence: Sequence) -> None:
        """Return a preempted sequence to its place. Rare, so sorting is fine."""
        waiting = sorted([sequence, *self._waiting.values()], key=lambda each: each.arrival)
        self._waiting = {each.id: each for each in waiting}

    def pop(self, request_id: str) -> Sequence | None:
        return self._waiting.pop(request_id, None)
