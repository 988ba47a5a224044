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
from kakera.chat.shown import (
    CALL_LANGUAGES,
    CALL_START,
    CALL_START_BEGUN,
    COMMON,
    FENCE,
    FENCE_HEAD,
    FENCE_HEAD_BEGUN,
    RESULT,
    RESULT_BEGUN,
    Fence,
    decided,
    result_end,
)
from kakera.chat.tags import (
    CALL_END,
    CALL_END_BEGUN,
    CALL_NAMES,
    LAST_TAGS,
    OPEN,
    PARAMETER_BEGUN,
    PARAMETER_HEAD,
    WHOLE_END,
    WHOLE_END_BEGUN,
    beginning,
    closing,
    closing_begun,
    undecided,
)

START = re.compile(f"{CALL_START.pattern}|{RESULT}|(?P<fence>{FENCE})")
START_BEGUN = re.compile(f"{CALL_START_BEGUN.pattern}|{RESULT_BEGUN}\\Z")
FOREIGN_END = re.compile(f"{WHOLE_END.pattern}|(?={OPEN})")
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
    white space beside calls, the marks of a fence that is nothing but calls, and parameters that a call can not have (a
    second one of the same name; any, if the function takes none). A text without calls comes out as it went in.
    """

    def __init__(self, tools: list[dict[str, Any]]):
        self._tools_given = tools
        self._tools = Declared(tools)
        self._held = ""
        self._state: Callable[[bool], list[Output]] = self._text
        self._line_begun = False  # something stands before, on the line that is being shown
        self._line_words = False  # and more than backticks
        self._last = ""  # the last letter that was shown
        self._silent = True  # nothing was shown or called so far
        self._result = ""  # the name of the open result of a tool
        self._looked = 0  # where its end is looked for, in what is held
        self._mention = False  # its tag is believed only where it is closed
        self._fence = Fence("```", 0)
        self._alone = False  # the open fence begins the answer; its head is held
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
            return [] if ended else self._show(len(self._held[: decided(self._held, START_BEGUN)].rstrip()))
        if words := len(self._held[: start.start()].rstrip()):  # white space before a call belongs to the call
            return self._show(words)
        own_line = not self._line_begun or "\n" in self._held[: start.start()]
        if start["fence"]:
            return self._begin_fence(start.start(), start.end(), ended) if own_line else self._show(start.end())
        if start["result"]:
            self._result = start["result"].casefold()
            common = self._result in COMMON
            self._mention, self._looked = common or not own_line, 0
            self._state = self._text if common and not own_line else self._in_result
            return self._show(start.end())
        if (self._held[: start.start()] or self._last)[-1:] == "`" and (start[0] == FUNCTION or self._line_words):
            return self._quoted(start.end(), ended)
        self._begin_call(start.end(), start.end() if start[0] == OPEN else start.start(), wrapped=start[0] == OPEN)
        return []

    def _quoted(self, tag: int, ended: bool) -> list[Output]:
        """A tag in backticks: words about calls. One that opens a whole call there is shown up to that call's end."""
        following = self._held[tag : tag + 1]
        if not following and not ended:
            return []
        if self._held[:tag].endswith(OPEN) and following != "`":
            self._state = self._foreign
        return self._show(tag)

    def _in_result(self, ended: bool) -> list[Output]:
        """Inside a tool's result that the model invents: no call is one. A tag that stood within a line and is never
        closed was only mentioned; what follows it is read when that is known."""
        closed, begun = result_end(self._result)
        if end := closed.search(self._held, self._looked):
            self._state = self._text
            return self._show(end.end())
        self._looked = undecided(self._held, begun)
        if start := CALL_START.search(self._held):
            if ended and self._mention:
                self._state = self._text
            self._looked = max(self._looked - start.start(), 0)
            return self._show(start.start())
        size, self._looked = self._decided(begun, ended), 0
        return self._show(size)

    def _begin_fence(self, at: int, marked: int, ended: bool) -> list[Output]:
        head = FENCE_HEAD.match(self._held, at)
        if head is None:
            waits = FENCE_HEAD_BEGUN.match(self._held, at) and not ended
            return [] if waits else self._show(marked)
        self._fence, self._state = Fence(head[1], head.end()), self._in_fence
        self._alone = self._silent and head[2].strip().casefold() in CALL_LANGUAGES
        return []

    def _in_fence(self, ended: bool) -> list[Output]:
        """Inside a code fence: a call there is shown to the reader, unless it is all of the answer. A fence that is
        never closed is none; what follows its first call is read when that is known."""
        end = self._fence.end(self._held, ended)
        self._alone = self._alone and self._fence.may_be_call(self._held)
        if self._alone and not (end and self._held[end:].strip()):
            if not ended:
                return []
            if (call := self._fence.call(self._held, end)) and (calls := self._only_calls(call)):
                self._held, self._state = "", self._tail
                return calls
        if end:
            self._state = self._text
            return self._show(end)
        if self._fence.has_call:  # at the beginning of what is held
            self._state = self._text if ended else self._state
            return []
        if start := CALL_START.search(self._held, self._fence.inside):
            self._fence.has_call = True
            self._state = self._text if ended else self._state
            return self._show_inside(start.start())
        if ended:
            return []
        return self._show_inside(min(undecided(self._held, CALL_START_BEGUN), self._fence.settled(self._held)))

    def _show_inside(self, size: int) -> list[Output]:
        self._fence.cut(size)
        return self._show(size)

    def _only_calls(self, text: str) -> list[Output]:
        """The calls that a text is; none if anything else stands in it."""
        inner = ToolCallParser(self._tools_given)
        outputs = [*inner.feed(text), *inner.finish(truncated=False)]
        if not inner.calls or any(isinstance(each, str) for each in outputs):
            return []
        self._calls += inner.calls
        return outputs

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
            self._line_begun = self._line_words = self._wrapped = False
            self._last, self._state = "", self._text
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
            self._line_words = bool(line[2].strip("` \t\r")) or (self._line_words and not line[1])
            self._last = text[-1]
            self._silent = self._silent and text.isspace()
        return [text] if text else []

    def _announce(self, name: str, arguments: str = "") -> CallDelta:
        self._calls += 1
        self._silent = False
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
