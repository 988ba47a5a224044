"""JSON as models of few bits misspell it: names and keys without quotes, quotes inside strings that nobody escaped.

A string ends at its next quote, as in JSON. Only if nothing can be read so, quotes may also be part of it, and every
way to read the text is found: which of them makes sense is for who asked to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from kakera.chat.schema_types import JSON_ESCAPES, escaped_strays

MOST_STEPS = 20_000  # strings that may begin or end; a file of 16K tokens with its quotes unescaped has some thousands
SPACE = re.compile(r"\s*")
KEY = re.compile(r"\"([^\"\\\n]*)\"\s*:|'([^'\\\n]*)'\s*:|([A-Za-z_][\w.-]*)\s*:")
WORD = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])|[A-Za-z_][\w.-]*")
WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
AFTER_VALUE = re.compile(r"\s*[,}\]]")

Read = Iterator[tuple[Any, int]]  # a value and where it ends, for each way to read it


class _TooMany(Exception):
    pass


def drifted_json(text: str) -> list[Any]:
    """The values that `text` may mean; none if there are too many to look at."""
    for inner_quotes in (False, True):
        readings: dict[str, Any] = {}
        try:
            for value, end in _Reader(text, inner_quotes).value(0):
                if not text[end:].strip():
                    readings[json.dumps(value)] = value
        except (_TooMany, RecursionError):
            return []
        if readings:
            return list(readings.values())
    return []


class _Reader:
    def __init__(self, text: str, inner_quotes: bool):
        self._text = text
        self._inner_quotes = inner_quotes
        self._steps = 0

    def value(self, at: int) -> Read:
        at = self._skip(at)
        first = self._text[at : at + 1]
        if first == "{":
            yield from self._members(at + 1, {})
        elif first == "[":
            yield from self._items(at + 1, [])
        elif first and first in "\"'":
            yield from self._strings(at, first)
        elif match := WORD.match(self._text, at):
            word = match[0]
            number = word[0] == "-" or word[0].isdigit()
            yield json.loads(word) if number else WORDS.get(word, word), match.end()

    def _members(self, at: int, before: dict[str, Any]) -> Read:
        at = self._skip(at)
        if self._text.startswith("}", at):
            yield before, at + 1
        key = KEY.match(self._text, at)
        if key is None or (name := next(k for k in key.groups() if k is not None)) in before:
            return
        for value, end in self.value(key.end()):
            after = self._skip(end)
            if self._text.startswith("}", after):
                yield {**before, name: value}, after + 1
            elif self._text.startswith(",", after):
                yield from self._members(after + 1, {**before, name: value})

    def _items(self, at: int, before: list[Any]) -> Read:
        at = self._skip(at)
        if self._text.startswith("]", at):
            yield before, at + 1
        for value, end in self.value(at):
            after = self._skip(end)
            if self._text.startswith("]", after):
                yield [*before, value], after + 1
            elif self._text.startswith(",", after):
                yield from self._items(after + 1, [*before, value])

    def _strings(self, at: int, quote: str) -> Read:
        """A string ends at a quote that a comma or a bracket follows: the first, or each that may be the last."""
        end = at
        while (end := self._text.find(quote, end + 1)) >= 0:
            self._steps += 1
            if self._steps > MOST_STEPS:
                raise _TooMany
            if self._escaped(end):
                continue
            if AFTER_VALUE.match(self._text, end + 1):
                yield _unescaped(self._text[at + 1 : end]), end + 1
            if not self._inner_quotes:
                return

    def _escaped(self, at: int) -> bool:
        before = at
        while self._text[before - 1] == "\\":
            before -= 1
        return (at - before) % 2 == 1

    def _skip(self, at: int) -> int:
        match = SPACE.match(self._text, at)
        return match.end() if match else at


def _unescaped(text: str) -> str:
    """What stands between the quotes of a string; escapes that JSON does not have stay as they are."""
    quoted = re.sub(r'\\.|"', lambda m: m[0] if m[0] != '"' else '\\"', text, flags=re.DOTALL)
    try:
        return str(json.loads(f'"{escaped_strays(quoted, JSON_ESCAPES)}"', strict=False))
    except ValueError:
        return text
