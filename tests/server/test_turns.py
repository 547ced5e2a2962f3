"""The rule of each endpoint: which of its work is bounded and runs on the event loop, and which takes a turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.engine.generation import Usage
from quire.server.app import ENDPOINTS
from quire.server.protocols.openai import (
    AnswerHead,
    ChatAnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatTokenLogprob,
    usage_body,
)
from quire.server.protocols.support import TopLogprob
from quire.server.request_context import MAX_PART, in_parts
from quire.server.tokenization import Tokens
from tests.gauntlet.pairs import ADMIN, large_bodies
from tests.server.rig import FAKE, Server, serving
from tests.server.turn_log import THREAD, logging_turns, read_turns
from tests.tiny import write_tiny_model

PARSE = "quire-parse"  # bodies and answers: two threads for the server
ENCODE = "quire-encode"  # templates and tokens: up to four threads for each model
TURN = "turn"  # a question to a worker, or a text of metrics: one at a time


@dataclass(frozen=True)
class Rule:
    """The turns of an expensive request, and why its other work is short."""

    turns: tuple[str, ...]
    bound: str
    path: str = ""  # with parameters; by default the path of the endpoint
    body: dict[str, Any] = field(default_factory=dict)  # added to a large body


IDS = [20 + i % 50 for i in range(3000)]
TEXT = "Hé " * 800  # about 3,200 tokens: too many for the event loop, few enough for the context
GENERATES = "a step makes at most one event of each sample; a stream is written as the client reads it"
FILES = "1,000 files and 1,000 batches of a key; the state is in memory"
MODELS = "a few values of each model"
REQUESTS = "a few values of each open request; the queues bound their number"
STATIC = "a constant"
MEMORY = "a few numbers"
RULES: dict[str, Rule] = {
    "POST /v1/chat/completions": Rule((PARSE, ENCODE), GENERATES, body={"stream": True}),
    "POST /v1/completions": Rule((PARSE,), GENERATES, body={"prompt": IDS, "echo": True}),
    "POST /v1/responses": Rule((PARSE, ENCODE), GENERATES),
    "GET /v1/models": Rule((), MODELS),
    "POST /v1/models/load": Rule((PARSE,), MODELS),
    "POST /v1/models/unload": Rule((PARSE,), MODELS),
    "POST /v1/models/pin": Rule((PARSE,), MODELS),
    "POST /v1/models/unpin": Rule((PARSE,), MODELS),
    "GET /v1/models/{model:path}": Rule((), MODELS, path="/v1/models/tiny"),
    "POST /v1/files": Rule((THREAD,), "8 uploads of a key at once; each chunk is written in a thread"),
    "GET /v1/files": Rule((), FILES),
    "GET /v1/files/{file_id}": Rule((), FILES),
    "DELETE /v1/files/{file_id}": Rule((), FILES),
    "GET /v1/files/{file_id}/content": Rule((), "64 KiB at a time, read in a thread"),
    "POST /v1/batches": Rule((PARSE,), "one batch of a key is read at a time, in a thread"),
    "GET /v1/batches": Rule((), FILES),
    "GET /v1/batches/{batch_id}": Rule((), FILES),
    "POST /v1/batches/{batch_id}/cancel": Rule((), FILES),
    "POST /v1/messages": Rule((PARSE, ENCODE), GENERATES),
    "POST /v1/messages/count_tokens": Rule((PARSE, ENCODE), "a number"),
    "POST /api/chat": Rule((PARSE, ENCODE), GENERATES),
    "POST /api/generate": Rule((PARSE, ENCODE), GENERATES),
    "GET /api/tags": Rule((THREAD,), "the metadata of each model is cached until its files change"),
    "POST /api/show": Rule((PARSE, THREAD), "the metadata of a model is cached until its files change"),
    "GET /api/ps": Rule((THREAD,), "the metadata of each model is cached until its files change"),
    "GET /api/version": Rule((), STATIC),
    "POST /api/pull": Rule((PARSE,), "admin only; one download of a model, in a thread of its own"),
    "POST /v1/cache/explain": Rule((PARSE, ENCODE, TURN), "a few numbers and an excerpt", body={"prompt": TEXT}),
    "GET /v1/cache/stats": Rule((TURN,), MEMORY),
    "POST /v1/cache/clear": Rule((), "admin only"),
    "GET /v1/requests": Rule((), REQUESTS),
    "POST /v1/requests/{request_id}/cancel": Rule((), REQUESTS),
    "POST /tokenize": Rule((PARSE, ENCODE), "nothing else", body={"prompt": TEXT}),
    "POST /detokenize": Rule((PARSE,), "nothing else", body={"tokens": IDS}),
    "GET /tokenizer_info": Rule((), "the chat template, whose size is bounded when the model is opened"),
    "GET /health": Rule((), STATIC),
    "GET /ready": Rule((), STATIC),
    "GET /version": Rule((), STATIC),
    "GET /metrics": Rule((TURN,), "a fifth of the event loop's time"),
    "GET /openapi.json": Rule((PARSE,), "made once"),
    "GET /docs": Rule((), STATIC),
    "GET /v1/watch": Rule((), "one snapshot for all watchers; half of the watchers", path="/v1/watch?once=true"),
    "GET /v1/watch/held": Rule((), "the blocks of an own request, in ranges", path="/v1/watch/held?id=unknown"),
    "GET /": Rule((), STATIC),
    "GET /page/{name}": Rule((), STATIC, path="/page/app.js"),
}


REFUSED = ("/v1/files", "/v1/batches", "/api/pull")  # without a purpose, a file, a name

_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
_ENDLESS = {"ignore_eos": True, "logprobs": True, "top_logprobs": 20}
# Small bodies with large answers, or with much work for the model's text: a path, a body, and the turns in their order.
ANSWERS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "ids to text": ("/detokenize", {"tokens": IDS}, [PARSE]),
    "a wrong id among many": ("/detokenize", {"tokens": [*IDS, 10**6]}, [PARSE]),
    "a few ids to text": ("/detokenize", {"tokens": IDS[:100]}, []),
    "text to ids": ("/tokenize", {"prompt": TEXT}, [ENCODE, PARSE]),
    "scores of a chat": ("/v1/chat/completions", {**_CHAT, **_ENDLESS, "n": 2, "max_tokens": 60}, [ENCODE, PARSE]),
    "a few scores of a chat": ("/v1/chat/completions", {**_CHAT, **_ENDLESS, "max_tokens": 6}, [ENCODE]),
    "scores of a prompt": (
        "/v1/completions",
        {"prompt": IDS[:600], "echo": True, "logprobs": 5, "max_tokens": 1},
        [PARSE],
    ),
    "an echo": ("/v1/completions", {"prompt": IDS, "echo": True, "max_tokens": 1}, [PARSE]),
    "scores of a response": (
        "/v1/responses",
        {
            "input": "Hi",
            "temperature": 0,
            "max_output_tokens": 120,
            "top_logprobs": 20,
            "include": ["message.output_text.logprobs"],
        },
        [ENCODE, PARSE],
    ),
    "scores of Ollama": (
        "/api/chat",
        {
            **_CHAT,
            "stream": False,
            "logprobs": True,
            "top_logprobs": 20,
            "options": {"num_predict": 120, "temperature": 0},
        },
        [ENCODE, PARSE],
    ),
    "a prediction": (
        "/v1/chat/completions",
        {**_CHAT, "max_tokens": 1, "prediction": {"type": "content", "content": TEXT * 2}},
        [ENCODE],
    ),
    "breakpoints": (
        "/v1/messages",
        {**_CHAT, "max_tokens": 1, "system": [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}]},
        [ENCODE, ENCODE],
    ),
}


def test_every_endpoint_has_a_rule() -> None:
    assert set(RULES) == {f"{row.method} {row.path}" for row in ENDPOINTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("turns")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    options = (str(write_tiny_model(folder / "tiny")), *FAKE, "--served-model-name", "tiny", "--admin-api-key", ADMIN)
    with serving(*options, key=ADMIN, env=logging_turns(folder)) as server:
        server.chat()
        yield server


@pytest.mark.parametrize("name", RULES)
def test_an_expensive_request_takes_its_turns(name: str, server: Server, folder: Path) -> None:
    rule = RULES[name]
    row = next(row for row in ENDPOINTS if f"{row.method} {row.path}" == name)
    body = None if row.body is None else {**large_bodies(row.path)[0], **rule.body}
    path = rule.path or row.path.replace("{", "").replace("}", "")
    more: dict[str, Any] = {}
    if row.form is not None:
        form = b'--quire\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--quire--\r\n'
        more = {"data": form, "headers": {"content-type": "multipart/form-data; boundary=quire"}}
    read_turns(folder)
    answer = server.ask(row.method, path, body, **more)
    assert answer.status < 500, answer.body
    assert answer.status != 400 or path in REFUSED, answer.body
    assert set(read_turns(folder)) == set(rule.turns)


@pytest.mark.parametrize("name", ANSWERS)
def test_work_on_many_tokens_takes_a_turn(name: str, server: Server, folder: Path) -> None:
    path, body, turns = ANSWERS[name]
    read_turns(folder)
    answer = server.post(path, body)
    assert answer.status == (400 if "wrong" in name else 200), answer.body
    assert read_turns(folder) == turns


def test_an_answer_in_parts_is_the_same_json() -> None:
    """Long lists are encoded in parts, at each depth; tags, renamed and unset fields stay."""
    tops = [TopLogprob(f"t{i}", -0.5 * i, [i]) for i in range(3)]
    scores = ChatLogprobs([ChatTokenLogprob("a", -1.0, [97], tops) for _ in range(3 * MAX_PART + 1)])
    choices = [ChatChoice(i, ChatAnswerMessage("a"), scores, "length") for i in range(2)]
    usage = usage_body(Usage(1, 2, 0))
    head = AnswerHead(
        id="x", object="chat.completion", created=1, model="m", system_fingerprint="fp", service_tier="default"
    )
    chat = ChatCompletion(**msgspec.structs.asdict(head), choices=choices, usage=usage)
    ids = Tokens(list(range(MAX_PART * 2)), 1, 1, ["é"] * (MAX_PART + 1))
    for value in (chat, ids, Tokens([], 0, 1, []), {"a": 1}):
        assert msgspec.json.encode(in_parts(value)) == msgspec.json.encode(value)
    assert isinstance(in_parts(ids).tokens, msgspec.Raw)  # type: ignore[attr-defined]
