"""The page: a few files of the package, each under its own name, read once."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@cache
def page_files() -> dict[str, tuple[bytes, str, str]]:
    """Content, type and tag of each file of the page by its name."""
    found = {}
    for file in files("visavis.serving").joinpath("page").iterdir():
        ending = "." + file.name.rpartition(".")[2]
        if ending in TYPES:
            content = file.read_bytes()
            found[file.name] = (content, TYPES[ending], f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return found


def page_routes() -> APIRouter:
    """A route for each file of the page; nothing else lies behind them."""
    router = APIRouter(include_in_schema=False)

    def add(route: str, name: str) -> None:
        content, kind, tag = page_files()[name]

        async def send(request: Request) -> Response:
            headers = {"ETag": tag, "Cache-Control": "no-cache"}
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers=headers)
            return Response(content, media_type=kind, headers=headers)

        router.add_api_route(route, send, methods=["GET", "HEAD"])

    for name in page_files():
        if name != "login.html":
            add("/" if name == "index.html" else f"/{name}", name)
    return router
