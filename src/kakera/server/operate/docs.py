"""GET /docs: the routes as one page without scripts, made of /openapi.json. FastAPI loads scripts from a CDN, which
could do in this origin whatever the API can."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from starlette.requests import Request

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
STYLE = """body{font:16px/1.5 system-ui;margin:2rem auto;max-width:60rem;padding:0 1rem;color-scheme:light dark}
pre{overflow-x:auto;padding:.6rem;border:1px solid #8886;border-radius:6px}code{font-size:.9em}
td,th{text-align:left;padding:.1rem 1rem .1rem 0;vertical-align:top}"""
LIMITS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength", "maxLength", "maxItems")


def docs_routes() -> APIRouter:
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(page(request.app.openapi(), str(request.base_url).rstrip("/")), headers=HEADERS)

    return router


def page(document: dict[str, Any], base: str) -> str:
    """`document` as OpenAPI writes it; `base` is where the examples ask."""
    shapes = document.get("components", {}).get("schemas", {})
    parts = "".join(
        _route(method.upper(), path, route, shapes, base)
        for path, methods in document["paths"].items()
        for method, route in methods.items()
    )
    title = f"{document['info']['title']} {document['info']['version']}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style><h1>{escape(title)}</h1>'
        f'<p>As JSON: <a href="/openapi.json">/openapi.json</a></p>{parts}</html>'
    )


def _route(method: str, path: str, route: dict[str, Any], shapes: dict[str, Any], base: str) -> str:
    answer = next(iter(route["responses"].values())).get("description", "")
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    shape = shapes.get(body.get("$ref", "").rpartition("/")[2], {})
    fields = "".join(f"<tr><td><code>{escape(n)}</code><td>{escape(t)}" for n, t in _fields(shape))
    table = f"<details><summary>Fields</summary><table>{fields}</table></details>" if fields else ""
    examples = "".join(f"<pre>{escape(_curl(base + path, example))}</pre>" for example in shape.get("examples", ()))
    head = f"<h2><code>{method} {escape(path)}</code></h2><p>{escape(answer)}</p>"
    return head + table + examples


def _fields(shape: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, schema in shape.get("properties", {}).items():
        needed = "required, " if name in shape.get("required", ()) else ""
        yield name, needed + " or ".join(_kind(branch) for branch in schema.get("anyOf", [schema]))


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(json.dumps(value) for value in schema["enum"])
    kind = schema.get("type") or schema.get("$ref", "").rpartition("/")[2] or "anything"
    if kind == "array":
        kind = f"list of {_kind(schema.get('items', {}))}"
    limits = [f"{name} {schema[name]:g}" for name in LIMITS if name in schema]
    return f"{kind} ({', '.join(limits)})" if limits else str(kind)


def _curl(url: str, example: dict[str, Any]) -> str:
    text = json.dumps(example, ensure_ascii=False).replace("'", "'\\''")
    return f"curl {url} -H 'Content-Type: application/json' -d '{text}'"
