"""A server on the MLX backend, with the official client: streams, prefix hits, structured output, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.server.rig import Server, serving
from tests.tiny import write_tiny_model

LONG = "Count the sheep that jump over the fence, one after the other, and do not stop. " * 4
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with serving("--model", str(folder), "--backend", "mlx", "--quantize", "4", "--num-blocks", "400") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_banner_names_the_backend_and_the_weights(server: Server) -> None:
    text = "\n".join(server.stdout)
    assert "mlx 0." in text
    assert "4 bits (affine" in text


def test_a_second_request_finds_the_prefix(client: openai.OpenAI) -> None:
    def ask(last: str) -> tuple[str, int]:
        text, cached = "", 0
        for chunk in client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": LONG + last}],
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
        return text, cached

    first, second, other = ask("One"), ask("One"), ask("Two")
    assert first[0] == second[0]
    assert second[1] > 64
    assert other[1] > 64


def test_eight_at_once_compute_a_prompt_once(server: Server, client: openai.OpenAI) -> None:
    prompt = "A different prompt, which nobody has sent before. " * 6

    def ask(seed: int) -> tuple[int, int]:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": prompt}], max_tokens=6, seed=seed
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    computed = sum(total - cached for total, cached in found)
    assert computed < found[0][0] + 8 * 32
    server.wait_free()


def test_structured_output(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Name a person."}],
        max_tokens=64,
        seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
        logprobs=True,
        top_logprobs=2,
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"name", "age"}
    assert 0 <= value["age"] <= 9
    assert answer.choices[0].logprobs is not None
    assert all(len(entry.top_logprobs) == 2 for entry in answer.choices[0].logprobs.content or ())
