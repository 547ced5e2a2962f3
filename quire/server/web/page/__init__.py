"""The page at `/`: static files in this directory, a chat and a live view of `/v1/watch`.

The files need no key: a browser cannot send one before a page has asked for it, and the files contain nothing about
this server. The policy lets the page run these files and connect to this server, and nothing else.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.responses import Response

from quire.server.errors import ApiError, Kind
from quire.server.web.static import static_headers

if TYPE_CHECKING:
    from quire.server.request_context import RequestContext

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = static_headers(scripts="'self'", styles="'self'", images="'self'")
CONTENT_SECURITY_POLICY = HEADERS["content-security-policy"]


@cache
def page_files() -> dict[str, bytes]:
    """All files by name. Nothing outside this directory is served."""
    found = files(__name__).iterdir()
    return {one.name: one.read_bytes() for one in found if _suffix(one.name) in TYPES}


async def page(context: RequestContext) -> Response:
    return _answer(context, "index.html")


async def page_file(context: RequestContext) -> Response:
    return _answer(context, context.request.path_params["name"])


def _answer(context: RequestContext, name: str) -> Response:
    body = page_files().get(name)
    if body is None:
        raise ApiError(Kind.NOT_FOUND, f"the page has no file {name!r:.80}")
    return Response(body, 200, {**context.headers, **HEADERS, "content-type": TYPES[_suffix(name)]})


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
