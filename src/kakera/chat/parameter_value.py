"""The value of one parameter while it streams: where it ends, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from kakera.chat.schema_types import surely_text, typed_value
from kakera.chat.tags import (
    CLOSE,
    FUNCTION_END,
    PARAMETER_BEGUN,
    PARAMETER_END,
    PARAMETER_HEAD,
    value_tags,
)


class ParameterValue:
    """A string comes in pieces, as soon as nothing but a string can come of it; other types when they are complete.

    One line break behind the first tag and one before the last belong to the tags.
    """

    def __init__(self, key: str, types: frozenset[str], silent: bool, begins_another: Callable[[str], bool]):
        """`key` is the parameter's name, `types` as `declared_types` names them; `silent` values are read and give
        nothing. `begins_another` says of a parameter's name, on a line of its own, whether its head ends this value,
        which then lacks its last tag."""
        self._tags = value_tags(key)
        self._types = types
        self._silent = silent
        self._begins_another = begins_another
        self._begun = False
        self._crlf = False
        self._as_text = types == {"string"}
        self._shown = False
        self._scanned = 0  # no tag begins before, of those that may end the value
        self._opened = 0  # elements of the parameter's name within the value that wait for their end

    def read(self, held: str, ended: bool) -> tuple[str, int, bool]:
        """JSON of what is certain, how many characters of `held` it took, and whether the value is complete."""
        skipped = 0
        if not self._begun:
            if held in ("", "\r") and not ended:
                return "", 0, False
            self._begun, self._crlf = True, held.startswith("\r\n")
            skipped = 2 if self._crlf else int(held.startswith("\n"))
            held = held[skipped:]
        if (end := self._end(held, ended)) is not None:
            value = held[: self._before_line_end(held, end[0])]
            return self._json(value, last=True), skipped + end[1], True
        safe = self._safe(held)
        self._as_text = self._as_text or surely_text(held[:safe], self._types)
        if not self._as_text or safe == 0:
            return "", skipped, False
        self._scanned -= safe
        return self._json(held[:safe], last=False), skipped + safe, False

    def rest(self, held: str) -> str:
        """What is left of a value that a limit cut: whole behind its closing tag, else text as JSON and other types as
        they were written."""
        whole = self._tags.whole.match(held, self._scanned)
        held = held[: self._safe(held)] if self._begun else ""
        if whole:
            return self._json(held, last=True)
        if self._silent or not held or self._as_text:
            return ""
        return self._json(held, last=False) if not self._types or "string" in self._types else held

    def _end(self, held: str, ended: bool) -> tuple[int, int] | None:
        """Where the value ends and where its own tags do."""
        at = held.find("<", self._scanned)
        while at >= 0:
            inside = self._opened and self._tags.own.match(held, at)
            if (tags := self._tags.end.match(held, at)) and not inside:
                return at, tags.end()
            own_line = held[at - 1 : at] == "\n"
            head = PARAMETER_HEAD.match(held, at) if own_line else None
            if head and self._begins_another(head[1]):
                return at, at
            if ended and self._tags.last.match(held, at) and not inside:
                return at, len(held)
            begun = self._tags.begun.match(held, at) or (own_line and PARAMETER_BEGUN.match(held, at))
            if begun and not ended and not inside:
                break
            self._opened += -1 if inside else 1 if self._tags.opened.match(held, at) else 0
            at = held.find("<", at + 1)
        self._scanned = len(held) if at < 0 else at
        return (len(held), len(held)) if ended else None

    def _safe(self, held: str) -> int:
        """Characters that are the value's, whatever follows."""
        if self._crlf and self._scanned == len(held) and held.endswith("\r"):
            return self._scanned - 1
        return self._before_line_end(held, self._scanned)

    def _before_line_end(self, held: str, at: int) -> int:
        if held[at - 1 : at] == "\n":
            at -= 1
            if self._crlf and held[at - 1 : at] == "\r":
                at -= 1
        return at

    def _json(self, text: str, last: bool) -> str:
        first, self._shown = not self._shown, True
        if self._silent:
            return ""
        if last and not self._as_text:
            return json.dumps(typed_value(text, self._types), ensure_ascii=False)
        return ('"' if first else "") + json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if last else "")


def carries(text: str) -> bool:
    """Whether a call can carry this value: no tag in it ends it early."""
    written = f"\n{text}\n{PARAMETER_END}"
    value = ParameterValue("", frozenset(["string"]), False, lambda name: True)
    return value.read(f"{written}\n{FUNCTION_END}\n{CLOSE}", ended=False)[1:] == (len(written), True)
