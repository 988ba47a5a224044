"""Calls that a model wrote as JSON, or nearly so, where its dialect wants XML: {"name": ..., "arguments": {...}}, a
list of them, a line with the name and the arguments below it, or NAME(key=value).

They are read where every name is declared and nothing of what was written is left over.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kakera.chat.declared import Declared
from kakera.chat.drifted_json import drifted_json
from kakera.chat.schema_types import PYTHON_ESCAPES, escaped_strays, json_value, parse_value, typed_value
from kakera.chat.tags import CALL_CLOSE, CALL_CLOSE_BEGUN, undecided

MISSING = ("", "}", "}}")  # closing braces that a model forgets at the end
ARGUMENT_KEYS = ("arguments", "parameters", "input", "args")
NAME_KEYS = ("name", "function", "tool", "tool_name")
OTHER_KEYS = {"type", "id", "index"}
MOST_CLOSES = 16  # closing tags within broken JSON that are tried as its end
MARKS = re.compile(r'\\.|["{}\[\]]|' + CALL_CLOSE.pattern, re.DOTALL)


@dataclass(frozen=True)
class Call:
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


Reading = Callable[[Any], tuple[Call, ...] | None]  # what calls a JSON value is


@dataclass(frozen=True)
class NoCall:
    """What stands there is text: its first tag, or all up to the call's end if it is the call of a `foreign` function
    that nobody declared."""

    foreign: bool = False


@dataclass(frozen=True)
class Calls:
    """Calls, and the character of the text at which they end."""

    calls: tuple[Call, ...]
    end: int


class JsonCalls:
    """The calls at `start` of a text that grows. Each character is looked at once, until a value may be complete."""

    def __init__(self, tools: Declared, start: int):
        self._tools = tools
        self._start = self._at = start
        self._depth = 0
        self._in_string = False
        self._balanced = False  # the brackets were closed once: it was no JSON, or no call
        self._closes: list[int] = []

    def read(self, text: str, ended: bool) -> Calls | NoCall | None:
        """None if more of the text has to come.

        JSON is read as soon as it is complete, and what only resembles it at the first closing tag outside of its
        strings, or where the stream has `ended`. So the answer does not depend on how much has come behind.
        """
        safe = len(text) if ended else self._settled(text)
        while self._at < safe and (mark := MARKS.search(text, self._at, safe)):
            self._at = mark.end()
            if mark[0][0] == "<":
                self._closes.append(mark.start())
                if not self._in_string:
                    return self._forgiving(text, self._closes)
            elif mark[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string and mark[0] in "{[":
                self._depth += 1
            elif not self._in_string and mark[0] in "}]":
                self._depth -= 1
                if self._depth == 0 and not self._balanced:
                    self._balanced = True
                    if found := self._strict(text[self._start : self._at]):
                        return Calls(found, self._at)
        self._at = max(self._at, safe)
        return self._forgiving(text, [*self._closes, len(text)]) if ended else None

    def _settled(self, text: str) -> int:
        """Where marks end that what comes next can not change."""
        safe = undecided(text, CALL_CLOSE_BEGUN)
        while safe > self._at and text[safe - 1] == "\\":
            safe -= 1
        return safe

    def _strict(self, text: str) -> tuple[Call, ...] | None:
        try:
            return calls_of(json.loads(text, strict=False, object_pairs_hook=first_of_each), self._tools)
        except (ValueError, RecursionError):
            return None

    def _forgiving(self, text: str, ends: list[int]) -> Calls | NoCall:
        """The value is all that stands before one of the closing tags, the first where it makes sense."""
        for end in dict.fromkeys([*ends[:MOST_CLOSES], ends[-1]]):
            if found := meaning(text[self._start : end], self._tools, lambda value: calls_of(value, self._tools)):
                return Calls(found, end)
        return NoCall()


def meaning(text: str, tools: Declared, calls: Reading) -> tuple[Call, ...] | None:
    """The calls that a text means which is not quite JSON. Of several readings the one counts that names the most
    parameters, all of them declared; two that name as many are none."""
    text = text.strip()
    for missing in MISSING:
        try:
            return calls(json.loads(text + missing, strict=False, object_pairs_hook=first_of_each))
        except (ValueError, RecursionError):
            continue
    if isinstance(value := parse_value(text), dict | list):
        return calls(value)
    found = [each for value in drifted_json(text) if (each := calls(value))]
    if len(found) == 1:
        return found[0]
    keys = {each: [(call.name, key) for call in each for key in json.loads(call.arguments)] for each in found}
    declared = [each for each in keys if all(key in tools.properties(name) for name, key in keys[each])]
    best = [each for each in declared if len(keys[each]) == max(len(keys[other]) for other in declared)]
    return best[0] if len(best) == 1 else None


def first_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which the first of equal keys stands, as in the XML."""
    return dict(reversed(pairs)) if len(dict(pairs)) < len(pairs) else dict(pairs)


def calls_of(value: Any, tools: Declared) -> tuple[Call, ...] | None:
    """The calls that a JSON value is; None unless all of it are calls of declared functions."""
    calls = [_call(item, tools) for item in (value if isinstance(value, list) else [value])]
    found = tuple(call for call in calls if call is not None)
    return found if found and len(found) == len(calls) else None


def _call(value: Any, tools: Declared) -> Call | None:
    if not isinstance(value, dict):
        return None
    function = value.get("function")
    inner = function if isinstance(function, dict) else value
    written = [key for key in NAME_KEYS if key in inner]
    name = tools.function(inner[written[0]]) if written[:1] == ["name"] or len(written) == 1 else None
    if name is None or (inner is not value and value.keys() - {*OTHER_KEYS, "function"}):
        return None
    properties = tools.properties(name)
    keys = [key for key in ARGUMENT_KEYS if key in inner and key not in properties]
    others = [key for key in inner if key != written[0] and (key not in (*keys, *OTHER_KEYS) or key in properties)]
    if not keys:  # the arguments stand beside the name
        known = all(key in properties for key in others)
        return call_of(name, {key: inner[key] for key in others}, tools) if known else None
    if len(keys) > 1 or set(others) - OTHER_KEYS:
        return None  # which of them are the arguments?
    arguments = inner[keys[0]]
    if isinstance(arguments, str):
        arguments = parse_value(arguments) if arguments.strip() else {}
    return call_of(name, {} if arguments is None else arguments, tools)


def call_of(name: str, arguments: Any, tools: Declared) -> Call | None:
    """A call with arguments that came as values, unless they are no object, or none that JSON can say."""
    try:
        return Call(name, tools.typed(name, json_value(arguments))) if isinstance(arguments, dict) else None
    except (ValueError, TypeError, RecursionError):
        return None


def named_call(name: str, body: str, tools: Declared) -> Call | None:
    """A call whose name stood on a line of its own, with `body` below: an object of its parameters, or the value of the
    only parameter that it has."""
    body = body.strip("\r\n")
    properties = tools.properties(name)
    if not body.strip():
        return call_of(name, {}, tools) if tools.needs_none(name) else None
    if body.lstrip().startswith("{") and (call := object_call(name, body, tools)):
        return call
    if len(properties) != 1 or body.lstrip().startswith("<"):
        return None
    key = next(iter(properties))
    return call_of(name, {key: typed_value(body, tools.types(name, key))}, tools)


def object_call(name: str, body: str, tools: Declared) -> Call | None:
    """A call whose arguments are written as an object, or nearly so, of declared parameters."""
    properties = tools.properties(name)

    def arguments(value: Any) -> tuple[Call, ...] | None:
        known = isinstance(value, dict) and value.keys() <= properties.keys()
        return (call,) if known and (call := call_of(name, value, tools)) else None

    found = meaning(body, tools, arguments)
    return found[0] if found else None


def python_call(name: str, arguments: str, tools: Declared) -> Call | None:
    """A call as Python writes it: `command="ls"`, or one value for the only parameter."""
    try:
        call = ast.parse(f"f({escaped_strays(arguments, PYTHON_ESCAPES)})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return None
        values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if call.args:
            (key,), (value,) = tools.properties(name), call.args
            values = {key: ast.literal_eval(value), **values}
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    whole = None not in values and len(values) == len(call.keywords) + len(call.args)
    return call_of(name, values, tools) if whole else None
