"""Running: the requests that hold a slot, oldest first; those in the background behind all others."""

from __future__ import annotations

from kakera.cache.pages import IdPool
from kakera.schedule.sequence import Sequence


class Running:
    def __init__(self, slots: int) -> None:
        self.slots = IdPool(slots)
        self._running: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def get(self, request_id: str) -> Sequence | None:
        return self._running.get(request_id)

    def add(self, sequence: Sequence) -> None:
        self._running[sequence.id] = sequence

    def remove(self, sequence: Sequence, slot: int) -> None:
        del self._running[sequence.id]
        self.slots.give(slot)

    def oldest_first(self) -> list[Sequence]:
        return sorted(self._running.values(), key=lambda sequence: (sequence.background, sequence.arrival))

    def victim(self) -> Sequence:
        """Whom to preempt: the youngest of those that wait for their readers, or else of those in the background, or
        else of all."""
        return max(self._running.values(), key=lambda each: (each.paused, each.background, each.arrival))

    @property
    def background(self) -> bool:
        """Whether somebody here would give way."""
        return any(sequence.background for sequence in self._running.values())

    def prefilling(self) -> list[Sequence]:
        return [sequence for sequence in self.oldest_first() if sequence.prefilling]
