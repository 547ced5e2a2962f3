"""`quire serve --hello`: one question sent twice to the server over HTTP, to show an answer and a cache hit."""

from __future__ import annotations

import json
import ssl
import threading
import urllib.request
from collections.abc import Sequence
from typing import Any

from quire.cli.server_client import printable
from quire.cli.terminal import echo

# Chosen for a large margin at every token of the default model's answer: kernels round differently, and this must not
# change the answer (benchmarks/first_answer.py).
QUESTION = "What is the capital city of Japan?"
MAX_TOKENS = 64
LIMIT_S = 300.0


def ask_first_question(url: str, model: str, keys: Sequence[str]) -> None:
    """Send the question in a thread: the caller runs the event loop that answers it."""
    threading.Thread(target=_ask_twice, args=(url, model, keys), name="quire-hello", daemon=True).start()


def _ask_twice(url: str, model: str, keys: Sequence[str]) -> None:
    try:
        for number in (1, 2):
            answer = _ask(url, model, keys)
            text = printable(answer["choices"][0]["message"]["content"].strip())
            echo(f"  > {QUESTION}\n  {text}" if number == 1 else "  once more:")
            echo(f"  cache: {answer['cache']['message']}")
        echo("")
    except (OSError, KeyError, ValueError) as error:
        echo(f"  the first question failed: {error}", err=True)


def _ask(url: str, model: str, keys: Sequence[str]) -> Any:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "cache": True,
    }
    headers = {"content-type": "application/json"}
    if keys:
        headers["authorization"] = f"Bearer {keys[0]}"
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    context = None
    if url.startswith("https"):  # this server's own certificate, which may name another host
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    with urllib.request.urlopen(request, timeout=LIMIT_S, context=context) as response:
        return json.load(response)
