"""GET /v1/models, POST /tokenize and POST /detokenize: what a client can learn without the engine."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request

from kakera.chat.thinking import thinking_switch
from kakera.server.http.body import JsonRoute
from kakera.server.http.sse import unless_disconnected
from kakera.server.openai.answers import Model, Models, Text, Tokens
from kakera.server.openai.chat import plain, render_chat
from kakera.server.openai.sampling import check_token, count_check
from kakera.server.openai.schema import DetokenizeBody, TokenizeBody
from kakera.server.service import Service


def text_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    model = service.model

    def model_object(name: str) -> Model:
        shown: Model = {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "kakera",
            "max_model_len": service.engine.limits.context,
        }
        if model.sees:
            shown["input_modalities"] = ["text", "image"]
        return shown

    @router.get("/v1/models")
    async def models() -> Models:
        return {"object": "list", "data": [model_object(name) for name in model.names]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Model:
        service.check_model(name)
        return model_object(name if name in model.names else model.name)

    async def tokens_of(body: TokenizeBody) -> list[int]:
        limits = service.engine.limits
        if body.messages is not None:
            variables = thinking_switch(body.chat_template_kwargs or {}, None)
            check = count_check(limits, "messages")
            return list((await render_chat(service, body.messages, plain(body.tools), variables, check)).tokens)
        prompt, special = body.prompt or "", body.parse_special is not False  # as completions read it
        work = partial(model.tokenizer.encode, prompt, special)
        return await service.intake.run(work, count_check(limits, "prompt"))

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Tokens:
        service.check(body)
        tokens = await unless_disconnected(request, tokens_of(body))
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.limits.context}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Text:
        service.check(body)
        if body.tokens:
            check_token(max(body.tokens), model, "tokens")
        return {"prompt": await service.intake.run(lambda watch: model.tokenizer.decode(body.tokens))}

    return router
