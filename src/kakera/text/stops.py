"""Stop strings in streamed text: nothing that may still become part of one leaves early."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that is complete first, however the text is cut into pieces.

    Of several that end at the same character the one that began first wins. `held` is at most one character shorter
    than the longest stop string.
    """

    def __init__(self, stops: Sequence[str] = ()):
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self.held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that is safe to show. After a match (`matched` is set) everything is swallowed."""
        if self.matched is not None:
            return ""
        text = self.held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, start, self.matched = min(hits)
            self.held = ""
            return text[:start]
        safe = len(text) - self._suffix_to_hold(text)
        self.held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """The stream ended: what was held is ordinary text after all."""
        held, self.held = self.held, ""
        return held

    def _suffix_to_hold(self, text: str) -> int:
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


def partial_suffix(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the beginning of `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
