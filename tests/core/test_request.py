"""Tests of requests, sampling parameters and packed prompts."""

from typing import Any

import pytest

from quire.core.request import Request
from quire.core.values import MAX_TOKEN_ID, PackedPrompt, SamplingParams, check_tokens
from quire.errors import InvalidRequest

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("max_tokens", 2.5),
        ("min_tokens", 0.5),
        ("seed", 0.5),
        ("logprobs", 2.5),
        ("logit_bias", {-3: 1.0}),
        ("logit_bias", {"x": 1.0}),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 2**64),
        ("sample_index", -1),
        ("min_tokens", -1),
        ("max_tokens", 0),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: NAN}),
        ("stop_token_ids", (1, -1)),
        ("stop_token_ids", ("x",)),
    ],
)
def test_errors_name_the_sampling_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"{field}.* = "):
        SamplingParams(**{field: value})


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens = 3 is more than max_tokens = 2"):
        SamplingParams(min_tokens=3, max_tokens=2)


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, "7", None])
def test_errors_name_the_token_position_and_value(token: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt\[2\] = .* is not a token id"):
        Request(1, [1, 2, token, 4])


@pytest.mark.parametrize("salt", ["\ud800", "a\nb", "x" * 257, 5, None])
def test_bad_salts_are_refused(salt: Any) -> None:
    with pytest.raises(InvalidRequest, match="salt = "):
        Request(1, [1], salt=salt)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt has no tokens"):
        Request(1, [])


def test_a_prompt_is_packed_once() -> None:
    packed = PackedPrompt.of([1, MAX_TOKEN_ID, 3])
    assert (len(packed), packed.largest, packed.tokens.tolist()) == (3, MAX_TOKEN_ID, [1, MAX_TOKEN_ID, 3])
    assert PackedPrompt.of(packed) is packed
    request = Request(1, packed)
    assert (request.tokens, request.num_prompt_tokens) == (Request(2, [1, MAX_TOKEN_ID, 3]).tokens, 3)
    request.tokens.append(4)
    assert packed.tokens.tolist() == [1, MAX_TOKEN_ID, 3]  # a request has its own copy


@pytest.mark.parametrize("tokens", [[1, -1], [1, MAX_TOKEN_ID + 1], [1, True], [1, 2.0], "12", None, iter([1])])
def test_invalid_prompts_cannot_be_packed(tokens: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt(\[\d\])? = .* is not a"):
        PackedPrompt.of(tokens)


def test_packed_words_are_copied_without_a_check() -> None:
    words = check_tokens("prompt", [1, 2])
    again = check_tokens("prompt", words)
    assert again == words
    assert again is not words


def test_samples_of_a_prompt_have_random_numbers_of_their_own() -> None:
    sampling = SamplingParams(seed=7, prompt_logprobs=0)
    assert sampling.sample(0) is sampling
    assert sampling.sample(2) == SamplingParams(seed=7, sample_index=2)  # the first one computes prompt logprobs
