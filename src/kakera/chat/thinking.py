"""Reasoning apart from content: the switch that a request carries, and the splitter of streamed text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kakera.errors import RequestRefused
from kakera.text.stops import partial_suffix

OPEN, CLOSE, CALL = "<think>", "</think>", "<tool_call>"
# The tag alone may be the model musing about its tools; with a function behind it, it is a call.
CALL_HEAD = re.compile(r'<tool_call>\s*(?:<function=|\{\s*"name")')
CALL_FUNCTION, CALL_JSON = "<function=", '{"name"'

Kind = Literal["reasoning", "content"]


@dataclass(frozen=True)
class Part:
    kind: Kind
    text: str


# Reasoning tokens that an effort stands for; None is no limit. Twice the effort is four times the tokens.
EFFORTS: dict[str, int | None] = {
    "none": 0, "minimal": 256, "low": 1024, "medium": 4096, "high": 16384, "xhigh": None, "max": None,
}  # fmt: skip

LARGEST_BUDGET = 2**31 - 1  # it travels to the engine as a machine integer


def thinking_budget(wish: int | None, template_kwargs: dict[str, Any], effort: str | None) -> int | None:
    """Tokens that the reasoning may take; None is no limit. A number wins over an effort.

    Raises RequestRefused for a budget among the template's variables that is no number of tokens.
    """
    if wish is None:
        wish = template_kwargs.get("thinking_budget")
    if wish is None:
        return EFFORTS[effort] if effort is not None else None
    if isinstance(wish, bool) or not isinstance(wish, int) or not 0 <= wish <= LARGEST_BUDGET:
        raise RequestRefused(
            f"thinking_budget is {wish!r}; give a number of tokens, at most {LARGEST_BUDGET}",
            param="chat_template_kwargs.thinking_budget",
        )
    return wish


def thinking_switch(
    template_kwargs: dict[str, Any], reasoning_effort: str | None, budget: int | None = None
) -> dict[str, Any]:
    """The template's variables with `enable_thinking` as a real boolean, if the request says anything about it.

    Clients send false, "false", reasoning_effort "none" and a thinking budget of 0; a template only understands the
    first.
    """
    variables = dict(template_kwargs)
    wish = variables.get("enable_thinking")
    if isinstance(wish, str):
        variables["enable_thinking"] = wish.strip().lower() not in ("false", "0", "no", "off", "none")
    elif wish is None:
        variables.pop("enable_thinking", None)
    if reasoning_effort is not None:
        variables.setdefault("reasoning_effort", reasoning_effort)
        if reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    if (variables.get("thinking_budget") if budget is None else budget) == 0:
        variables.setdefault("enable_thinking", False)
    return variables


class ThinkSplitter:
    """Splits streamed text at `</think>`; with `calls`, a tool call inside an unclosed `<think>` ends it as well.

    White space around the tags belongs to neither side.
    """

    def __init__(self, inside: bool, calls: bool = False):
        self._state: Callable[[], str | None] = self._opened if inside else self._start
        self._calls = calls
        self._held = ""
        self._shown_reasoning = False
        self.unclosed = False  # a call has ended the reasoning, whose tag may follow

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        before: Callable[[], str | None] | None = None
        while self._held and self._state != before:
            before = self._state
            if shown := before():
                parts.append(Part("reasoning" if before == self._inside else "content", shown))
        return parts

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self.reasoning:
            return [Part("reasoning", held.rstrip())] if held.strip() else []
        return [Part("content", held)] if held and self._state != self._after else []

    @property
    def reasoning(self) -> bool:
        """Whether the stream is inside reasoning now."""
        return self._state in (self._opened, self._inside)

    # States: each takes what it can of self._held and returns what may be shown.

    def _start(self) -> str | None:
        seen = self._held.lstrip()
        if seen.startswith(OPEN):
            self._state, self._held = self._inside, seen[len(OPEN) :]
        elif seen and not OPEN.startswith(seen):
            self._state = self._content
        return None

    def _opened(self) -> str | None:
        seen = self._held.lstrip()
        if seen.startswith(OPEN):  # the prompt opened it and the model did so again
            self._state, self._held = self._inside, seen[len(OPEN) :]
        elif seen and not OPEN.startswith(seen):
            self._state = self._inside
        return None

    def _inside(self) -> str | None:
        if not self._shown_reasoning:
            self._held = self._held.lstrip()
        close = self._held.find(CLOSE)
        call = CALL_HEAD.search(self._held) if self._calls else None
        if call and (close < 0 or call.start() < close):
            reasoning, self._held = self._held[: call.start()], self._held[call.start() :]
            self._state, self.unclosed = self._after, True
            return reasoning.rstrip()
        if close >= 0:
            reasoning, self._held = self._held[:close], self._held[close + len(CLOSE) :]
            self._state = self._after
            return reasoning.rstrip()
        shown = self._held[: self._safe_reasoning()].rstrip()
        self._held = self._held[len(shown) :]
        self._shown_reasoning = self._shown_reasoning or bool(shown)
        return shown

    def _safe_reasoning(self) -> int:
        safe = len(self._held) - partial_suffix(self._held, CLOSE)
        if self._calls:
            safe = min(safe, len(self._held) - partial_suffix(self._held, CALL))
            tag = self._held.rfind(CALL)
            if tag >= 0:
                behind = self._held[tag + len(CALL) :].lstrip()
                if CALL_FUNCTION.startswith(behind) or CALL_JSON.startswith("".join(behind.split())):
                    safe = min(safe, tag)
        return safe

    def _after(self) -> str | None:
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._content
        return None

    def _content(self) -> str | None:
        text, self._held = self._held, ""
        return text
