"""One conversation with an engine in this process: prompt, stream, stop on Ctrl-C, remember."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import Event as Flag
from typing import Any

from rich.console import Console
from rich.text import Text

from kakera.chat.thinking import ThinkSplitter
from kakera.contract.events import Finished, Progress, Tokens, Usage
from kakera.contract.request import Request, Sampling
from kakera.errors import RequestRefused, UsageError
from kakera.run.interface import Engine
from kakera.server.model import ServedModel
from kakera.text.detokenize import Detokenizer

STYLES = {"reasoning": "dim italic", "content": ""}


@dataclass(frozen=True)
class Settings:
    max_tokens: int
    seed: int = 0
    thinking: bool = False
    temperature: float | None = None  # None: what the model recommends


class Conversation:
    """Messages so far and the engine that answers. `messages` is what the template gets."""

    def __init__(
        self, engine: Engine, model: ServedModel, settings: Settings, console: Console, system: str | None = None
    ):
        if model.template is None:
            raise UsageError(f"{model.name} has no chat template: it is a base model and can not chat")
        self.engine, self.model, self.settings, self.console = engine, model, settings, console
        self._template = model.template
        self._ids = count()
        self._system = system
        self.messages: list[dict[str, Any]] = []
        self.restart(system)

    def restart(self, system: str | None = None) -> None:
        """Forget the messages; a new system message replaces the old one."""
        self._system = system if system is not None else self._system
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def turn(self, text: str) -> str:
        """Answer one message on the console. Returns the answer; a refused message is forgotten."""
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._template.prompt(self.messages, variables={"enable_thinking": self.settings.thinking})
            request = Request(f"chat-{next(self._ids)}", prompt.tokens, self._sampling(), prompt.boundaries)
            self.engine.submit(request)
        except RequestRefused as refusal:
            self.messages.pop()
            self.console.print(Text(str(refusal), style="red"), soft_wrap=True)
            return ""
        answer = self._stream(request.id, ThinkSplitter(inside=prompt.opens_thinking))
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def _sampling(self) -> Sampling:
        defaults, wish = self.model.defaults, self.settings.temperature
        return Sampling(
            max_tokens=self.settings.max_tokens,
            seed=self.settings.seed,
            temperature=defaults.temperature if wish is None else wish,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            stop_token_ids=self.model.eos,
        )

    def _stream(self, request_id: str, splitter: ThinkSplitter) -> str:
        """Print what comes until the request has ended; returns the content without the reasoning."""
        decoder, content = Detokenizer(self.model.tokenizer), ""
        with _interrupt() as interrupted, self.console.status("reading") as status:
            while True:
                if interrupted.is_set():
                    self.engine.abort(request_id)
                for event in self.engine.step():
                    match event:
                        case Progress(_, done, total):
                            status.update(f"reading {done} of {total} tokens")
                        case Tokens(_, tokens, _):
                            status.stop()
                            text = "".join(decoder.feed(t) for t in tokens if t not in self.model.eos)
                            content += self._show(splitter, text)
                        case Finished() as finished:
                            status.stop()
                            content += self._show(splitter, decoder.finish(), last=True)
                            self._footer(finished)
                            return content

    def _show(self, splitter: ThinkSplitter, text: str, last: bool = False) -> str:
        parts = splitter.feed(text) + (splitter.finish() if last else [])
        for part in parts:
            self.console.print(Text(part.text, style=STYLES[part.kind]), end="", soft_wrap=True)
        return "".join(part.text for part in parts if part.kind == "content")

    def _footer(self, finished: Finished) -> None:
        self.console.print()
        if finished.reason == "error":
            self.console.print(Text(finished.message, style="red"), soft_wrap=True)
            return
        self.console.print(Text(usage_line(finished.usage, finished.reason), style="dim"), soft_wrap=True)


def usage_line(usage: Usage, reason: str) -> str:
    """What a turn cost: reuse, time to the first token, decode speed, and why it ended if not by itself."""
    why = f" ({usage.miss_reason})" if usage.miss_reason and not usage.cached_tokens else ""
    parts = [f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached{why}"]
    parts.append(f"first token after {usage.prefill_seconds + usage.queue_seconds:.2f} s")
    if usage.completion_tokens > 1 and usage.decode_seconds > 0:
        speed = (usage.completion_tokens - 1) / usage.decode_seconds  # the first token belongs to the prefill
        parts.append(f"{usage.completion_tokens} tokens at {speed:.1f} tok/s")
    endings = {"length": "stopped at --max-tokens or the end of the context", "abort": "interrupted"}
    return "[" + ", ".join(parts + ([endings[reason]] if reason in endings else [])) + "]"


@contextmanager
def _interrupt() -> Iterator[Flag]:
    """Ctrl-C sets the flag instead of tearing a step apart: the engine must commit what it planned."""
    flag = Flag()
    before = signal.signal(signal.SIGINT, lambda *_: flag.set())
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
