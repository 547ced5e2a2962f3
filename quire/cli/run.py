"""`quire run MODEL [PROMPT]`, as in Ollama: answers a prompt or, without one, starts a chat."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from quire.cli import options
from quire.cli.chat import chat
from quire.cli.generate import generate


def run(
    model: Annotated[str, typer.Argument(help="A name from `quire models`, a folder or a .gguf file.")],
    prompt: Annotated[list[str] | None, typer.Argument(help="The prompt; without one, a chat begins.")] = None,
    system: options.SystemOption = None,
    max_tokens: options.MaxTokensOption = 1024,
    temperature: options.TemperatureOption = None,
    seed: options.SeedOption = None,
    server: options.ServerOption = None,
    api_key: options.KeyOption = None,
    local: options.LocalOption = False,
    kv_memory: options.MemoryOption = None,
) -> None:
    """Chat with a model, or answer one prompt. `quire chat` and `quire generate` have more options."""
    text = " ".join(prompt) if prompt else None
    if text is None and sys.stdin.isatty():
        chat(
            model=model, system=system, max_tokens=max_tokens, temperature=temperature, seed=seed,
            server=server, api_key=api_key, local=local, kv_memory=kv_memory,
        )  # fmt: skip
    else:
        generate(
            text, model=model, system=system, max_tokens=max_tokens, temperature=temperature, seed=seed,
            server=server, api_key=api_key, local=local, kv_memory=kv_memory,
        )  # fmt: skip
