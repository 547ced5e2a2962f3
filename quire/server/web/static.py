"""Headers of static files. A browser may run these files and connect to this server only."""

from __future__ import annotations


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
