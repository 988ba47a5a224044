"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kakera.contract.events import Usage
from kakera.server.agents.blocks import Answer, Block, Step, gather
from kakera.server.agents.translate import dialect_job, dialect_prompt, names_of
from kakera.server.anthropic.answers import MessageAnswer, TokenCount
from kakera.server.anthropic.input import NAMES, messages_chat
from kakera.server.anthropic.schema import CountBody, MessagesBody
from kakera.server.choice import Delta
from kakera.server.generate import Generation
from kakera.server.http.body import JsonRoute
from kakera.server.http.errors import ANTHROPIC_ROUTE, anthropic_body, describe
from kakera.server.http.openapi import ANTHROPIC_ERRORS, streams
from kakera.server.http.sse import Reply, answer, event, unless_disconnected
from kakera.server.service import Service

# Clients throw thinking without a signature away, and with it the prefix that the next turn could reuse.
SIGNATURE = "kakera"


def messages_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, responses=ANTHROPIC_ERRORS)

    @router.post(
        ANTHROPIC_ROUTE, responses=streams(MessageAnswer, "Anthropic's events, `message_start` to `message_stop`")
    )
    async def messages(body: MessagesBody, request: Request) -> Response:
        service.check(body)
        return await answer(request, service.arrives(messages_reply(body, service, request)), body.stream)

    @router.post(f"{ANTHROPIC_ROUTE}/count_tokens")
    async def count_tokens(body: CountBody, request: Request) -> TokenCount:
        service.check(body)
        return {"input_tokens": await unless_disconnected(request, count(body, service))}

    return router


async def messages_reply(body: MessagesBody, service: Service, request: Request) -> MessagesReply:
    chat = await service.intake.run(lambda watch: messages_chat(body, service.model.sees))
    job = await dialect_job(chat, service, "msg", names_of(body, NAMES))
    cut = job.sampling.max_tokens < body.max_tokens
    # Agents drop the thinking of answers by another model than they asked for, so an alias is kept.
    return MessagesReply(service.generation(job, request), body.model or service.model.name, cut)


async def count(body: CountBody, service: Service) -> int:
    chat = await service.intake.run(lambda watch: messages_chat(body, service.model.sees))
    return len((await dialect_prompt(chat, service)).tokens)


class MessagesReply(Reply):
    """A generation as a message, whole or in events. `cut`: the context leaves less room than was asked for."""

    def __init__(self, generation: Generation, model: str, cut: bool):
        self._generation = generation
        self._model = model
        self._cut = cut

    async def whole(self) -> dict[str, Any]:
        answer = await gather(self._generation)
        blocks = [shown for block in answer.blocks if (shown := content_block(block)) is not None]
        message = self._message(self._generation.usage, self._generation.reasoning_tokens)
        return {**message, "content": blocks, **self._stop(answer.last)}

    def still_works(self) -> str:
        return event({"type": "ping"}, "ping")

    async def stream(self) -> AsyncGenerator[str]:
        answer = Answer()
        started = False
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if not started:
                    started = True
                    message = self._message(Usage(len(self._generation.job.tokens), 0, 0), 0)
                    yield named({"type": "message_start", "message": message})
                for step in answer.feed(delta):
                    for payload in block_events(step):
                        yield named(payload)
        usage = usage_object(self._generation.usage, self._generation.reasoning_tokens)
        yield named({"type": "message_delta", "delta": self._stop(answer.last), "usage": usage})
        yield named({"type": "message_stop"})

    def failed(self, error: Exception) -> str:
        status, body = describe(error)
        return named(anthropic_body(body, status))

    def _message(self, usage: Usage, thinking: int) -> dict[str, Any]:
        return {
            "id": self._generation.job.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_object(usage, thinking),
        }

    def _stop(self, last: Delta | None) -> dict[str, Any]:
        finish, stop = (last.finish, last.stop) if last else (None, None)
        if finish == "length":
            reason = "model_context_window_exceeded" if self._cut else "max_tokens"
        elif finish == "tool_calls":
            reason, stop = "tool_use", None
        else:
            reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}


def usage_object(usage: Usage, thinking: int) -> dict[str, Any]:
    """Anthropic's three kinds of input tokens add up to the prompt. Caching has no price here, so none "creates"."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": thinking},
    }


def content_block(block: Block) -> dict[str, Any] | None:
    """A whole block; None for a call whose arguments a limit cut off, since nobody can run it."""
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
        case "text":
            return {"type": "text", "text": block.text}
    try:
        arguments = json.loads(block.text)
    except (ValueError, RecursionError):
        return None
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def block_events(step: Step) -> list[dict[str, Any]]:
    block = step.block
    at = {"index": block.index}
    match step.what, block.kind:
        case "open", "reasoning":
            opened: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
            return [{"type": "content_block_start", **at, "content_block": opened}]
        case "open", "text":
            return [{"type": "content_block_start", **at, "content_block": {"type": "text", "text": ""}}]
        case "open", _:
            opened = {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
            return [{"type": "content_block_start", **at, "content_block": opened}]
        case "grow", _:
            kind, name = DELTAS[block.kind]
            return [{"type": "content_block_delta", **at, "delta": {"type": kind, name: step.text}}]
        case _, "reasoning":
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            return [{"type": "content_block_delta", **at, "delta": signature}, {"type": "content_block_stop", **at}]
    return [{"type": "content_block_stop", **at}]


DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def named(payload: dict[str, Any]) -> str:
    return event(payload, payload["type"])
