"""The web page and the API documentation page, with headers that let a browser run and connect to nothing else.

The page at `/` consists of the static files in `page`: a chat and a live view of `/v1/watch`. The page at `/docs` is
one HTML file that fetches `openapi.json` from the same folder and shows it; its Content-Security-Policy names its
script and its style by their digests. Both need no key: a browser cannot send one on navigation, and they show nothing
of the server before they have a key.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response

from quire.server.errors import ApiError, Kind
from quire.server.request_context import RequestContext

_HERE = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def static_headers(*, scripts: str, styles: str, images: str) -> dict[str, str]:
    """Return the headers. The arguments are Content-Security-Policy sources."""
    policy = [
        "default-src 'none'",
        f"script-src {scripts}",
        f"style-src {styles}",
        f"img-src {images}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def _digests(tag: str, page: str) -> str:
    """Return the CSP digests of the exact text between the tags, which is what a browser hashes."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found)


DOCS = (_HERE / "docs.html").read_text(encoding="utf-8")
DOCS_HEADERS = static_headers(scripts=_digests("script", DOCS), styles=_digests("style", DOCS), images="data:")
PAGE_HEADERS = static_headers(scripts="'self'", styles="'self'", images="'self'")


@cache
def page_files() -> dict[str, bytes]:
    """All files of the page by name. Nothing else is served."""
    return {one.name: one.read_bytes() for one in (_HERE / "page").iterdir() if one.suffix in TYPES}


async def page_file(context: RequestContext) -> Response:
    name = context.request.path_params.get("name", "index.html")
    body = page_files().get(name)
    if body is None:
        raise ApiError(Kind.NOT_FOUND, f"the page has no file {name!r:.80}")
    headers = {**context.headers, **PAGE_HEADERS, "content-type": TYPES[name[name.rfind(".") :]]}
    return Response(body, 200, headers)
