"""The page at `/`: static files beside this one, which read `/v1/watch` and show it.

They are served without asking for a key: a browser cannot bring one before a page has asked for it, and the files tell
nothing about this server. The policy lets the page run these files, speak to this server, and nothing else.
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
    """By name, all there are: nothing outside this folder can be asked for."""
    found = files(__name__).iterdir()
    return {one.name: one.read_bytes() for one in found if _suffix(one.name) in TYPES}


async def page(context: RequestContext) -> Response:
    return _answer(context, "index.html")


async def page_file(context: RequestContext) -> Response:
    return _answer(context, context.request.path_params["name"])


def _answer(context: RequestContext, name: str) -> Response:
    body = page_files().get(name)
    if body is None:
        raise ApiError(Kind.NOT_FOUND, f"there is no {name!r:.80} here")
    return Response(body, 200, {**context.headers, **HEADERS, "content-type": TYPES[_suffix(name)]})


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
