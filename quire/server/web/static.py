"""What goes with files that are served as they are: a browser may run these, speak to this server, and nothing else."""

from __future__ import annotations


def static_headers(*, scripts: str, styles: str, images: str) -> dict[str, str]:
    """The sources a page may take each from, in the words of a Content-Security-Policy."""
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
