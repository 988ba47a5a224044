"""The application: routes, error handlers, limits and access, put together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kakera import __version__
from kakera.plan.plan import Plan
from kakera.run.interface import AsyncEngine
from kakera.server.access import OPEN, Access
from kakera.server.chat import chat_routes
from kakera.server.completions import completion_routes
from kakera.server.errors import Refusals, error_body, install_handlers
from kakera.server.guard import Guard
from kakera.server.health import EngineWatch, health_routes
from kakera.server.messages import messages_routes
from kakera.server.model import ServedModel
from kakera.server.page_routes import page_routes
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
    access: Access = OPEN,
    body_limit: int = BODY_LIMIT,
) -> FastAPI:
    """`plan` is what the page compares memory with. `watch` may carry what to do when the engine dies. With keys, all
    but /health, /metrics and the page's files need one, and the routes' description is switched off."""
    watch = watch or EngineWatch(engine)
    service = Service(engine, model, watch)
    refusals = Refusals(service.metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        polling = asyncio.create_task(watch.run())
        yield
        polling.cancel()

    app = FastAPI(
        title="kakera",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None if access.keys else "/openapi.json",  # without it FastAPI has no /docs and /redoc either
    )
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
    app.add_middleware(Guard, access=access, refusals=refusals)
    if access.origins:  # outermost: a page elsewhere must be able to read refusals, and its preflights have no key
        app.add_middleware(
            CORSMiddleware, allow_origins=access.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app


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
