"""The page at `/docs`: one file that shows `openapi.json`, loaded from the same directory.

It loads and runs nothing else: the policy below names its one script and its one style by their digests. The page
itself needs no key, since a browser cannot send one with the address; it asks for one if `openapi.json` requires it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from quire.server.web.static import static_headers


def _digests(tag: str, page: str) -> str:
    """CSP sources of the text between the tags, exactly as a browser digests it."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found)


_TEXT = files("quire.server.web").joinpath("docs.html").read_text(encoding="utf-8")

PAGE = _TEXT.encode()
CONTENT_TYPE = "text/html; charset=utf-8"
HEADERS = static_headers(scripts=_digests("script", _TEXT), styles=_digests("style", _TEXT), images="data:")
CONTENT_SECURITY_POLICY = HEADERS["content-security-policy"]
