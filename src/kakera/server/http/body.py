"""The body of a request as JSON. Python reads more than JSON is, and what it reads could not be written again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kakera.server.http.intake import Intake
from kakera.server.http.request_limits import LARGE_BYTES
from kakera.server.http.sse import unless_disconnected
from kakera.text.json_size import excess
from kakera.text.unicode import well_formed

HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # or a whole one
DIGITS = 4300  # of an integer: Python's own limit, since reading takes their square


class JsonRoute(APIRoute):
    """A route whose body is read by `parse`. Halves of surrogate pairs, as clients that cut an emoji send them, become
    U+FFFD; what is not JSON is a 400 in words. Large bodies are read off the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            intake: Intake = request.app.state.service.intake
            read = JsonRequest(request.scope, request.receive)
            with intake.place(len(await read.body())):
                return await handle(read)

        return handle_json


class JsonRequest(Request):
    async def json(self) -> Any:
        coding = self.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise HTTPException(415, f"the body is sent with Content-Encoding: {coding[:100]}; send it as it is")
        body = await self.body()
        if len(body) <= LARGE_BYTES:
            return parse(body)
        intake: Intake = self.app.state.service.intake
        return await unless_disconnected(self, intake.run(lambda watch: parse(body)))


def parse(body: bytes) -> Any:
    """Raises JSONDecodeError for what is not JSON, HTTPException (400) for JSON that can not be read here."""
    if too_much := excess(body):
        raise HTTPException(400, f"the body has {too_much}; send less in one request")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HTTPException(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        document = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        if HALF_PAIR.search(text):
            written = json.dumps(document, ensure_ascii=False)
            if (clean := well_formed(written)) is not written:
                document = json.loads(clean)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply; flatten it to some hundred levels") from None
    except ValueError:
        raise HTTPException(400, f"the body has an integer of more than {DIGITS} digits") from None
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise HTTPException(400, f"the body is not JSON: {name} is no number there; leave the field out or send null")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise HTTPException(400, f"the body has the number {digits[:40]}, which is too large; 1.8e308 is the limit")
    return value
