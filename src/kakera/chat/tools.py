"""Tool calls in the Qwen XML dialect, parsed while they stream.

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

A call is announced once, with index, id and name; after that only pieces of its arguments follow. The pieces of one
call, joined, are a JSON object whose values have the types that the tool declares.

Models of few bits drift, so these are read as well: a call without its first tag, if its function is declared; a call
without its last tags; a value that ends with the call instead of its own tag; and JSON with "name" and "arguments" in
place of the XML. Names that nobody declared stay as they are: the client's error message is what the model learns from.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kakera.chat.json_call import JsonCall, json_call
from kakera.chat.schema_types import declared_types, typed_value
from kakera.errors import RequestRefused
from kakera.text.stops import partial_suffix

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
FUNCTION_HEAD = re.compile(r"<function=([^>\n]+)>")
CALL_END = re.compile(r"\n?</function>\s*</tool_call>")
PARAMETER_HEAD = re.compile(r"<parameter=([^>\n]+)>")
LAST_TAG = re.compile(r"(?:\n?</function>\s*|\n)\Z")
ENDS = (FUNCTION_END, CLOSE, OPEN, FUNCTION)
END_TAGS = (PARAMETER_END, FUNCTION_END, CLOSE)


@dataclass(frozen=True)
class CallDelta:
    """`id` and `name` are set in the first delta of a call and in no other."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Output = str | CallDelta


def select_tools(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> list[dict[str, Any]]:
    """The tools that the model is shown: all, none, or the named one. Raises RequestRefused for a wrong choice, and for
    a name that two of them have."""
    tools = tools or []
    if twice := [name for name, count in Counter(tool["function"]["name"] for tool in tools).items() if count > 1]:
        raise RequestRefused(f"several tools are named {twice[0]!r}; a call could mean any of them", param="tools")
    if choice == "none":
        return []
    if choice in (None, "auto", "required"):
        if choice == "required" and not tools:
            raise RequestRefused("tool_choice is 'required' but no tools are given", param="tool_choice")
        return tools
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        raise RequestRefused(
            "tool_choice must be none, auto, required or {'type': 'function', 'function': {'name': ...}}",
            param="tool_choice",
        )
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise RequestRefused(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return named


class ToolCallParser:
    """Text in, text outside of calls and call deltas out. Tags may be cut anywhere."""

    def __init__(self, tools: list[dict[str, Any]]):
        self._schemas: dict[str, dict[str, Any]] = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }
        self._starts = [OPEN, *(f"{FUNCTION}{name}>" for name in self._schemas)]  # a call may lack its first tag
        self._start = re.compile("|".join(map(re.escape, self._starts)))
        self._held = ""
        self._state: Callable[[], Output | None] = self._text
        self._calls = 0
        self._function = ""
        self._parameters = 0
        self._types: frozenset[str] = frozenset()
        self._value_begun = False
        self.cut = False  # `finish` left a call without its end

    @property
    def calls(self) -> int:
        """Calls announced so far."""
        return self._calls

    def feed(self, text: str) -> list[Output]:
        self._held += text
        outputs: list[Output] = []
        while True:
            before = (self._state, len(self._held))
            output = self._state()
            if output:
                outputs.append(output)
            if (self._state, len(self._held)) == before:
                return outputs

    def finish(self, truncated: bool) -> list[Output]:
        """The stream ended. A call left open is closed into valid JSON unless it was `truncated` by a limit or a stop
        string: whoever ran it would write half a file."""
        held, self._held = self._held, ""
        if self._state == self._text:
            return [held] if held and not (self._calls and held.isspace()) else []
        if self._state == self._head:
            call = None if truncated else json_call(held, self._schemas, ended=True)
            return [self._whole(call)] if isinstance(call, JsonCall) else [OPEN + held]
        if self._state == self._tail:
            return []
        if truncated:
            self.cut = True
            return []
        closing = ""
        if self._state == self._parameter_value:
            closing = self._value(LAST_TAG.sub("", held), last=True)
        return [CallDelta(self._calls - 1, closing + self._end_of_object())]

    # States: each consumes what it can of self._held and says what came of it.

    def _text(self) -> Output | None:
        if start := self._start.search(self._held):
            text, self._held = self._held[: start.start()].rstrip(), self._held[start.start() :].removeprefix(OPEN)
            self._state = self._head
        else:
            tag = self._held.rfind("<")
            undecided = tag >= 0 and any(mark.startswith(self._held[tag:]) for mark in self._starts)
            text = self._held[: tag if undecided else None].rstrip()  # white space before a call belongs to the call
            self._held = self._held[len(text) :]
        return text or None

    def _head(self) -> Output | None:
        seen = self._held.lstrip()
        if match := FUNCTION_HEAD.match(seen):
            self._held = seen[match.end() :]
            return self._announce(match[1].strip())
        if seen.startswith("{"):
            call = json_call(seen, self._schemas)
            if isinstance(call, JsonCall):
                self._held, self._state = seen[call.end :], self._tail
                return self._whole(call)
            waiting = call is None
        else:
            waiting = FUNCTION.startswith(seen[: len(FUNCTION)]) and "\n" not in seen
        if waiting:
            return None
        self._state = self._text  # not this dialect: show it as it is
        return OPEN

    def _whole(self, call: JsonCall) -> CallDelta:
        self._calls += 1
        return CallDelta(self._calls - 1, call.arguments, new_call_id(), call.name)

    def _announce(self, name: str) -> CallDelta:
        self._function, self._parameters = name, 0
        self._calls += 1
        self._state = self._body
        return CallDelta(self._calls - 1, id=new_call_id(), name=name)

    def _body(self) -> Output | None:
        self._held = self._held.lstrip()
        if match := PARAMETER_HEAD.match(self._held):
            self._held = self._held[match.end() :]
            return self._begin_parameter(match[1].strip())
        if self._held.startswith(ENDS):  # the next call ends one that was left open
            self._held = self._held.removeprefix(FUNCTION_END)
            self._state = self._tail
            return CallDelta(self._calls - 1, self._end_of_object())
        if not any(tag.startswith(self._held[: len(tag)]) for tag in (PARAMETER, *ENDS)):
            junk = self._held.find("<", 1)
            self._held = self._held[junk:] if junk > 0 else ""
        return None

    def _begin_parameter(self, key: str) -> CallDelta:
        root = self._schemas.get(self._function, {})
        properties = root.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        self._types = frozenset(["string"]) if schema is None else declared_types(schema, root)
        self._value_begun = False
        self._state = self._parameter_value
        separator = ", " if self._parameters else "{"
        self._parameters += 1
        return CallDelta(self._calls - 1, f"{separator}{json.dumps(key, ensure_ascii=False)}: ")

    def _parameter_value(self) -> Output | None:
        end, call_end = self._held.find(PARAMETER_END), CALL_END.search(self._held)
        if call_end and (end < 0 or call_end.start() < end):
            value, self._held = self._held[: call_end.start()], self._held[call_end.start() :]
            self._state = self._body
            return CallDelta(self._calls - 1, self._value(value, last=True))
        if end >= 0:
            value, self._held = self._held[:end].removesuffix("\n"), self._held[end + len(PARAMETER_END) :]
            self._state = self._body
            return CallDelta(self._calls - 1, self._value(value, last=True))
        if self._types != {"string"}:
            return None  # its type is known only when it is complete
        end = len(self._held) - self._undecided()
        if end == 0 or (not self._value_begun and self._held == "\n"):
            return None
        value, self._held = self._held[:end], self._held[end:]
        return CallDelta(self._calls - 1, self._value(value, last=False))

    def _undecided(self) -> int:
        """Characters at the end of what is held that may turn out to be tags, line break included."""
        tags = (PARAMETER_END, FUNCTION_END)
        size = max(partial_suffix(self._held, tag) for tag in (*tags, *("\n" + tag for tag in tags)))
        at = self._held.rfind(FUNCTION_END)
        if at >= 0 and CLOSE.startswith(self._held[at + len(FUNCTION_END) :].lstrip()):
            size = max(size, len(self._held) - at + self._held[:at].endswith("\n"))
        return size

    def _value(self, text: str, last: bool) -> str:
        """JSON of a value, or of the next piece of a string."""
        first, self._value_begun = not self._value_begun, True
        if first:
            text = text.removeprefix("\n")
        if self._types != {"string"}:
            return json.dumps(typed_value(text, self._types), ensure_ascii=False)
        return ('"' if first else "") + json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if last else "")

    def _end_of_object(self) -> str:
        return "}" if self._parameters else "{}"

    def _tail(self) -> Output | None:
        self._held = self._held.lstrip()
        if self._held.startswith((FUNCTION, OPEN)):
            self._held = self._held.removeprefix(OPEN)
            self._state = self._head
        elif self._held.startswith(CLOSE):
            self._held = self._held[len(CLOSE) :]
        elif self._held and not any(tag.startswith(self._held) for tag in (FUNCTION, OPEN, CLOSE)):
            self._state = self._text
        return None


def new_call_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]
