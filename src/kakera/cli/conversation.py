"""One conversation in a terminal: what was said, and an answer as it comes. Who answers is behind `Answerer`."""

from __future__ import annotations

import base64
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.text import Text

from kakera.cli.progress import spinner
from kakera.cli.terminal import visible
from kakera.contract.events import Usage
from kakera.errors import KakeraError

STYLES = {"reasoning": "dim italic", "content": ""}


@dataclass(frozen=True)
class Settings:
    max_tokens: int
    seed: int = 0
    thinking: bool = False
    temperature: float | None = None  # None: what the model recommends


@dataclass(frozen=True)
class Reading:
    """`done` of `total` prompt tokens have been read."""

    done: int
    total: int


@dataclass(frozen=True)
class Piece:
    kind: Literal["reasoning", "content"]
    text: str


@dataclass(frozen=True)
class Ended:
    """`reason`: stop, length or abort."""

    reason: str
    usage: Usage


class Answerer(Protocol):
    def answer(self, messages: Sequence[dict[str, Any]]) -> Generator[Reading | Piece | Ended]:
        """Up to and including Ended. Raises KakeraError when there is no answer, or no rest of it. On Ctrl-C it ends
        with "abort", or raises KeyboardInterrupt where nothing has to be put in order."""
        ...


class Conversation:
    """Messages so far and who answers. `messages` is what the template gets."""

    def __init__(self, answerer: Answerer, console: Console, system: str | None = None):
        self.console, self._answerer = console, answerer
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.images: list[dict[str, Any]] = []  # that go with the next message, as parts of it
        self.restart()

    def restart(self) -> None:
        """Forget all messages but the system message."""
        self.images = []
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def attach(self, path: Path) -> None:
        """Have the file of an image go with the next message. Raises OSError."""
        data = base64.b64encode(path.read_bytes()).decode()
        self.images.append({"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}})

    def turn(self, text: str) -> str:
        """`ask`, with errors shown; "" if there was no answer."""
        answer = ""
        try:
            answer = self.ask(text)
        except KakeraError as error:
            self.console.print(Text(visible(str(error)), style="red"), soft_wrap=True)
        if not answer:
            self.console.print(Text("no answer: the message is forgotten; Up brings it back", style="dim"))
        return answer

    def ask(self, text: str) -> str:
        """Answer one message on the console. Returns the answer without its reasoning. A message without an answer is
        forgotten. Raises KakeraError."""
        images, self.images = self.images, []
        content = [*images, {"type": "text", "text": text}] if images else text
        self.messages.append({"role": "user", "content": content})
        try:
            answer = self._stream()
        except BaseException:
            self.messages.pop()
            raise
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()
        return answer

    def _stream(self) -> str:
        content, last = "", ""  # the kind of what came last
        try:
            with closing(self._answerer.answer(self.messages)) as answer, spinner(self.console, "reading") as status:
                for part in answer:
                    match part:
                        case Reading(done, total):
                            status.update(f"reading {done:,} of {total:,} tokens")
                        case Piece(kind, text):
                            status.stop()
                            content += text if kind == "content" else ""
                            self._show(kind, text if last in ("", kind) else "\n\n" + text)
                            last = kind
                        case Ended(reason, usage):
                            status.stop()
                            self._footer(usage_line(usage, reason), bool(last))
        except KakeraError:
            if last:
                self.console.print()
            raise
        except KeyboardInterrupt:
            self._footer("[interrupted]", bool(last))
        return content

    def _show(self, kind: str, text: str) -> None:
        """Of control characters only line breaks and tabs: a model must not steer the terminal."""
        shown = visible(text, layout="\n\t\r", kinds=("Cc", "Cs"))  # rich leaves \r out
        self.console.print(Text(shown, style=STYLES[kind]), end="", soft_wrap=True)

    def _footer(self, line: str, begun: bool) -> None:
        if begun:
            self.console.print()
        self.console.print(Text(line, style="dim"), soft_wrap=True)


def usage_line(usage: Usage, reason: str) -> str:
    """What a turn cost: reuse, time to the first token, decode speed, and why it ended if not by itself."""
    parts = []
    if usage.prompt_tokens:
        why = f" ({usage.miss_reason})" if usage.miss_reason and not usage.cached_tokens else ""
        parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached{why}")
    if usage.completion_tokens:
        parts.append(f"first token after {usage.prefill_seconds + usage.queue_seconds:.2f} s")
    if usage.completion_tokens > 1 and usage.decode_seconds > 0:
        speed = (usage.completion_tokens - 1) / usage.decode_seconds  # the first token belongs to the prefill
        parts.append(f"{usage.completion_tokens} tokens at {speed:.1f} tok/s")
    endings = {"length": "stopped at --max-tokens or the end of the context", "abort": "interrupted"}
    return "[" + ", ".join(parts + ([endings[reason]] if reason in endings else [])) + "]"
