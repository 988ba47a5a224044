"""The application: routes, error handlers, limits and access, put together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from kakera import __version__
from kakera.plan.plan import Plan
from kakera.run.interface import AsyncEngine
from kakera.run.process.kv_events import KvEvents
from kakera.server.anthropic.routes import messages_routes
from kakera.server.http.access import OPEN, Access
from kakera.server.http.drain import DrainGate
from kakera.server.http.errors import ANTHROPIC_ROUTE, Defects, Refusals, install_handlers
from kakera.server.http.guard import Guard
from kakera.server.http.intake import Intake
from kakera.server.http.openapi import ERRORS, JSON_ERRORS
from kakera.server.http.request_limits import BODY_SECONDS, RequestLimits
from kakera.server.http.request_limits import body_limit as largest_body
from kakera.server.http.sleep import IdleSleep, SleepGate
from kakera.server.http.sse import CLIENT_CLOSED_REQUEST, ClientLeft
from kakera.server.metrics.record import record_refusal
from kakera.server.model import ServedModel
from kakera.server.openai.chat import ROUTE as CHAT_ROUTE
from kakera.server.openai.chat import chat_routes
from kakera.server.openai.completions import ROUTE as COMPLETION_ROUTE
from kakera.server.openai.completions import completion_routes
from kakera.server.openai.models import text_routes
from kakera.server.operate.docs import docs_routes
from kakera.server.operate.health import health_routes
from kakera.server.operate.page import PATHS, page_routes
from kakera.server.operate.router import router_routes
from kakera.server.operate.sleep import sleep_routes
from kakera.server.operate.spill import SpillWatch
from kakera.server.operate.status import status_routes
from kakera.server.operate.sweep import sweep_routes
from kakera.server.responses.routes import ROUTE as RESPONSES_ROUTE
from kakera.server.responses.routes import responses_routes
from kakera.server.service import Service
from kakera.server.watch import EngineWatch

GENERATING = (CHAT_ROUTE, COMPLETION_ROUTE, ANTHROPIC_ROUTE, RESPONSES_ROUTE)


def create_app(
    engine: AsyncEngine,
    model: ServedModel,
    *,
    plan: Plan | None = None,
    watch: EngineWatch | None = None,
    access: Access = OPEN,
    idle_sleep: IdleSleep | None = None,
    body_limit: int | None = None,
    body_seconds: float = BODY_SECONDS,
    kv_events: KvEvents | None = None,
) -> FastAPI:
    """`plan` is what the page compares memory with. `watch` may carry what to do when the engine dies. With keys, all
    but /health, /metrics and the page's files need one, and the routes' description is switched off.
    `body_limit` is in bytes; without it, it follows from the context. `kv_events`: where the engine says what is
    cached."""
    watch = watch or EngineWatch(engine)
    body_limit = body_limit or largest_body(engine.limits.context, model.tokenizer.longest, model.sees)
    service = Service(engine, model, watch, Intake(body_limit), access=access)
    spill = SpillWatch(engine, service.metrics.note_spill) if plan and plan.target.has_cards else None
    refusals = Refusals(partial(record_refusal, service.metrics))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(watch.run())]
        if spill:
            tasks.append(asyncio.create_task(spill.run(watch)))
        if idle_sleep:
            tasks.append(asyncio.create_task(service.sleep.when_idle(idle_sleep)))
        yield
        for task in tasks:
            task.cancel()

    app = FastAPI(
        title="kakera",
        version=__version__,
        lifespan=lifespan,
        responses=ERRORS,
        openapi_url=None if access.keys else "/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    install_handlers(app, refusals)

    @app.exception_handler(ClientLeft)
    async def client_left(request: Request, error: ClientLeft) -> Response:
        if not getattr(request.state, "recorded", False):  # it left before its job was made
            service.metrics.aborted.inc()
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    for router in (
        chat_routes(service),
        completion_routes(service),
        messages_routes(service),
        responses_routes(service),
        text_routes(service),
        health_routes(service),
        router_routes(service, plan, kv_events),
        status_routes(service, plan, spill=spill),
        sweep_routes(service),
        sleep_routes(service),
        page_routes(),
    ):
        app.include_router(router)

    @app.get("/metrics", response_class=PlainTextResponse, responses=JSON_ERRORS)
    async def metrics() -> Response:
        text = service.metrics.render(await service.look(), model.name)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    if not access.keys:
        app.include_router(docs_routes())

    app.add_middleware(Defects, refusals=refusals)
    app.add_middleware(
        RequestLimits,
        body_bytes=body_limit,
        body_seconds=body_seconds,
        refusals=refusals,
        emptied=service.intake.give_back_soon,
    )
    app.add_middleware(SleepGate, sleep=service.sleep, paths=GENERATING, refusals=refusals)
    app.add_middleware(DrainGate, drain=service.drain, paths=GENERATING, refusals=refusals)
    app.add_middleware(Guard, access=access, open_paths=("/health", "/metrics", *PATHS), refusals=refusals)
    if access.origins:  # outermost: a page elsewhere must be able to read refusals, and its preflights have no key
        app.add_middleware(
            CORSMiddleware, allow_origins=access.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app
