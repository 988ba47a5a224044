"""A `</think>` in content that is the model's own end of reasoning, taken out of the text.

Where a budget or a call has ended the reasoning, or it was switched off, models still write their closing tag. A tag
that an answer speaks about stays: one in quotes, one that closes a shown `<think>`, and, once the model's own is gone,
one within a line.
"""

from __future__ import annotations

import re

from kakera.chat.thinking import CLOSE, OPEN
from kakera.text.stops import partial_suffix

TAG = re.compile(f"{OPEN}|{CLOSE}")
QUOTES = frozenset("`\"'“”‘’„«»「」()[]")
LINE_ENDS = ("", "\n", "\r")


class StrayCloses:
    """Text outside of calls in, the same without stray tags out; however it is cut, the result is the same.

    `expected`: the reasoning had no end of the model's own, so the next tag that is not quoted is it, wherever it
    stands. White space around a tag that begins the text goes with it.
    """

    def __init__(self, expected: bool):
        self.expected = expected
        self._held = ""
        self._opened = 0  # shown `<think>` that wait for their end
        self._begin()

    def _begin(self) -> None:
        self._mark = "\n"  # the last character shown that is no blank
        self._fresh = True  # nothing but white space was shown
        self._dropped = False

    def feed(self, text: str) -> str:
        self._held += text
        return self._take(last=False)

    def flush(self) -> str:
        """What is held is all: a call follows, or nothing. Whatever comes behind begins anew."""
        text = self._take(last=True)
        self._begin()
        return text

    def _take(self, last: bool) -> str:
        shown = ""
        while (piece := self._next(last)) is not None:
            shown += piece
        return shown

    def _next(self, last: bool) -> str | None:
        """What may be shown up to the next tag, or in its place; None where more must be known."""
        if self._fresh and self._dropped:
            self._held = self._held.lstrip()
        tag = TAG.search(self._held)
        end = tag.start() if tag else len(self._held) - (0 if last else self._partial())
        white = self._fresh and (not end or self._held[:end].isspace())
        if not tag:
            return self._show(end) if end and (last or not white) else None
        if end and not white:
            return self._show(end)
        if tag[0] == OPEN:
            self._opened += 1
            return self._show(tag.end())
        behind = self._held[tag.end() :].lstrip(" \t")
        if not behind and not last:
            return None
        if self._spoken_of(behind[:1]):
            return self._show(tag.end())
        self.expected, self._dropped = False, True
        self._held = self._held[tag.end() :]
        return ""

    def _partial(self) -> int:
        return max(partial_suffix(self._held, tag) for tag in (OPEN, CLOSE))

    def _spoken_of(self, after: str) -> bool:
        """Whether the closing tag behind `_mark` and before `after` belongs to the answer."""
        if self._opened:
            self._opened -= 1
            return True
        if self._mark in QUOTES and after in QUOTES:
            return True
        return not (self.expected or self._mark in LINE_ENDS or after in LINE_ENDS)

    def _show(self, size: int) -> str:
        piece, self._held = self._held[:size], self._held[size:]
        self._fresh = self._fresh and (not piece or piece.isspace())
        if seen := piece.rstrip(" \t"):
            self._mark = seen[-1]
        return piece
