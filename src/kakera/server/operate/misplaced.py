"""Options of operators' routes in the wrong place: what would be dropped in silence is refused."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, Request

from kakera.errors import RequestRefused


async def _no_body(request: Request) -> None:
    if (await request.body()).strip() not in (b"", b"{}", b"null"):
        where = f"POST {request.url.path}?level=1"
        raise RequestRefused(f"this route reads no body: its options go into the query, as in {where}", param="body")


def _no_query(*names: str) -> Any:
    async def check(request: Request) -> None:
        for name in names:
            if name in request.query_params:
                raise RequestRefused(f"{name}: goes into the body, as JSON, and not into the query", param=name)

    return check


NO_BODY = Depends(_no_body)


def in_body(*names: str) -> Any:
    """A dependency of a route whose body has these fields."""
    return Depends(_no_query(*names))
