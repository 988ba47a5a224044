"""GET /: the page that shows what kakera does, and a chat. Static files from the package; nothing comes from elsewhere.

The files are open without a key, since they hold nothing; what they ask for needs it.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

DIRECTORY = Path(__file__).parent.parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    # no inline script or style, nothing from another origin, and no page of another origin may frame this one
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
FILES = {f"/page/{path.name}": path for path in sorted(DIRECTORY.iterdir()) if path.suffix in TYPES}
PATHS = ("/", *FILES)


def page_routes() -> APIRouter:
    router = APIRouter()
    for path, file in {"/": DIRECTORY / "index.html", **FILES}.items():
        router.add_api_route(path, _answer(file), include_in_schema=False)
    return router


def _answer(file: Path):  # type: ignore[no-untyped-def]  # a route's type is FastAPI's business
    content, kind = file.read_bytes(), TYPES[file.suffix]

    async def answer() -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8", headers=HEADERS)

    return answer
