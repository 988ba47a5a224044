"""Tool calls in the Qwen XML dialect, parsed while they stream.

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

A call is announced once, with index, id and name, as soon as its first parameter or its end is there; after that only
pieces of its arguments follow. The pieces of one call, joined, are a JSON object whose values have the types that the
tool declares.

Models of few bits drift, so these are read as well: a call without its first tag; a call that lacks closing tags, or
ends within one; names in quotes; and the forms of `json_call`. What is no call of a declared function is text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kakera.chat.call_head import FUNCTION, CallHead, skip
from kakera.chat.declared import Declared
from kakera.chat.json_call import Calls, NoCall
from kakera.chat.parameter_value import ParameterValue
from kakera.chat.tags import (
    CALL_END,
    CALL_END_BEGUN,
    CALL_NAMES,
    LAST_TAGS,
    OPEN,
    PARAMETER_BEGUN,
    PARAMETER_HEAD,
    RESPONSE,
    RESPONSE_END,
    WHOLE_END,
    WHOLE_END_BEGUN,
    beginning,
    closing,
    closing_begun,
    undecided,
)

START = re.compile(f"{OPEN}|{FUNCTION}(?=[ \t=])|{RESPONSE}")  # a call may lack its first tag
START_BEGUN = re.compile(f"(?:{beginning(OPEN)}|{beginning(FUNCTION)}|{beginning(RESPONSE)})\\Z")
CALL_START = re.compile(f"{OPEN}|{FUNCTION}(?=[ \t=])")
FOREIGN_END = re.compile(f"{WHOLE_END.pattern}|(?={OPEN})")
RESPONSE_INSIDE_BEGUN = re.compile(f"(?:{beginning(RESPONSE_END)}|{beginning(OPEN)}|{beginning(FUNCTION)})\\Z")
STRAY_BRACKETS = re.compile(rf"[}}\]]+\s*(?={closing(CALL_NAMES)})")  # more than were opened, behind a call in JSON
STRAY_BEGUN = re.compile(rf"[}}\]]+\s*(?:{closing_begun(CALL_NAMES)})?\Z")
FOREIGN_BEGUN = re.compile(f"{WHOLE_END_BEGUN.pattern}|{beginning(OPEN)}\\Z")


@dataclass(frozen=True)
class CallDelta:
    """`id` and `name` are set in the first delta of a call and in no other."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Output = str | CallDelta


class ToolCallParser:
    """Text in, text outside of calls and call deltas out. Tags may be cut anywhere.

    Nothing is lost: every word comes out once, as text or in a call. Left out are the tags of calls, torn ones as well,
    white space beside calls, and parameters that a call can not have (a second one of the same name; any, if the
    function takes none). A text without calls comes out as it went in.
    """

    def __init__(self, tools: list[dict[str, Any]]):
        self._tools = Declared(tools)
        self._held = ""
        self._state: Callable[[bool], list[Output]] = self._text
        self._line_begun = False  # words stand before, on the line that is being shown
        self._last = ""  # the last letter that was shown
        self._mention = False  # the tag of a response stood within a line
        self._wrapped = False  # the call's first tag was there, its last one not yet
        self._first_tag = 0  # where it ends, in what is held
        self._call = CallHead(self._tools, 0, False)
        self._calls = 0
        self._function = ""
        self._given: set[str] = set()  # parameters of the open call
        self._parameter = ParameterValue("", frozenset(), False, self._begins_another)
        self.cut = False  # `finish` left a call without its end

    @property
    def calls(self) -> int:
        """Calls announced so far."""
        return self._calls

    def feed(self, text: str) -> list[Output]:
        self._held += text
        return self._run(ended=False)

    def finish(self, truncated: bool) -> list[Output]:
        """The stream ended. A call left open is closed into valid JSON unless it was `truncated` by a limit or a stop
        string: whoever ran it would write half a file."""
        if not truncated:
            outputs = self._run(ended=True)
        elif self._state in (self._body, self._value):
            self.cut = True
            return self._delta(self._parameter.rest(self._held) if self._state == self._value else "")
        else:
            outputs = []
        held, self._held = self._held, ""
        if self._calls and (held.isspace() or (self._state == self._tail and LAST_TAGS.match(held.lstrip()))):
            held = ""
        return [*outputs, held] if held else outputs

    def _run(self, ended: bool) -> list[Output]:
        outputs: list[Output] = []
        while True:
            before = (self._state, len(self._held))
            outputs += self._state(ended)
            if (self._state, len(self._held)) == before:
                return outputs

    # States: each consumes what it can of self._held and returns what came of it. Where the stream has `ended`, nothing
    # waits for more.

    def _text(self, ended: bool) -> list[Output]:
        start = START.search(self._held)
        if start is None:
            return [] if ended else self._show(len(self._held[: self._decided(START_BEGUN, ended)].rstrip()))
        if words := len(self._held[: start.start()].rstrip()):  # white space before a call belongs to the call
            return self._show(words)
        if start[0] == RESPONSE:
            self._mention = self._line_begun and "\n" not in self._held[: start.start()]
            self._state = self._response
            return self._show(start.end())
        if start[0] == FUNCTION and (self._held[: start.start()] or self._last)[-1:] == "`":
            return self._show(start.end())
        self._begin_call(start.end(), start.end() if start[0] == OPEN else start.start(), wrapped=start[0] == OPEN)
        return []

    def _response(self, ended: bool) -> list[Output]:
        """Inside a tool's result that the model invents: no call is one. A tag that stood within a line and is never
        closed was only mentioned; what follows it is read when that is known."""
        if (end := self._held.find(RESPONSE_END)) >= 0:
            self._state = self._text
            return self._show(end + len(RESPONSE_END))
        if start := CALL_START.search(self._held):
            if ended and self._mention:
                self._state = self._text
            return self._show(start.start())
        return self._show(self._decided(RESPONSE_INSIDE_BEGUN, ended))

    def _foreign(self, ended: bool) -> list[Output]:
        """Inside the call of a function that nobody declared, up to its end or the next call."""
        if end := FOREIGN_END.search(self._held):
            self._state = self._text
            return self._show(end.end())
        return self._show(self._decided(FOREIGN_BEGUN, ended))

    def _head(self, ended: bool) -> list[Output]:
        found = self._call.read(self._held, ended)
        if isinstance(found, NoCall):
            self._state = self._foreign if found.foreign and self._wrapped else self._text
            return self._show(self._first_tag)
        if isinstance(found, Calls):
            self._held, self._state = self._held[found.end :], self._tail
            return [self._announce(call.name, call.arguments) for call in found.calls]
        if found is None:
            return []
        self._held, self._state = self._held[found.at :], self._body
        self._function, self._given = found.name, set()
        return [self._announce(found.name)]

    def _body(self, ended: bool) -> list[Output]:
        at = skip(self._held, 0)
        if head := PARAMETER_HEAD.match(self._held, at):
            self._held = self._held[head.end() :]
            return self._begin_parameter(self._tools.parameter(self._function, head[1]))
        begun = PARAMETER_BEGUN.match(self._held, at) or CALL_END_BEGUN.match(self._held, at)
        if begun and not ended and not CALL_END.match(self._held, at):
            return []
        self._held, self._state = self._held[at:], self._tail
        return self._delta("}" if self._given else "{}")

    def _value(self, ended: bool) -> list[Output]:
        text, taken, complete = self._parameter.read(self._held, ended)
        self._held = self._held[taken:]
        if complete:
            self._state = self._body
        return self._delta(text)

    def _tail(self, ended: bool) -> list[Output]:
        self._held = self._held.lstrip()
        if tag := CALL_END.match(self._held):
            self._held, self._wrapped = self._held[tag.end() :], self._wrapped and tag["function"] is not None
        elif self._wrapped and (stray := STRAY_BRACKETS.match(self._held)):
            self._held = self._held[stray.end() :]
        elif (ended and LAST_TAGS.match(self._held)) or (self._wrapped and STRAY_BEGUN.match(self._held)):
            self._held = "" if ended else self._held
        elif not ended and CALL_END_BEGUN.match(self._held):
            pass
        elif self._wrapped and self._held.startswith(("{", "[")):  # several objects, one after the other
            self._begin_call(0, 0, wrapped=True)
        else:
            self._line_begun, self._last, self._wrapped, self._state = False, "", False, self._text
        return []

    # What states do.

    def _begin_call(self, first_tag: int, at: int, wrapped: bool) -> None:
        self._first_tag, self._wrapped, self._state = first_tag, wrapped, self._head
        self._call = CallHead(self._tools, at, wrapped)

    def _decided(self, begun: re.Pattern[str], ended: bool) -> int:
        """Characters of what is held before a tag that may have begun."""
        return len(self._held) if ended else undecided(self._held, begun)

    def _show(self, size: int) -> list[Output]:
        text, self._held = self._held[:size], self._held[size:]
        if text:
            line = text.rpartition("\n")
            self._line_begun = bool(line[2].strip()) or (self._line_begun and not line[1])
            self._last = text[-1]
        return [text] if text else []

    def _announce(self, name: str, arguments: str = "") -> CallDelta:
        self._calls += 1
        return CallDelta(self._calls - 1, arguments, "call_" + uuid.uuid4().hex[:24], name)

    def _begin_parameter(self, key: str) -> list[Output]:
        """A parameter that the call has already, or that the function can not have, is read and left out."""
        silent = key in self._given or not self._tools.takes_any(self._function)
        types = self._tools.types(self._function, key)
        self._parameter = ParameterValue(key, types, silent, self._begins_another)
        self._state = self._value
        if silent:
            return []
        separator = ", " if self._given else "{"
        self._given.add(key)
        return self._delta(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")

    def _begins_another(self, written: str) -> bool:
        """Whether this head can only begin the next parameter: a declared one that the call does not have yet."""
        key = self._tools.parameter(self._function, written)
        return key in self._tools.properties(self._function) and key not in self._given

    def _delta(self, arguments: str) -> list[Output]:
        return [CallDelta(self._calls - 1, arguments)] if arguments else []
