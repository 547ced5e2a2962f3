"""Rules that the bodies of all protocols share: null fields, and fields that quire does not support."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import pytest

from quire.server.errors import ApiError, Kind
from quire.server.models import InferenceRequest
from quire.server.protocols import anthropic, ollama, openai, responses
from quire.server.protocols.support import Unsupported
from tests.server import test_anthropic_codec, test_ollama_codec, test_openai_codec, test_responses_codec


class Body(NamedTuple):
    kind: type[msgspec.Struct]
    ask: Callable[..., InferenceRequest]  # parses a minimal body with these fields
    refused: Mapping[str, Unsupported]
    accepted: Mapping[str, str]


OF_OLLAMA = ollama.GENERATE_UNSUPPORTED | ollama.UNSUPPORTED
BODIES = {
    "chat": Body(
        openai.ChatCompletionRequest,
        test_openai_codec.chat,
        openai.REFUSED | openai.CHAT_UNSUPPORTED,
        {**openai.ACCEPTED, "user": "", "verbosity": ""},
    ),
    "completions": Body(
        openai.CompletionRequest,
        test_openai_codec.completion,
        openai.REFUSED | openai.COMPLETION_UNSUPPORTED,
        openai.ACCEPTED,
    ),
    "responses": Body(
        responses.ResponsesRequest,
        test_responses_codec.ask_for,
        openai.REFUSED | responses.UNSUPPORTED,
        {**responses.ACCEPTED, "user": "", "store": "", "safety_identifier": ""},
    ),
    "messages": Body(anthropic.MessagesRequest, test_anthropic_codec.parse, anthropic.UNSUPPORTED, {}),
    "chat of Ollama": Body(ollama.OllamaChatRequest, test_ollama_codec.chat_ask, ollama.UNSUPPORTED, {}),
    "generate": Body(ollama.OllamaGenerateRequest, test_ollama_codec.generate_ask, OF_OLLAMA, {}),
}
# Values that request something, where a text does not.
ASKED = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"json": {}, "regex": "a"},
    "compaction": {"enabled": True},
    "diagnostics": {"previous_message_id": "msg_1"},
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_nulls_equals_the_minimal_body(name: str) -> None:
    body = BODIES[name]
    optional = [field.name for field in msgspec.structs.fields(body.kind) if not field.required]
    nulls: dict[str, Any] = {field: None for field in optional if field not in ("messages", "prompt")}
    assert len(nulls) > 10
    assert body.ask(**nulls) == body.ask()


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, body in BODIES.items() for field in body.refused])
def test_an_unsupported_field_is_refused_by_name(name: str, field: str) -> None:
    body = BODIES[name]
    with pytest.raises(ApiError, match=f"^{field} .*is not supported: ") as refused:
        body.ask(**{field: ASKED.get(field, "x")})
    assert (refused.value.kind, refused.value.param) == (Kind.INVALID, field)
    assert refused.value.reason == "unsupported_parameter"
    for value in (None, *body.refused[field].empty, *body.refused[field].harmless):
        assert body.ask(**{field: value}) == body.ask()


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, body in BODIES.items() for field in body.accepted])
def test_an_accepted_field_has_no_effect(name: str, field: str) -> None:
    body = BODIES[name]
    for value in ("x", True, {"a": "b"}, 7):
        assert body.ask(**{field: value}) == body.ask()
