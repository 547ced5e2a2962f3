"""The page at `/docs`: one HTML file that fetches `openapi.json` from the same folder and shows it.

It loads and runs nothing else: its Content-Security-Policy names its script and its style by their digests. The page
needs no key: a browser cannot send one on navigation, and the page shows nothing of the server before it has a key.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from quire.server.web.static import static_headers


def _digests(tag: str, page: str) -> str:
    """Return the CSP digests of the exact text between the tags, which is what a browser hashes."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found)


_TEXT = files("quire.server.web").joinpath("docs.html").read_text(encoding="utf-8")

PAGE = _TEXT.encode()
CONTENT_TYPE = "text/html; charset=utf-8"
HEADERS = static_headers(scripts=_digests("script", _TEXT), styles=_digests("style", _TEXT), images="data:")
CONTENT_SECURITY_POLICY = HEADERS["content-security-policy"]
