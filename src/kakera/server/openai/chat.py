"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kakera.chat.images import is_image
from kakera.chat.template import Prompt
from kakera.chat.thinking import thinking_switch
from kakera.chat.tool_choice import select_tools
from kakera.chat.tools import CallDelta
from kakera.contract.events import TokenLogprob
from kakera.errors import RequestRefused
from kakera.server.choice import ChatOutput, Delta, Job
from kakera.server.generate import Generation
from kakera.server.http.body import JsonRoute
from kakera.server.http.openapi import streams
from kakera.server.http.sse import DONE, Reply, answer, comment, event, unless_disconnected
from kakera.server.model import ServedModel
from kakera.server.openai.answers import ChatAnswer, ChatUsage, chat_usage
from kakera.server.openai.constrain import budget_of, chat_constraint
from kakera.server.openai.logprobs import chat_logprobs
from kakera.server.openai.progress import PromptProgress
from kakera.server.openai.sampling import build_sampling, completion_room, count_check, prompt_check
from kakera.server.openai.schema import ChatBody, ChatMessage, Tool
from kakera.server.rendered import Rendered, rendered
from kakera.server.service import Service, new_id

ROUTE = "/v1/chat/completions"


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post(ROUTE, responses=streams(ChatAnswer, "`chat.completion.chunk` objects, then `[DONE]`"))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        service.check(body)
        return await answer(request, service.arrives(chat_reply(body, service, request)), body.stream)

    @router.post(f"{ROUTE}/render")
    async def render(body: ChatBody, request: Request) -> Rendered:
        service.check(body)
        work = chat_prompt(body, service, count_check(service.engine.limits, "messages"))
        prompt, _ = await unless_disconnected(request, work)
        return rendered(service.model.name, prompt.tokens, body.stream)

    return router


async def chat_reply(body: ChatBody, service: Service, request: Request) -> ChatReply:
    return ChatReply(service.generation(await chat_job(body, service), request), service.model, body)


async def chat_prompt(
    body: ChatBody, service: Service, check: Callable[[int], None], *, counted: bool = True
) -> tuple[Prompt, list[dict[str, Any]]]:
    """The prompt and the tools that it shows; `counted`: nobody computes it, so no image is decoded. Raises
    RequestRefused for what the template does not accept, and what `check` raises for its tokens."""
    choice = body.tool_choice if isinstance(body.tool_choice, str | None) else body.tool_choice.model_dump()
    tools = select_tools(plain(body.tools), choice)
    variables = thinking_switch(body.chat_template_kwargs or {}, body.reasoning_effort, body.thinking_budget)
    if body.enable_thinking is not None:
        variables = thinking_switch({"enable_thinking": body.enable_thinking, **variables}, None, None)
    return await render_chat(service, body.messages, tools, variables, check, counted=counted), tools


async def chat_job(body: ChatBody, service: Service) -> Job:
    """Raises RequestRefused for whatever can never be answered."""
    check = prompt_check(service.engine.limits, "messages")
    prompt, tools = await chat_prompt(body, service, check, counted=False)
    room = completion_room(len(prompt.tokens), body.limit, service.engine.limits, "messages")
    return Job(
        id=new_id("chatcmpl"),
        tokens=prompt.tokens,
        sampling=build_sampling(
            body,
            service.model,
            max_tokens=room,
            logprobs=body.alternatives,
            constraint=await chat_constraint(body, tools, prompt.opens_thinking, service.model),
            thinking=budget_of(body, prompt.opens_thinking, service.model),
        ),
        boundaries=prompt.boundaries,
        choices=body.n or 1,
        stops=body.stops,
        chat=ChatOutput(prompt.opens_thinking, tuple(tools), stop_in_thinking=body.stop_in_thinking is True),
        cache=body.cache is not False,
        salt=body.salt,
        progress=bool(body.stream and body.return_progress),
        images=prompt.images,
    )


async def render_chat(
    service: Service,
    messages: list[ChatMessage],
    tools: list[dict[str, Any]],
    variables: dict[str, Any],
    check: Callable[[int], None],
    *,
    counted: bool = True,
) -> Prompt:
    """The prompt, made off the event loop; `counted` as of `chat_prompt`."""
    template, model = service.model.template, service.model
    if template is None:
        raise RequestRefused(f"{model.name} has no chat template; use /v1/completions", param="messages")
    sight = None if model.images is None else model.images.measure if counted else model.images.look
    images = sight is not None and any(is_image(part) for message in messages for part in _parts(message))
    return await service.intake.run(
        lambda watch: template.prompt(plain(messages), tools, variables, watch, sight), check, images=images
    )


def _parts(message: ChatMessage) -> list[Any]:
    return message.content if isinstance(message.content, list) else [message.content]


def plain(models: list[ChatMessage] | list[Tool] | None) -> list[dict[str, Any]]:
    """As the client wrote them: fields that it left out stay out, unknown ones stay in."""
    return [item.model_dump(exclude_unset=True) for item in models or []]


@dataclass
class _Choice:
    """One choice of a whole (not streamed) answer, growing."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.logprobs += delta.logprobs
        self.finish = delta.finish or self.finish
        for call in delta.calls:
            if call.id is not None:
                self.calls.append(call_object(call, with_index=False))
            else:
                self.calls[call.index]["function"]["arguments"] += call.arguments

    def message(self, legacy: bool) -> dict[str, Any]:
        # Content is null only where OpenAI's is: a tool call without words. A length stop within the reasoning has "".
        message: dict[str, Any] = {"role": "assistant", "content": self.text or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
            if legacy:
                message["function_call"] = self.calls[0]["function"]
        return message


class ChatReply(Reply):
    """A generation in the shape of chat.completion, whole or in chunks."""

    def __init__(self, generation: Generation, model: ServedModel, body: ChatBody):
        self._generation = generation
        self._model = model
        self._body = body
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        choices = [_Choice() for _ in range(self._generation.job.choices)]
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                choices[delta.choice].add(delta)
        return {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": choice.message(self._body.legacy),
                    "logprobs": self._logprobs(choice.logprobs) if self._body.logprobs else None,
                    "finish_reason": self._finish(choice.finish),
                }
                for index, choice in enumerate(choices)
            ],
            "usage": self._usage(),
        }

    def still_works(self) -> str:
        return comment(self._generation.standing)

    async def stream(self) -> AsyncGenerator[str]:
        begun: set[int] = set()
        reading = PromptProgress()
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if delta.choice not in begun:
                    begun.add(delta.choice)
                    yield self._chunk(delta.choice, {"role": "assistant", "content": ""})
                if delta.progress:
                    yield self._chunk(delta.choice, {}, prompt_progress=reading.as_json(delta.choice, delta.progress))
                fields = delta_fields(delta, self._body.legacy)
                if fields or delta.logprobs:
                    yield self._chunk(delta.choice, fields, logprobs=delta.logprobs)
                if delta.finish:
                    yield self._chunk(delta.choice, {}, finish=self._finish(delta.finish))
        if self._body.include_usage:
            head = self._head("chat.completion.chunk")
            yield event({**head, "choices": [], "usage": self._usage()})
        yield DONE

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: tuple[TokenLogprob, ...] = (),
        finish: str | None = None,
        **more: Any,
    ) -> str:
        entry = {
            "index": choice,
            "delta": delta,
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            "finish_reason": finish,
        }
        return event({**self._head("chat.completion.chunk"), "choices": [entry], **more})

    def _finish(self, reason: str | None) -> str | None:
        return "function_call" if self._body.legacy and reason == "tool_calls" else reason

    def _usage(self) -> ChatUsage:
        images = sum(image.tokens for image in self._generation.job.images)
        return chat_usage(self._generation.usage, self._generation.reasoning_tokens, images)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._generation.job.id, "object": kind, "created": self._created, "model": self._model.name}

    def _logprobs(self, logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> dict[str, Any]:
        return chat_logprobs(logprobs, self._model.tokenizer, self._body.top_logprobs or 0)


def delta_fields(delta: Delta, legacy: bool = False) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.text:
        fields["content"] = delta.text
    if delta.calls:
        fields["tool_calls"] = [call_object(call, with_index=True) for call in delta.calls]
        first = [call["function"] for call in fields["tool_calls"] if call["index"] == 0]
        if legacy and first:  # the name comes once, with the first piece
            fields["function_call"] = {**first[0], "arguments": "".join(piece["arguments"] for piece in first)}
    return fields


def call_object(call: CallDelta, with_index: bool) -> dict[str, Any]:
    head: dict[str, Any] = {"index": call.index} if with_index else {}
    if call.id is None:
        return {**head, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {**head, "id": call.id, "type": "function", "function": function}
