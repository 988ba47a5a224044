"""An answer as a row of blocks: what the agents' dialects make of Deltas.

Chat completions sends fields side by side. Messages and Responses send one block after another, each opened, grown
and closed: reasoning, text, a call.
"""

from __future__ import annotations

from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from kakera.server.choice import Delta
from kakera.server.generate import Generation

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """`text` is what came of it so far; a call's text is its arguments as JSON. `id` and `name` belong to calls."""

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    text: str = ""


@dataclass(frozen=True)
class Step:
    """Something that happened to a block. `text` is the piece that a "grow" added."""

    what: Literal["open", "grow", "close"]
    block: Block
    text: str = ""


@dataclass
class Answer:
    """The blocks of one choice, and its last delta once it came."""

    blocks: list[Block] = field(default_factory=list)
    last: Delta | None = None
    _open: Block | None = None

    def feed(self, delta: Delta) -> list[Step]:
        steps: list[Step] = []
        calls = deque(delta.calls)
        while calls and calls[0].id is None:  # pieces of the open call come before the text behind it
            steps += self._grow("call", calls.popleft().arguments)
        steps += self._grow("reasoning", delta.reasoning)
        steps += self._grow("text", delta.text)
        for call in calls:
            if call.id is not None:
                steps += self._begin("call", call.id, call.name or "")
            steps += self._grow("call", call.arguments)
        if delta.finish:
            self.last = delta
            steps += self._close()
        return steps

    def _grow(self, kind: Kind, text: str) -> list[Step]:
        if not text:
            return []
        steps = self._begin(kind) if self._open is None or self._open.kind != kind else []
        block = self.blocks[-1]
        block.text += text
        return [*steps, Step("grow", block, text)]

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> list[Step]:
        steps = self._close()
        self._open = Block(len(self.blocks), kind, call_id, name)
        self.blocks.append(self._open)
        return [*steps, Step("open", self._open)]

    def _close(self) -> list[Step]:
        block, self._open = self._open, None
        return [Step("close", block)] if block else []


async def gather(generation: Generation) -> Answer:
    """The whole answer of a generation with one choice."""
    answer = Answer()
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            answer.feed(delta)
    return answer
