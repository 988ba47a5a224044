"""How a call begins, and what only looks so: the head of a declared function, or one of `json_call`'s forms."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kakera.chat.declared import Declared
from kakera.chat.json_call import MOST_CLOSES, Calls, JsonCalls, NoCall, named_call, object_call, python_call
from kakera.chat.tags import (
    CALL_CLOSE,
    CALL_CLOSE_BEGUN,
    CALL_END,
    CALL_END_BEGUN,
    CALL_NAMES,
    FUNCTION_BEGUN,
    FUNCTION_HEAD,
    LAST_TAGS,
    PARAMETER_BEGUN,
    PARAMETER_HEAD,
    PYTHON_HEAD,
    WHOLE_END,
    closing,
    closing_begun,
    undecided,
)

FUNCTION = "<function"
SPACE = re.compile(r"\s*")
NAME_LINE = re.compile(
    rf"([^\s<>{{}}\[\]()\"']+)[ \t]*(?=\r?\n|\(|{closing(CALL_NAMES)})"
)  # `<tool_call>\nbash\nls -la`
NAME_BEGUN = re.compile(rf"([^\s<>{{}}\[\]()\"']+)[ \t]*(?:\r|{closing_begun(CALL_NAMES)})?\Z")
PYTHON_END = re.compile(r"\)[\"'\s]*>")
MOST_PYTHON_ENDS = 16  # that are tried as the end of one call


@dataclass(frozen=True)
class Opened:
    """A call of this function whose parameters, or its end, begin at this character."""

    name: str
    at: int


Found = Opened | Calls | NoCall | None  # None: more has to come


class CallHead:
    """What begins at one place of a text that grows; `wrapped` says whether behind the tag that opens calls."""

    def __init__(self, tools: Declared, begin: int, wrapped: bool):
        self._tools = tools
        self._begin = begin
        self._wrapped = wrapped
        self._form: Callable[[str, bool], Found] = self._first
        self._scanned = 0  # characters that need no second look

    def read(self, text: str, ended: bool) -> Found:
        return self._form(text, ended)

    def _first(self, text: str, ended: bool) -> Found:
        at = self._begin = skip(text, self._begin)
        if PYTHON_HEAD.match(text, at):
            self._form = self._python
        elif head := FUNCTION_HEAD.match(text, at):
            name = self._tools.function(head[1])
            return NoCall(foreign=True) if name is None else self._named(name, text, head.end(), ended)
        elif FUNCTION_BEGUN.match(text, at) and not ended:
            return None
        elif text.startswith(FUNCTION, at):  # a blank name, or one with a line break
            return NoCall(foreign=True)
        elif text.startswith(("{", "["), at):
            self._form = JsonCalls(self._tools, at).read
        elif NAME_LINE.match(text, at):
            self._form = self._name_line
        else:
            begun = NAME_BEGUN.match(text, at)
            return None if begun and not ended and self._tools.may_become(begun[1]) else NoCall()
        return self._form(text, ended)

    def _named(self, name: str, text: str, at: int, ended: bool) -> Found:
        """Behind the head of a declared function: a parameter or the end makes it a call, other words make it text. A
        call without arguments of a function that needs some is only believed behind the tag that opens calls."""
        at = skip(text, at)
        if text.startswith("{", at):
            self._form = partial(self._object, name, at)
            return self._form(text, ended)
        empty = self._wrapped or self._tools.needs_none(name)
        if PARAMETER_HEAD.match(text, at) or (empty and CALL_END.match(text, at)):
            return Opened(name, at)
        if not ended:
            return None if PARAMETER_BEGUN.match(text, at) or CALL_END_BEGUN.match(text, at) else NoCall()
        torn = at < len(text)
        called = LAST_TAGS.match(text, at) and (empty if torn else self._wrapped and self._tools.needs_none(name))
        return Opened(name, at) if called else NoCall()

    def _name_line(self, text: str, ended: bool) -> Found:
        head = NAME_LINE.match(text, self._begin)
        name = self._tools.function(head[1]) if head else None
        if head is None or name is None:
            return NoCall()
        if PARAMETER_HEAD.match(text, at := skip(text, head.end())):
            return Opened(name, at)
        close = CALL_CLOSE.search(text, max(head.end(), self._scanned))
        self._scanned = undecided(text, CALL_CLOSE_BEGUN)
        if close is None and not ended:
            return None
        end = close.start() if close else len(text)
        body = LAST_TAGS.sub("", text[head.end() : end])
        python = body.rstrip()
        if python.startswith("(") and python.endswith(")"):
            call = python_call(name, python[1:-1], self._tools)
        else:
            call = named_call(name, body, self._tools)
        return Calls((call,), end) if call else NoCall()

    def _object(self, name: str, at: int, text: str, ended: bool) -> Found:
        """`<function=bash>{"command": "ls"}</function>`: up to the first tag where the object makes sense."""
        for tries, end in enumerate(WHOLE_END.finditer(text, at)):
            if tries == MOST_CLOSES:
                return NoCall()
            if end.end() > self._scanned and (call := object_call(name, text[at : end.start()], self._tools)):
                return Calls((call,), end.start())
        self._scanned = len(text)
        if not ended:
            return None
        call = object_call(name, LAST_TAGS.sub("", text[at:]), self._tools)
        return Calls((call,), len(text)) if call else NoCall()

    def _python(self, text: str, ended: bool) -> Found:
        """`<function=bash(command="ls")>`, on one line."""
        head = PYTHON_HEAD.match(text, self._begin)
        name = self._tools.function(head[1]) if head else None
        if head is None or name is None:
            return NoCall(foreign=True)
        line = text.find("\n", head.end())
        line = len(text) if line < 0 else line
        for tries, end in enumerate(PYTHON_END.finditer(text, head.end(), line)):
            if tries == MOST_PYTHON_ENDS:
                return NoCall()
            if end.end() > self._scanned and (call := python_call(name, text[head.end() : end.start()], self._tools)):
                return Calls((call,), end.end())
        self._scanned = line
        return NoCall() if ended or line < len(text) else None


def skip(text: str, at: int) -> int:
    """Where white space ends that begins at `at`."""
    space = SPACE.match(text, at)
    return space.end() if space else at
