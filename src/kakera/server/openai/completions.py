"""POST /v1/completions: text or token ids in, text out, with echo and prompt log-probabilities for evaluation tools."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kakera.contract.events import Usage
from kakera.contract.request import Constraint, packed
from kakera.server.choice import Delta, Job
from kakera.server.generate import Generation, join_usage
from kakera.server.http.body import JsonRoute
from kakera.server.http.openapi import streams
from kakera.server.http.sse import DONE, Reply, answer, comment, event, unless_disconnected
from kakera.server.model import ServedModel
from kakera.server.openai.answers import CompletionAnswer, usage_object
from kakera.server.openai.constrain import text_constraint
from kakera.server.openai.logprobs import TextLogprobs
from kakera.server.openai.progress import PromptProgress
from kakera.server.openai.sampling import build_sampling, check_token, completion_room, count_check, prompt_check
from kakera.server.openai.schema import CompletionBody
from kakera.server.rendered import Rendered, rendered
from kakera.server.service import Service, new_id
from kakera.text.tokenizer import Watch

ROUTE = "/v1/completions"
DEFAULT_TOKENS = 16  # OpenAI's: a raw prompt often has no end, and would run to that of the context
PROMPTS_AT_ONCE = 8  # of one body: evaluation tools send hundreds, which must not fill the queue


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post(ROUTE, responses=streams(CompletionAnswer, "`text_completion` objects, then `[DONE]`"))
    async def completions(body: CompletionBody, request: Request) -> Response:
        service.check(body)
        return await answer(request, service.arrives(completion_reply(body, service, request)), body.stream)

    @router.post(f"{ROUTE}/render")
    async def render(body: CompletionBody, request: Request) -> list[Rendered]:
        """One for each prompt."""
        service.check(body)
        check = count_check(service.engine.limits, "prompt")
        work = service.intake.run(lambda watch: prompt_tokens(body, service.model, watch), check)
        prompts = await unless_disconnected(request, work)
        return [rendered(service.model.name, tokens, body.stream) for tokens in prompts]

    return router


async def completion_reply(body: CompletionBody, service: Service, request: Request) -> CompletionReply:
    check = prompt_check(service.engine.limits, "prompt")
    prompts = await service.intake.run(lambda watch: prompt_tokens(body, service.model, watch), check)
    constraint = await text_constraint(body, service.model)
    jobs = [completion_job(body, tokens, service, constraint) for tokens in prompts]
    return CompletionReply([service.generation(job, request) for job in jobs], service.model, body)


def prompt_tokens(body: CompletionBody, model: ServedModel, watch: Watch) -> list[array[int]]:
    """Packed tokens per prompt. Raises RequestRefused for ids outside the vocabulary, and what `watch` raises."""
    prompt = body.prompt
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
    special = body.parse_special is not False
    made: list[array[int]] = []
    for p in prompts:
        tokens = model.tokenizer.encode(p, special, watch) if isinstance(p, str) else cast("list[int]", p)
        watch(len(tokens))
        check_token(max(tokens), model, "prompt")
        made.append(packed(tokens))
    return made


def completion_job(body: CompletionBody, tokens: array[int], service: Service, constraint: Constraint | None) -> Job:
    # The engine always makes a token; for max_tokens 0 it is left out of the answer.
    wanted = DEFAULT_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    prompt_logprobs = body.logprobs if body.echo else None
    sampling = build_sampling(
        body,
        service.model,
        max_tokens=completion_room(len(tokens), wanted, service.engine.limits, "prompt"),
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
    )
    return Job(
        new_id("cmpl"),
        tokens,
        sampling,
        choices=body.n or 1,
        stops=body.stops,
        cache=body.cache is not False,
        salt=body.salt,
        progress=bool(body.stream and body.return_progress),
    )


class CompletionReply(Reply):
    """Generations, one per prompt, in the shape of text_completion. Choice index = prompt * n + choice."""

    def __init__(self, generations: list[Generation], model: ServedModel, body: CompletionBody):
        self._generations = generations
        self._model = model
        self._body = body
        self._created = int(time.time())
        self._id = new_id("cmpl")
        self._streaming = generations[0]

    async def whole(self) -> dict[str, Any]:
        gate = asyncio.Semaphore(PROMPTS_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._whole_prompt(generation, gate)) for generation in self._generations]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        choices = [choice for task in tasks for choice in task.result()]
        for index, choice in enumerate(choices):
            choice["index"] = index
        return {**self._head(), "choices": choices, "usage": usage_object(self._usage())}

    async def _whole_prompt(self, generation: Generation, gate: asyncio.Semaphore) -> list[dict[str, Any]]:
        choices = [ChoiceReply(generation, self._model, self._body) for _ in range(generation.job.choices)]
        async with gate, aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                choices[delta.choice].add(delta)
        return [choice.take() for choice in choices]

    def still_works(self) -> str:
        return comment(self._streaming.standing)

    async def stream(self) -> AsyncGenerator[str]:
        """Prompts one after the other: clients that stream send one."""
        for number, generation in enumerate(self._generations):
            self._streaming = generation
            reading = PromptProgress()
            choices = [ChoiceReply(generation, self._model, self._body) for _ in range(generation.job.choices)]
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    choice = choices[delta.choice]
                    choice.add(delta)
                    index = number * generation.job.choices + delta.choice
                    if delta.progress:
                        read = reading.as_json(delta.choice, delta.progress)
                        empty = {"text": "", "logprobs": None, "finish_reason": None, "index": index}
                        yield event({**self._head(), "choices": [empty], "prompt_progress": read})
                    if choice.worth_sending:
                        yield event({**self._head(), "choices": [{**choice.take(), "index": index}]})
        if self._body.include_usage:
            yield event({**self._head(), "choices": [], "usage": usage_object(self._usage())})
        yield DONE

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model.name}

    def _usage(self) -> Usage:
        usage = join_usage([generation.usage for generation in self._generations])
        # max_tokens 0: the token that the engine made was not asked for
        return usage if self._body.max_tokens != 0 else replace(usage, completion_tokens=0)


class ChoiceReply:
    """One choice's text and log-probabilities since the last `take`."""

    def __init__(self, generation: Generation, model: ServedModel, body: CompletionBody):
        prompt = generation.job.tokens
        self._silent = body.max_tokens == 0
        self._waits_for_prompt = len(prompt) - 1 if body.echo and body.logprobs is not None else 0
        self._text = model.tokenizer.decode(prompt) if body.echo else ""
        self._finish: str | None = None
        self._logprobs: TextLogprobs | None = None
        if body.logprobs is not None:
            self._logprobs = TextLogprobs(model.tokenizer, body.logprobs)
            if body.echo:
                self._logprobs.add_unknown(prompt[0])

    def add(self, delta: Delta) -> None:
        self._waits_for_prompt -= len(delta.prompt_logprobs)
        for logprob in (*delta.prompt_logprobs, *(() if self._silent else delta.logprobs)):
            if self._logprobs:
                self._logprobs.add(logprob)
        if not self._silent:
            self._text += delta.text
        if delta.finish:
            self._finish = "length" if self._silent else delta.finish

    @property
    def worth_sending(self) -> bool:
        return self._finish is not None or (bool(self._text) and self._waits_for_prompt <= 0)

    def take(self) -> dict[str, Any]:
        text, self._text = self._text, ""
        logprobs = self._logprobs.take() if self._logprobs else None
        return {"text": text, "logprobs": logprobs, "finish_reason": self._finish}
