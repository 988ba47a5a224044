"""Run a suite of prompts through an engine, all at once by continuous batching, and score every answer.

Greedy, thinking off, as the suites mean it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kakera.chat.images import Sight
from kakera.chat.template import ChatTemplate
from kakera.chat.tools import CallDelta, ToolCallParser
from kakera.contract.events import Event, Finished
from kakera.contract.request import Request, Sampling
from kakera.evaluate.data import Case
from kakera.evaluate.scoring import Call, score
from kakera.evaluate.tables import Answer
from kakera.run.engine import LocalEngine
from kakera.run.generate import Completion, generate
from kakera.schedule.limits import pixel_bytes
from kakera.text.tokenizer import Tokenizer

# enough for every right answer of the suites
NEW_TOKENS = {"retrieval": 40, "tools": 200, "json": 200, "vision": 48}


@dataclass(frozen=True)
class Reader:
    """What turns cases into prompts and tokens into answers; `sight`: that of a model which reads images."""

    tokenizer: Tokenizer
    template: ChatTemplate
    stop_tokens: tuple[int, ...]
    sight: Sight | None = None


def run_suite(
    suite: str, cases: Sequence[Case], engine: LocalEngine, reader: Reader, on_done: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Answers in the order of the cases. A prompt that does not fit the context counts as wrong and says so."""
    context = engine.limits.context
    requests, outcome = [], {}
    for case in cases:
        request = _request(case, NEW_TOKENS[suite], reader)
        if len(request.tokens) + request.sampling.max_tokens > context:
            text = f"prompt and answer exceed the context of {context} tokens; raise --context"
            outcome[case["id"]] = _answer(case, len(request.tokens), False, "", text)
            on_done()
        else:
            requests.append(request)

    def tell(event: Event) -> None:
        if isinstance(event, Finished):
            on_done()

    completions: dict[str, Completion] = {}
    for group in _groups(requests, engine.scheduler.limits.pixel_bytes):
        completions |= generate(engine, group, tell)
    lengths = {request.id: len(request.tokens) for request in requests}
    for case in cases:
        if completion := completions.get(case["id"]):
            outcome[case["id"]] = _judge(case, completion, lengths[case["id"]], reader.tokenizer)
    return [outcome[case["id"]] for case in cases]


def _groups(requests: Sequence[Request], most: int) -> Iterator[list[Request]]:
    """All at once, unless their images have more bytes of pixels than may wait."""
    group: list[Request] = []
    held = 0
    for request in requests:
        own = pixel_bytes(request)
        if group and held + own > most:
            yield group
            group, held = [], 0
        group.append(request)
        held += own
    yield group


def split_calls(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[Call]]:
    """The text beside tool calls, and the calls with arguments typed by the declared schemas.

    A call that the token limit cut off is closed where it ends: it still is a call, with what was said of it.
    """
    parser = ToolCallParser(list(tools))
    outputs = [*parser.feed(text), *parser.finish(truncated=False)]
    calls: list[dict[str, str]] = []
    for part in outputs:
        if isinstance(part, CallDelta):
            if part.name is not None:
                calls.append({"name": part.name, "arguments": ""})
            calls[part.index]["arguments"] += part.arguments
    beside = "".join(part for part in outputs if isinstance(part, str))
    return beside, [{"name": call["name"], "arguments": json.loads(call["arguments"] or "{}")} for call in calls]


def _request(case: Case, new_tokens: int, reader: Reader) -> Request:
    tools, variables = case.get("tools"), {"enable_thinking": False}
    prompt = reader.template.prompt(case["messages"], tools, variables, sight=reader.sight)
    sampling = Sampling(max_tokens=new_tokens, seed=0, temperature=0.0, stop_token_ids=reader.stop_tokens)
    return Request(case["id"], prompt.tokens, sampling, prompt.boundaries, images=prompt.images)


def _judge(case: Case, completion: Completion, prompt_tokens: int, tokenizer: Tokenizer) -> Answer:
    finished = completion.finished
    if finished is None or finished.reason == "error":
        return _answer(case, prompt_tokens, False, "", finished.message if finished else "never finished")
    tokens = completion.tokens
    if finished.stop_token is not None and tokens and tokens[-1] == finished.stop_token:
        tokens = tokens[:-1]
    answer = tokenizer.decode(tokens).strip()
    beside, calls = split_calls(answer, case.get("tools") or ())
    return _answer(case, prompt_tokens, score(case, answer, beside, calls), answer)


def _answer(case: Case, prompt_tokens: int, ok: bool, text: str, error: str = "") -> Answer:
    return Answer(case["id"], case["kind"], case.get("size", ""), ok, text, prompt_tokens, error)
