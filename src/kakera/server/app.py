"""The application: routes, error handlers, body limit and API key, put together."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kakera import __version__
from kakera.plan.plan import Plan
from kakera.run.interface import AsyncEngine
from kakera.server.chat import chat_routes
from kakera.server.completions import completion_routes
from kakera.server.errors import Refusals, error_body, install_handlers
from kakera.server.health import EngineWatch, health_routes
from kakera.server.messages import messages_routes
from kakera.server.model import ServedModel
from kakera.server.page_routes import PATHS, page_routes
from kakera.server.responses import responses_routes
from kakera.server.router_routes import router_routes
from kakera.server.service import Service
from kakera.server.sse import CLIENT_CLOSED_REQUEST, ClientLeft
from kakera.server.status import status_routes
from kakera.server.text_routes import text_routes

BODY_LIMIT = 32 * 1024 * 1024  # bytes; 262,144 tokens are about 1 MB of text


def create_app(
    engine: AsyncEngine,
    model: ServedModel,
    *,
    plan: Plan | None = None,
    watch: EngineWatch | None = None,
    api_key: str | None = None,
    body_limit: int = BODY_LIMIT,
) -> FastAPI:
    """`plan` is what the page compares memory with. `watch` may carry what to do when the engine dies. With `api_key`,
    all but /health, /metrics and the page's files need it."""
    watch = watch or EngineWatch(engine)
    service = Service(engine, model, watch)
    refusals = Refusals(service.metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        polling = asyncio.create_task(watch.run())
        yield
        polling.cancel()

    app = FastAPI(title="kakera", version=__version__, lifespan=lifespan)
    app.state.service = service
    install_handlers(app, refusals)

    @app.exception_handler(ClientLeft)
    async def client_left(request: Request, error: ClientLeft) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    for router in (
        chat_routes(service),
        completion_routes(service),
        messages_routes(service),
        responses_routes(service),
        text_routes(service),
        health_routes(watch),
        router_routes(service, plan),
        status_routes(service, plan),
        page_routes(),
    ):
        app.include_router(router)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = service.metrics.render(await watch.look(), model.name)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    app.add_middleware(BodyLimit, limit=body_limit, refusals=refusals)
    if api_key:
        app.add_middleware(ApiKey, key=api_key, refusals=refusals)
    return app


class ApiKey:
    """Bearer token or x-api-key."""

    OPEN_PATHS = ("/health", "/metrics", *PATHS)

    def __init__(self, app: ASGIApp, key: str, refusals: Refusals):
        self._app, self._refusals = app, refusals
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.OPEN_PATHS or self._allowed(dict(scope["headers"])):
            await self._app(scope, receive, send)
            return
        body = error_body("wrong or missing API key; send it as Authorization: Bearer KEY", 401, "invalid_api_key")
        await self._refusals.answer(scope, 401, body)(scope, receive, send)

    def _allowed(self, headers: dict[bytes, bytes]) -> bool:
        bearer = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        return any(hmac.compare_digest(key, self._key) for key in (bearer, headers.get(b"x-api-key", b"")))


class BodyLimit:
    """413 for bodies that are too long, whether they say so or not."""

    def __init__(self, app: ASGIApp, limit: int, refusals: Refusals):
        self._app, self._refusals = app, refusals
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        size = 0
        while True:  # read here, so that the routes never see a body without an end
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if size > self._limit:
                text = f"the request body is longer than {self._limit} bytes"
                body = error_body(text, 413, "body_too_large")
                await self._refusals.answer(scope, 413, body)(scope, receive, send)
                return
            if message["type"] != "http.request" or not message.get("more_body"):
                break
        messages.reverse()

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)
