"""Static files: headers that let a browser run these files and connect to this server only, and the page at `/docs`.

That page is one HTML file that fetches `openapi.json` from the same folder and shows it. It loads and runs nothing
else: its Content-Security-Policy names its script and its style by their digests. It needs no key: a browser cannot
send one on navigation, and the page shows nothing of the server before it has a key.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files


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


_TEXT = files("quire.server.web").joinpath("docs.html").read_text(encoding="utf-8")

PAGE = _TEXT.encode()
CONTENT_TYPE = "text/html; charset=utf-8"
HEADERS = static_headers(scripts=_digests("script", _TEXT), styles=_digests("style", _TEXT), images="data:")
CONTENT_SECURITY_POLICY = HEADERS["content-security-policy"]
