"""POST /v1/responses: OpenAI's dialect for agents. Nothing is stored, so each request brings its conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kakera.errors import CONTEXT_LENGTH_EXCEEDED, RequestRefused
from kakera.server.agents.blocks import Answer, gather
from kakera.server.agents.translate import dialect_job, dialect_prompt, names_of
from kakera.server.generate import Generation
from kakera.server.http.body import JsonRoute
from kakera.server.http.errors import describe
from kakera.server.http.openapi import streams
from kakera.server.http.sse import Reply, answer, event, unless_disconnected
from kakera.server.metrics.record import record_refusal
from kakera.server.model import ServedModel
from kakera.server.rendered import Rendered, rendered
from kakera.server.responses.answers import ResponseAnswer
from kakera.server.responses.input import NAMES, responses_chat
from kakera.server.responses.items import Items
from kakera.server.responses.schema import ResponsesBody
from kakera.server.responses.tools import ToolNames
from kakera.server.service import Service

ROUTE = "/v1/responses"


def responses_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post(ROUTE, responses=streams(ResponseAnswer, "events from `response.created` to `response.completed`"))
    async def responses(body: ResponsesBody, request: Request) -> Response:
        service.check(body)
        try:
            return await answer(request, service.arrives(responses_reply(body, service, request)), body.stream)
        except RequestRefused as error:
            if not body.stream or error.code != CONTEXT_LENGTH_EXCEEDED:
                raise
            record_refusal(service.metrics, ROUTE, error.status, error.code, error.param)
            return Response(failed_stream(error, body, service.model.name), media_type="text/event-stream")

    @router.post(f"{ROUTE}/render")
    async def render(body: ResponsesBody, request: Request) -> Rendered:
        service.check(body)
        return rendered(service.model.name, await unless_disconnected(request, prompt_of(body, service)), body.stream)

    return router


async def prompt_of(body: ResponsesBody, service: Service) -> Sequence[int]:
    """The tokens of its prompt. Raises RequestRefused."""
    chat, _, _ = await service.intake.run(lambda watch: responses_chat(body, service.model.sees))
    return (await dialect_prompt(chat, service)).tokens


def failed_stream(error: RequestRefused, body: ResponsesBody, model: str) -> str:
    """A prompt that is too long, as OpenAI tells it who streams. Codex shortens its history on these events alone; a
    400 ends its session."""
    response = response_object(body, f"resp_{uuid.uuid4().hex}", int(time.time()), model)
    shown = {"code": error.code, "message": str(error)}
    events = [
        {"type": "response.created", "response": response},
        {"type": "response.failed", "response": {**response, "status": "failed", "error": shown}},
    ]
    return "".join(event({**each, "sequence_number": i}, str(each["type"])) for i, each in enumerate(events))


async def responses_reply(body: ResponsesBody, service: Service, request: Request) -> ResponsesReply:
    chat, names, unknown = await service.intake.run(lambda watch: responses_chat(body, service.model.sees))
    for kind in unknown:
        service.note(f"tools {kind}", f"tools of type {kind[:100]!r} do not run here and are left out")
    job = await dialect_job(chat, service, "resp", names_of(body, NAMES))
    return ResponsesReply(service.generation(job, request), service.model, body, names)


class ResponsesReply(Reply):
    """A generation as a response, whole or in events with sequence numbers."""

    def __init__(self, generation: Generation, model: ServedModel, body: ResponsesBody, names: ToolNames):
        self._generation = generation
        self._model = model
        self._body = body
        self._created = int(time.time())
        self._items = Items(generation.job.id.removeprefix("resp_"), names)
        self._answer = Answer()
        self._sequence = 0

    async def whole(self) -> dict[str, Any]:
        self._answer = await gather(self._generation)
        return self._ended()

    async def stream(self) -> AsyncGenerator[str]:
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if self._sequence == 0:
                    yield self._begin()
                for step in self._answer.feed(delta):
                    for payload in self._items.events(step, self._status):
                        yield self._event(payload)
        response = self._ended()
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def still_works(self) -> str:
        """An event: Codex gives a stream up whose events rest for five minutes, whatever comments it sends."""
        if self._sequence == 0:
            return self._begin()
        return self._event({"type": "response.in_progress", "response": self._response("in_progress")})

    def failed(self, error: Exception) -> str:
        _, body = describe(error)
        shown = {"code": body["error"]["code"], "message": body["error"]["message"]}
        response = {**self._response("failed"), "output": self._output("incomplete"), "error": shown}
        begin = self._begin() if self._sequence == 0 else ""
        return begin + self._event({"type": "response.failed", "response": response})

    def _begin(self) -> str:
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return "".join(self._event({"type": kind, "response": response}) for kind in kinds)

    def _event(self, payload: dict[str, Any]) -> str:
        numbered = {**payload, "sequence_number": self._sequence}
        self._sequence += 1
        return event(numbered, payload["type"])

    @property
    def _status(self) -> str:
        last = self._answer.last
        return "incomplete" if last is not None and last.finish == "length" else "completed"

    def _output(self, last_status: str) -> list[dict[str, Any]]:
        """Whatever ended the response early cut its last item."""
        blocks = self._answer.blocks
        return [self._items.item(block, last_status if block is blocks[-1] else "completed") for block in blocks]

    def _ended(self) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            **self._response(self._status),
            "output": self._output(self._status),
            "incomplete_details": cut,
            "completed_at": int(time.time()),
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._generation.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _response(self, status: str) -> dict[str, Any]:
        """Settings are those in force."""
        job = self._generation.job
        response = response_object(self._body, job.id, self._created, self._model.name)
        return {**response, "status": status, "temperature": job.sampling.temperature, "top_p": job.sampling.top_p}


def response_object(body: ResponsesBody, name: str, created: int, model: str) -> dict[str, Any]:
    """A response that has begun, without what only its end knows. Nothing is ever stored."""
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "model": body.model or model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": body.reasoning.model_dump() if body.reasoning else {"effort": None, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or []],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
