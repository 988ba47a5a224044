"""Errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, or in Anthropic's on its routes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kakera.errors import EngineDied, RequestRefused

log = logging.getLogger(__name__)
RETRY_AFTER_SECONDS = 2  # about the time in which a running request finishes or a slot frees
MOST_LETTERS, FIRST_LETTERS = 1500, 1000  # of a message; its beginning, if letters in its middle are left out
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

ANTHROPIC_ROUTE = "/v1/messages"
ANTHROPIC_TYPES = {**TYPES, 413: "request_too_large"}


def error_body(message: str, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": _short(message), "type": kind, "param": param and _short(param), "code": code}}


def _short(text: str) -> str:
    """What a client has sent is named in errors, and may be megabytes; what to do stands at the end."""
    cut = len(text) - MOST_LETTERS
    return text if cut <= 0 else f"{text[:FIRST_LETTERS]} ... {text[FIRST_LETTERS + cut :]}"


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an error that ended a request."""
    if isinstance(error, RequestRefused):
        return error.status, error_body(str(error), error.status, error.code, error.param)
    if isinstance(error, EngineDied):
        return 503, error_body(f"the engine died and the server is stopping: {error}", 503, "engine_died")
    return 500, error_body("internal error; the server's log says more", 500, "internal_error")


def anthropic_body(body: dict[str, Any], status: int) -> dict[str, Any]:
    """The same error in Anthropic's shape; `param` is ours, the message names the field as well."""
    error = body["error"]
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    shown = {"type": kind, "message": error["message"]}
    return {"type": "error", "error": shown if error["param"] is None else {**shown, "param": error["param"]}}


class Refusals:
    """Answers with an error, and has it recorded unless a generation has done so.

    `record` takes route, status, code, param, path and the client's address.
    """

    def __init__(self, record: Callable[[str, int, str, str | None, str, str | None], None]):
        self._record = record

    def answer(
        self, scope: Scope, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> JSONResponse:
        if not scope.get("state", {}).get("recorded"):
            error = body["error"]
            route = scope["path"] if "route" in scope else "other"  # paths that clients invent are no labels
            client = scope["client"][0] if scope.get("client") else None
            self._record(route, status, error["code"] or f"http_{status}", error["param"], scope["path"], client)
        if scope["path"].startswith(ANTHROPIC_ROUTE):
            body = anthropic_body(body, status)
        return JSONResponse(body, status_code=status, headers=headers)


class Defects:
    """500 for errors that nobody meant. A handler of Exception would answer as well, but Starlette raises the error
    again behind it, and then uvicorn closes the connection, which the client may have kept for its next request."""

    def __init__(self, app: ASGIApp, refusals: Refusals):
        self._app, self._refusals = app, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            log.exception("%s failed", scope["path"])
            await self._refusals.answer(scope, *describe(error))(scope, receive, send)


def install_handlers(app: FastAPI, refusals: Refusals) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        param, message = explain(error.errors())
        return refusals.answer(request.scope, 400, error_body(message, 400, "invalid_value", param))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        what = f": {request.method} {request.url.path}" if error.status_code in (404, 405) else ""
        if error.status_code == 404 and (meant := with_or_without_v1(request)):
            what += (
                f"; {meant} is served: OpenAI clients take a base URL that ends in /v1, Anthropic's one that does not"
            )
        body = error_body(f"{error.detail}{what}", error.status_code)
        return refusals.answer(request.scope, error.status_code, body, error.headers)

    @app.exception_handler(RequestRefused)
    @app.exception_handler(EngineDied)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        status, body = describe(error)
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else None
        return refusals.answer(request.scope, status, body, headers)


def with_or_without_v1(request: Request) -> str | None:
    """The route that a base URL with a /v1 too few or too many misses."""
    path = request.url.path
    other = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    scope = {**request.scope, "path": other}
    return other if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes) else None


def explain(errors: Sequence[Any]) -> tuple[str | None, str]:
    """The offending field and what is wrong with it. Of a union's branches the one that got furthest speaks."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return None, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}"
    if first["loc"] == ("body",) and first["type"] in ("model_attributes_type", "missing"):
        return None, "the body must be a JSON object, sent with the header Content-Type: application/json"
    field = first["loc"][:2]
    error = max(
        (e for e in errors if e["loc"][:2] == field), key=lambda e: (len(e["loc"]), not e["type"].endswith("_type"))
    )
    if error["type"] == "field":  # kakera.server.fields.refuse
        return error["ctx"]["field"], error["msg"]
    param = field_path(error["loc"])
    return param, f"{param}: {error['msg']}" if param else error["msg"]


def field_path(location: Sequence[str | int]) -> str | None:
    """pydantic's ("body", "messages", 0, "role") as messages[0].role, union branches left out."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in UNION_BRANCHES:
            path += f".{part}" if path else part
    return path or None


UNION_BRANCHES = {"str", "int", "float", "bool", "NamedToolChoice", "FunctionName"}
