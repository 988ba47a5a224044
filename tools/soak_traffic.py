"""Random requests for a soak: what each worker sends next, decided by a seed and by the answers it got."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kakera.bench.text import Prose

CHAT, COMPLETIONS, MESSAGES, RESPONSES = PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
SHARED_TEXTS = 3
QUESTIONS = ("What is the text about?", "Who is named in it?", "Go on.", "Say it in one sentence.", "And then?")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
FORMS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
    {"guided_regex": "[a-z]{3,12}(, [a-z]{3,12}){0,4}"},
    {"guided_choice": ["yes", "no", "perhaps"]},
)
ABORT_SHARE = 0.2
ABORT_SECONDS = 3.0  # from before the first token to the middle of a longer answer

Kind = Literal["fresh", "shared", "turn", "form", "bad", "canary"]
KINDS: dict[Kind, int] = {"fresh": 5, "shared": 5, "turn": 6, "form": 3, "bad": 2, "canary": 1}


@dataclass(frozen=True)
class Shot:
    """One request. `leave_after`: seconds until the client hangs up, or None. A canary has no body of its own."""

    kind: Kind
    path: str = COMPLETIONS
    body: Any = None
    leave_after: float | None = None

    @property
    def stream(self) -> bool:
        return bool(isinstance(self.body, dict) and self.body.get("stream"))


class Traffic:
    """One worker's requests: the same for the same seed, worker and answers, whatever the other workers do.

    `context` in tokens; prompts stay below 0.6 of it.
    """

    def __init__(self, prose: Prose, context: int, seed: int, worker: int):
        self._prose, self._context = prose, context
        self._random = random.Random(seed * 10_000 + worker)
        common = random.Random(seed)  # the same texts for all workers
        self._shared = [self._slice(common, context * 0.3) for _ in range(SHARED_TEXTS)]
        self._conversation: list[dict[str, str]] = []

    def shots(self) -> Iterator[Shot]:
        """Without end; the first is a canary."""
        yield Shot("canary")
        while True:
            kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
            yield self._shot(kind)

    def answered(self, text: str) -> None:
        """The last conversation got this answer: a later turn may build on it."""
        self._conversation.append({"role": "assistant", "content": text or "..."})

    def _shot(self, kind: Kind) -> Shot:
        if kind == "canary":
            return Shot(kind)
        if kind == "bad":
            return Shot(kind, *self._random.choice(bad_requests(self._prose, self._context)))
        messages = self._messages(kind)
        path = self._random.choice((CHAT, COMPLETIONS) if kind == "form" else PATHS)
        body = self._body(path, messages)
        if kind == "form":
            body |= self._random.choice(FORMS)
        self._conversation = messages
        leave = self._random.uniform(0, ABORT_SECONDS) if self._random.random() < ABORT_SHARE else None
        return Shot(kind, path, body, leave)

    def _messages(self, kind: Kind) -> list[dict[str, str]]:
        question = {"role": "user", "content": self._random.choice(QUESTIONS)}
        if kind == "turn" and self._conversation and self._conversation[-1]["role"] == "assistant":
            said = sum(len(message["content"]) for message in self._conversation)
            if said < 0.5 * self._context * self._prose.chars_per_token:
                return [*self._conversation, question]
        if kind == "shared":
            text = self._random.choice(self._shared)
        else:
            text = self._slice(self._random, self._random.uniform(8, 0.5 * self._context))
        return [{"role": "user", "content": f"{text}\n\n{question['content']}"}]

    def _slice(self, source: random.Random, tokens: float) -> str:
        start = source.randrange(len(self._prose.text) // 2)
        return self._prose.text[start : start + int(tokens * self._prose.chars_per_token)]

    def _body(self, path: str, messages: list[dict[str, str]]) -> dict[str, Any]:
        pick = self._random
        body: dict[str, Any] = {"stream": pick.random() < 0.6, "temperature": pick.choice((0, 0.7, 1.0))}
        room = pick.choice((1, 8, 24, 24, self._context // 8))
        if path == COMPLETIONS:
            body |= {"prompt": "\n\n".join(message["content"] for message in messages), "max_tokens": room}
        elif path == RESPONSES:
            return body | {"input": messages, "max_output_tokens": room}
        else:
            body |= {"messages": messages, "max_tokens": room}
        if path == MESSAGES:
            return body
        body["seed"] = pick.randrange(2**31)
        if path == CHAT:
            body["chat_template_kwargs"] = {"enable_thinking": pick.random() < 0.3}
        if (extra := pick.random()) < 0.1:
            body["n"] = 2
        elif extra < 0.2:
            body["stop"] = [". ", "\n"]
        elif extra < 0.4:  # half of these outgrow the pages that they began with, which in a full pool somebody loses
            body |= {"ignore_eos": True, "max_tokens": pick.choice((room, self._context // 3))}
        return body


def bad_requests(prose: Prose, context: int) -> list[tuple[str, Any]]:
    """Requests that a sound server refuses with a 4xx."""
    hello = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    return [
        (CHAT, {**hello, "temperature": 9}),
        (CHAT, {**hello, "model": "no-such-model"}),
        (CHAT, {**hello, "max_tokens": -1}),
        (CHAT, {**hello, "messages": [{"role": "robot", "content": "hello"}]}),
        (CHAT, {**hello, "guided_regex": "(", "stream": True}),
        (CHAT, {**hello, "response_format": {"type": "grammar", "grammar": "root ::= ("}}),
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt": "hello", "n": 99}),
        (COMPLETIONS, {"prompt": prose.text[: int(3 * context * prose.chars_per_token)], "stream": True}),
        (MESSAGES, {"messages": hello["messages"]}),
        (RESPONSES, {"input": "hello", "previous_response_id": "resp_1"}),
        (RESPONSES, ["hello"]),
        ("/v1/nothing", {}),
    ]


@dataclass(frozen=True)
class Answer:
    """What came back: `fault` in words if a 200 was not what it should be; `text` of the first choice."""

    text: str
    fault: str | None = None


def read_answer(shot: Shot, body: str) -> Answer:
    """The body of a 200, whole or a stream of events, which must end as its dialect says and carry no error."""
    if not shot.stream:
        return Answer(_whole_text(shot.path, json.loads(body)))
    data = [line.removeprefix("data:").strip() for line in body.splitlines() if line.startswith("data:")]
    events = [json.loads(line) for line in data if line != "[DONE]"]
    for event in events:
        if event.get("error") or event.get("type") in ("error", "response.failed"):
            return Answer("", f"an error in the stream: {json.dumps(event)[:300]}")
    if shot.path in (CHAT, COMPLETIONS):
        ended = bool(data) and data[-1] == "[DONE]"
    else:
        last = events[-1].get("type") if events else None
        ended = last in ("message_stop", "response.completed", "response.incomplete")
    text = "".join(_delta_text(event) for event in events)
    return Answer(text, None if ended else f"the stream ended early, with {data[-1][:200] if data else 'nothing'}")


def _whole_text(path: str, answer: dict[str, Any]) -> str:
    if path == CHAT:
        return answer["choices"][0]["message"]["content"] or ""
    if path == COMPLETIONS:
        return str(answer["choices"][0]["text"])
    if path == MESSAGES:
        return "".join(block.get("text", "") for block in answer["content"])
    parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part.get("text", "") for part in parts)


def _delta_text(event: dict[str, Any]) -> str:
    """Text of one event in any of the four dialects."""
    if "choices" in event:
        first = [choice for choice in event["choices"] if choice["index"] == 0]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in first)
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"].get("text", ""))
    return ""
