"""The examples that a newcomer tries first, read from where they stand: README.md, the page, `quire serve --hello`.

`RIGHT` has the whole answer of the default model to each. An example that is not in it has not been measured: run
`python benchmarks/first_answer.py` with its answer added, and keep it only if its margin is large enough.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.serve import MAX_TOKENS, QUESTION

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGE = ROOT / "quire/server/web/page/chat.js"

RIGHT = {
    QUESTION: "The capital city of Japan is Tokyo.",
    "What are the first five even numbers?": "The first five even numbers are 2, 4, 6, 8, and 10.",
    "What is the plural of mouse?": "The plural of mouse is mice.",
    "What language is this: Guten Morgen?": "German",
    "1, 2, 3, 4, 5,": " 6, 7, 8, 9, 10",
}

ANSWERING = ("/v1/chat/completions", "/v1/messages")
SILENT = ("/v1/cache/explain",)  # generate nothing


@dataclass(frozen=True, slots=True)
class Example:
    source: str
    prompt: str
    max_tokens: int | None  # None: the default of the client
    is_raw: bool = False
    choices: tuple[str, ...] = ()  # alternatives of a regular expression; empty: any text


def examples() -> list[Example]:
    """All examples, in the order in which a newcomer meets them."""
    text = README.read_text(encoding="utf-8")
    hello = Example("quire serve --hello", QUESTION, MAX_TOKENS)
    return [hello, *_of_the_page(), *_curls(text), *_pythons(text), *_commands(text)]


def distinct(todo: Sequence[Example]) -> list[Example]:
    """Each prompt once, with the smallest limit: its answer must fit."""
    found: dict[tuple[Any, ...], Example] = {}
    for one in sorted(todo, key=lambda one: (one.max_tokens is None, one.max_tokens)):
        found.setdefault((one.prompt, one.is_raw, one.choices), one)
    return list(found.values())


def _of_the_page() -> Iterator[Example]:
    source = PAGE.read_text(encoding="utf-8")
    (listed,) = re.findall(r"^const EXAMPLES = (\[.*?\]);$", source, re.MULTILINE | re.DOTALL)
    (limit,) = re.findall(r"^const MAX_TOKENS = (\d+);", source, re.MULTILINE)
    for prompt in json.loads(re.sub(r",\s*\]$", "]", listed)):
        yield Example("the page", prompt, int(limit))


def _curls(text: str) -> Iterator[Example]:
    for line in re.findall(r"^curl .*$", text, re.MULTILINE):
        words = shlex.split(line)
        (path,) = (re.sub(r"^https?://[^/]+", "", word) for word in words if word.startswith("http"))
        if path in SILENT:
            continue
        if path not in ANSWERING:
            raise ValueError(f"README.md, {line!r}: {path} is neither in ANSWERING nor in SILENT")
        body = json.loads(words[words.index("-d") + 1])
        yield Example("README.md, curl", _question(body["messages"]), body.get("max_tokens"))


def _pythons(text: str) -> Iterator[Example]:
    """Examples in Python: `create(messages=...)` of a client, and `chat` and `generate` of `LLM`."""
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        nodes = list(ast.walk(ast.parse(block)))
        named = [(node.arg, node.value) for node in nodes if isinstance(node, ast.keyword)]
        limit = next((ast.literal_eval(value) for name, value in named if name == "max_tokens"), None)
        for name, value in named:
            if name == "messages":
                yield Example("README.md, Python", _question(ast.literal_eval(value)), limit)
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if method in ("chat", "generate"):
                prompts = ast.literal_eval(call.args[0])
                for prompt in [prompts] if isinstance(prompts, str) else prompts:
                    yield Example("README.md, Python", prompt, limit, is_raw=method == "generate")


def _commands(text: str) -> Iterator[Example]:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--regex")
    parser.add_argument("--temperature", type=float)
    for line in re.findall(r"^\S*quire generate (.*)$", text, re.MULTILINE):
        given = parser.parse_args(shlex.split(line, comments=True))
        choices = tuple(given.regex.split("|")) if given.regex else ()
        if not all(map(str.isalnum, choices)):
            raise ValueError(f"README.md, --regex {given.regex!r}: only alternatives of plain words can be measured")
        yield Example("README.md, quire generate", given.prompt, given.max_tokens, given.raw, choices)


def _question(messages: Sequence[dict[str, Any]]) -> str:
    (message,) = messages  # with more than one, the prompt is another
    return str(message["content"])
