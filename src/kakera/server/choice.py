"""One choice's way from tokens to what is shown: whole characters, reasoning, stop strings, tool calls, stray tags.

The server's dialects and the terminal's chat go this way alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kakera.chat.stray import StrayCloses
from kakera.chat.tags import END_TAGS
from kakera.chat.thinking import ThinkSplitter
from kakera.chat.tools import CallDelta, ToolCallParser
from kakera.contract.events import Finished, Progress, TokenLogprob, Tokens, Usage
from kakera.contract.images import ImageSpan
from kakera.contract.request import Boundary, Request, Sampling
from kakera.text.detokenize import Detokenizer
from kakera.text.stops import StopMatcher
from kakera.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatOutput:
    """How a chat's answer is to be taken apart. `stop_in_thinking`: stop strings act on the reasoning as well."""

    opens_thinking: bool
    tools: tuple[dict[str, Any], ...] = ()
    stop_in_thinking: bool = False


@dataclass(frozen=True)
class Job:
    """One completion of `choices` choices. `chat` is None for plain text completions."""

    id: str
    tokens: Sequence[int]
    sampling: Sampling
    boundaries: tuple[Boundary, ...] = ()
    choices: int = 1
    stops: tuple[str, ...] = ()
    chat: ChatOutput | None = None
    cache: bool = True  # whether the prefix cache may have to do with it
    progress: bool = False  # whether Deltas tell how far the prompt is read
    client: str = ""  # who asks, as Request.client
    salt: bytes = b""  # as Request.salt; what the request says, until it is generated
    background: bool = False  # as Request.background
    images: tuple[ImageSpan, ...] = ()

    def request(self, choice: int) -> Request:
        name = f"{self.id}-{choice}" if self.choices > 1 else self.id
        sampling = replace(self.sampling, choice=choice)
        return Request(
            name,
            self.tokens,
            sampling,
            self.boundaries,
            self.salt,
            self.cache,
            self.client,
            self.background,
            self.images,
        )


@dataclass(frozen=True)
class Delta:
    """What one step added to one choice. `finish` is set in the last delta of a choice."""

    choice: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None  # stop | length | tool_calls
    stop: str | None = None  # the stop string that ended the choice
    reasoning_tokens: int = 0  # of the whole choice, with its last delta
    usage: Usage | None = None
    progress: Progress | None = None

    @property
    def empty(self) -> bool:
        shown = self.text or self.reasoning or self.calls or self.logprobs or self.prompt_logprobs
        return not (shown or self.finish or self.progress)


class ChoiceText:
    """One choice's way from tokens to Deltas: whole characters, reasoning, stop strings, tool calls."""

    def __init__(self, job: Job, choice: int, tokenizer: Tokenizer):
        self._choice = choice
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(job.stops)
        self._min_tokens = job.sampling.min_tokens
        self._silent = frozenset(job.sampling.stop_token_ids)
        self._thinking = ThinkSplitter(job.chat.opens_thinking, calls=bool(job.chat.tools)) if job.chat else None
        self._calls = ToolCallParser(list(job.chat.tools)) if job.chat and job.chat.tools else None
        formed = job.sampling.constraint is not None and job.sampling.constraint.required  # then no tag is out of place
        self._strays = StrayCloses(expected=not job.chat.opens_thinking) if job.chat and not formed else None
        self._stop_everywhere = job.chat is None or job.chat.stop_in_thinking
        self._budget = job.sampling.thinking.tokens if job.sampling.thinking else None
        self._pending: deque[tuple[int, TokenLogprob]] = deque()  # (characters before the token, its logprob)
        self._decoded = 0  # characters that came out of the detokenizer
        self._passed = 0  # characters that passed the stop strings
        self._count = 0
        self._reasoning_tokens = 0  # that began within the reasoning

    @property
    def stopped(self) -> bool:
        return self._stops.matched is not None

    @property
    def _stopped_by_words(self) -> bool:
        """By a stop string that is not the end of a call anyway."""
        return self._stops.matched is not None and self._stops.matched.strip() not in END_TAGS

    def feed(self, event: Tokens) -> Delta:
        if self.stopped:
            return Delta(self._choice)
        reasoning, content = "", ""
        for i, token in enumerate(event.tokens):
            self._count += 1
            self._reasoning_tokens += self._thinking is not None and self._thinking.reasoning
            if token in self._silent and self._count > self._min_tokens:
                continue  # it ended the answer and is no part of it
            if event.logprobs:
                self._pending.append((self._decoded, event.logprobs[i]))
            text = self._detokenizer.feed(token)
            self._decoded += len(text)
            more = self._split(text, last=False)
            reasoning, content = reasoning + more[0], content + more[1]
            if self.stopped:
                break
        return self._delta(reasoning, content, last=False)

    def finish(self, event: Finished) -> Delta:
        """The choice's last delta, also of one that was cut off."""
        tail = "" if self.stopped else self._detokenizer.finish()
        self._decoded += len(tail)
        reasoning, content = self._split(tail, last=True)
        limited = event.reason == "length" and not self.stopped
        delta = self._delta(reasoning, content, last=True, truncated=limited or self._stopped_by_words)
        called = self._calls is not None and self._calls.calls > 0 and not self._calls.cut
        reason = "length" if limited else "tool_calls" if called else "stop"
        return replace(
            delta,
            finish=reason,
            stop=self._stops.matched,
            reasoning_tokens=self._reasoning_tokens,
            usage=self._up_to_stop(event.usage),
        )

    def _up_to_stop(self, usage: Usage) -> Usage:
        """What was generated behind the token that completes a stop string is nobody's."""
        if not self.stopped:
            return usage
        count = min(usage.completion_tokens, self._count)
        return replace(usage, completion_tokens=count, accepted_tokens=min(usage.accepted_tokens, count))

    def _split(self, text: str, last: bool) -> tuple[str, str]:
        """What the text adds to reasoning and content, up to a stop string."""
        if self._stop_everywhere:
            text = self._until_stop(text, last)
        if self._thinking is None:
            return "", text
        inside = self._thinking.reasoning
        parts = self._thinking.feed(text) + (self._thinking.finish() if last else [])
        if inside and not self._thinking.reasoning and self._strays is not None:
            forced = self._budget is not None and self._count > self._budget
            self._strays.expected = forced or self._thinking.unclosed
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        content = "".join(part.text for part in parts if part.kind == "content")
        return reasoning, content if self._stop_everywhere else self._until_stop(content, last)

    def _until_stop(self, text: str, last: bool) -> str:
        """The text that may be shown of it; `_passed` moves to where that ends."""
        if self.stopped:
            return ""
        if self._count <= self._min_tokens and not last:
            self._passed = self._decoded
            return text
        before = len(self._stops.held) + len(text)
        shown = self._stops.feed(text) + (self._stops.finish() if last else "")
        self._passed = self._decoded - (before - len(shown))
        return shown

    def _delta(self, reasoning: str, content: str, last: bool, truncated: bool = False) -> Delta:
        logprobs = self._released(last)
        outputs: list[str | CallDelta] = [content]
        if self._calls is not None:
            outputs = self._calls.feed(content) + (self._calls.finish(truncated) if last else [])
        text = self._without_strays(outputs, last)
        calls = tuple(o for o in outputs if isinstance(o, CallDelta))
        return Delta(self._choice, text, reasoning, calls, logprobs)

    def _without_strays(self, outputs: list[str | CallDelta], last: bool) -> str:
        if self._strays is None:
            return "".join(o for o in outputs if isinstance(o, str))
        text = "".join(self._strays.feed(o) if isinstance(o, str) else self._strays.flush() for o in outputs)
        return text + self._strays.flush() if last else text

    def _released(self, last: bool) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of tokens whose text has begun to show; those behind a stop string never do."""
        released = []
        while self._pending and (self._pending[0][0] < self._passed or (last and not self.stopped)):
            released.append(self._pending.popleft()[1])
        return tuple(released)
