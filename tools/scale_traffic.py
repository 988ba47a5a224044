"""Conversations that several clients hold at once, and what each answer was like from outside."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from kakera.bench.text import Prose

CHAT = "/v1/chat/completions"
ANSWER_TOKENS = 8


@dataclass(frozen=True)
class Reply:
    """One streamed answer. Times in seconds of one clock; `fault` is empty if it ended as it should."""

    id: str
    text: str
    prompt: int
    cached: int
    sent: float
    first: float
    ended: float
    fault: str

    @property
    def ttft(self) -> float:
        return self.first - self.sent


@dataclass
class Conversation:
    """Every turn sends all of it, as clients do. `replies`: one a turn."""

    name: str
    messages: list[dict[str, str]]
    replies: list[Reply] = field(default_factory=list)

    def copy(self) -> Conversation:
        """The same, before its first turn."""
        return Conversation(self.name, [self.messages[0]])


class Crowd:
    """Clients of the server or router at `url`. `sessions`: they say which conversation a request belongs to."""

    def __init__(self, url: str, sessions: bool = True):
        self._http = httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))
        self._sessions = sessions

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def post(self, path: str) -> None:
        (await self._http.post(path)).raise_for_status()

    async def ask(
        self,
        messages: Sequence[dict[str, str]],
        session: str,
        tokens: int = ANSWER_TOKENS,
        on_text: Callable[[], None] = lambda: None,
    ) -> Reply:
        """A greedy answer of so many tokens. Never raises for what a server or router does."""
        body = {
            "model": "model",
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": False},
        }
        heard = _Heard(on_text)
        sent = time.perf_counter()
        try:
            headers = {"x-session-id": session} if self._sessions else {}
            async with self._http.stream("POST", CHAT, json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    heard.fault = f"HTTP {answer.status_code}: {(await answer.aread()).decode()[:200]}"
                else:
                    async for line in answer.aiter_lines():
                        heard.line(line)
        except httpx.HTTPError as error:
            heard.fault = type(error).__name__
        return heard.reply(sent)

    async def turn(self, conversation: Conversation, said: str) -> Reply:
        """One more turn; a failed one is taken back."""
        conversation.messages.append({"role": "user", "content": said})
        reply = await self.ask(conversation.messages, conversation.name)
        conversation.replies.append(reply)
        if reply.fault:
            conversation.messages.pop()
        else:
            conversation.messages.append({"role": "assistant", "content": reply.text})
        return reply

    async def converse(
        self, conversations: Sequence[Conversation], said: Sequence[Sequence[str]], at_once: int, seed: int
    ) -> None:
        """`said[i]`: what conversation i says, a message a turn. Which one goes on next is drawn, in the same order for
        the same seed as long as answers take the same time."""
        rng, idle, left = random.Random(seed), list(range(len(conversations))), [list(turns) for turns in said]

        async def client() -> None:
            while idle:
                number = idle.pop(rng.randrange(len(idle)))
                await self.turn(conversations[number], left[number].pop(0))
                if left[number]:
                    idle.append(number)

        await asyncio.gather(*(client() for _ in range(at_once)))


class _Heard:
    """A stream while it comes."""

    def __init__(self, on_text: Callable[[], None]):
        self.fault = "ended early"  # until [DONE]
        self._on_text = on_text
        self._id, self._text, self._first = "", "", 0.0
        self._usage: dict[str, Any] = {}

    def line(self, line: str) -> None:
        if line == "data: [DONE]":
            self.fault = "" if self.fault == "ended early" else self.fault
        if not line.startswith("data: {"):
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.fault = f"error: {event['error']}"
        self._id = event.get("id") or self._id
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", []):
            if text := choice["delta"].get("content"):
                self._first = self._first or time.perf_counter()
                self._text += text
                self._on_text()

    def reply(self, sent: float) -> Reply:
        now = time.perf_counter()
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        prompt = self._usage.get("prompt_tokens", 0)
        return Reply(self._id, self._text, prompt, cached, sent, self._first or now, now, self.fault)


def conversations_of(prose: Prose, count: int, turns: int, system: int, tokens: int) -> tuple[Any, list[list[str]]]:
    """Conversations that begin with the same `system` tokens, and what each says: `turns` messages of `tokens`."""
    common = {"role": "system", "content": prose.take(system)}
    said = [[prose.take(tokens) for _ in range(turns)] for _ in range(count)]
    return [Conversation(f"conversation-{number}", [common]) for number in range(count)], said
