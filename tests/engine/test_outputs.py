"""Generation: deltas, stop strings, usage and logprobs from token ids."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.step import PromptLogprobs, TokenLogprobs
from quire.core.values import FinishReason, SamplingParams
from quire.engine.generation import (
    EngineOutput,
    Generation,
    GenerationParams,
    GenerationRequest,
    NewParser,
    Sample,
    TokenLogprob,
)
from quire.errors import InvalidRequest, RequestFailed
from quire.text.grammar import regex_grammar
from quire.text.messages import Tool
from quire.text.tokenizer import Detokenizer, StopStrings, Tokenizer
from quire.text.tool_formats import PROMPTED, CallParser
from quire.weights.spec import GenerationDefaults
from tests.text.vocabularies import byte_level_gguf, byte_level_json

BYTES = Tokenizer.from_gguf(byte_level_gguf())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(json.dumps(byte_level_json()).encode(), {"eos_token": "<|im_end|>"})


def output(*tokens: int, reason: FinishReason | None = None, **fields: Any) -> EngineOutput:
    base = EngineOutput(1, tokens, reason, 0, None, (), None, None)
    return base._replace(**fields)


def make(tokenizer: Tokenizer, new_parser: NewParser | None = None, **fields: Any) -> Generation:
    request = GenerationRequest.of((1, 2, 3), fields.pop("sampling", SamplingParams()), **fields)
    return Generation(request, tokenizer, new_parser=new_parser)


def test_deltas_join_to_the_text_and_usage_counts_every_token(tokenizer: Tokenizer) -> None:
    generation = make(tokenizer)
    text = "The dog does not mind 🎉👩‍💻 ü."
    ids = tokenizer.encode(text)
    deltas = [generation.push(0, output(token, num_cached_tokens=2)) for token in ids]
    deltas.append(generation.push(0, output(2, reason=FinishReason.STOP)))  # <|im_end|> is hidden but counted
    assert "".join(delta.text for delta in deltas) == text
    assert generation.is_finished
    result = generation.whole()
    assert result.text == text
    assert result.completions[0].token_ids == (*ids, 2)
    assert result.usage.completion_tokens == len(ids) + 1
    assert result.usage.total_tokens == len(ids) + 4


def test_a_stop_string_ends_the_answer_in_the_middle_of_a_token_stream(tokenizer: Tokenizer) -> None:
    generation = make(tokenizer, stop=("lazy dog",))
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. The dog does not mind.")
    shown, position = "", 0
    while True:
        delta = generation.push(0, output(ids[position]))
        position += 1
        shown += delta.text
        if delta.finish_reason is not None:
            break
    assert shown == "The quick brown fox jumps over the "
    assert delta.stop == "lazy dog"
    assert delta.finish_reason is FinishReason.STOP
    assert generation.num_tokens(0) == position
    late = generation.push(0, output(5))  # was in flight
    assert late.text == ""
    assert generation.usage.completion_tokens == position


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = [tokenizer.token_to_id(letter) for letter in text]
    return [token_id for token_id in ids if token_id is not None]


def test_an_incomplete_character_at_the_end_can_complete_a_stop(tokenizer: Tokenizer) -> None:
    generation = make(tokenizer, stop=("\ufffd",))
    end = generation.push(0, output(*tokenizer.encode("\U0001f9ff")[:-1], reason=FinishReason.LENGTH))
    assert (end.text, end.stop, end.finish_reason) == ("", "\ufffd", FinishReason.STOP)


@given(
    st.text(alphabet="abcxyz é🎉<|im_end|>", max_size=40),
    st.lists(st.sampled_from(["xy", "🎉", "é<", "zz"]), max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_tokens_account_for_the_text(text: str, stops: list[str]) -> None:
    sample = Sample(Detokenizer(BYTES), StopStrings(stops))
    shown = ""
    for token_id in BYTES.encode_plain(text):
        before = sample.num_read
        released, offsets = sample.read([token_id])
        assert offsets == [before]
        shown += released
        if sample.stop is not None:
            break
    else:
        shown += sample.read_rest()
    assert len(shown) <= sample.num_read
    if sample.stop is None:
        assert shown == text
    else:
        assert shown + sample.stop == text[: len(shown) + len(sample.stop)]


def test_a_parser_can_end_the_turn(tokenizer: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>\n'
    generation = make(tokenizer, new_parser=lambda: CallParser(PROMPTED, (Tool("get"),)), n=2)
    ids = tokenizer.encode(call * 4)
    position = 0
    while (delta := generation.push(0, output(ids[position]))).finish_reason is None:
        position += 1
    assert delta.finish_reason is FinishReason.STOP  # the caller must end it in the engine
    assert delta.stop is None
    assert tokenizer.decode(ids[: position + 1]).count('{"a": 1}}') == 2  # no third call was read
    assert (
        generation.num_tokens(0) == position + 1 == generation.usage.completion_tokens
    )  # the repeated call is counted
    assert not generation.is_finished  # the other sample continues


def test_a_parser_ends_the_turn_within_an_output_of_several_tokens(tokenizer: Tokenizer) -> None:
    """With drafts a step gives several tokens. The answer is the same, whatever comes together."""
    call = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
    tokens = tokenizer.encode_plain(f"{call}\n{call}\n and more", at_start=False)
    found = []
    for size in (1, 3, 7, len(tokens)):
        generation = make(tokenizer, new_parser=lambda: CallParser(PROMPTED, (Tool("get"),)))
        parts = [output(*tokens[first : first + size]) for first in range(0, len(tokens), size)]
        while generation.push(0, parts.pop(0)).finish_reason is None:
            pass
        sample = generation.samples[0]
        found.append((sample.token_ids, "".join(sample.text), sample.finish_reason))
    assert found[0][2] is FinishReason.STOP
    assert len(found[0][0]) < len(tokens)
    assert all(one == found[0] for one in found)


def test_samples_are_kept_apart(tokenizer: Tokenizer) -> None:
    generation = make(tokenizer, n=2)
    a, b = tokenizer.encode("The fox"), tokenizer.encode("lazy dog")
    generation.push(0, output(*a[:1], num_cached_tokens=1))
    generation.push(1, output(*b, reason=FinishReason.LENGTH, num_cached_tokens=3))
    assert not generation.is_finished
    generation.push(0, output(*a[1:], reason=FinishReason.LENGTH, num_cached_tokens=1))
    assert [one.text for one in generation.whole().completions] == ["The fox", "lazy dog"]
    assert generation.usage.cached_tokens == 1  # of the first sample; the others share its KV
    assert generation.usage.prompt_tokens == 3


def scored(token: int) -> tuple[TokenLogprobs, ...]:
    return (TokenLogprobs(token, -0.5, 0, ()),)


def test_logprobs_come_with_the_text_of_their_tokens_and_end_with_it(tokenizer: Tokenizer) -> None:
    """With and without a stop string in the text."""
    ids = tokenizer.encode("The lazy 🎉 dog. The")
    pieces = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
    for stop in ("dog.", "never", "z"):
        generation = make(tokenizer, sampling=SamplingParams(logprobs=0), stop=(stop,))
        shown = ""
        entries: list[TokenLogprob] = []
        for token in ids:
            is_last = token == ids[-1]
            reason = FinishReason.LENGTH if is_last else None
            delta = generation.push(0, output(token, reason=reason, logprobs=scored(token)))
            shown += delta.text
            entries += delta.logprobs
            assert all(entry.offset < len(shown) for entry in delta.logprobs)  # not before its text
            if delta.finish_reason is not None:
                break
        assert shown == "The lazy 🎉 dog. The".partition(stop)[0]
        assert tuple(entries) == generation.whole().completions[0].logprobs
        assert [entry.text for entry in entries] == pieces[: len(entries)]
        assert entries[-1].offset < len(shown) <= entries[-1].offset + max(1, len(entries[-1].text))
        for entry in entries:
            if "\ufffd" not in entry.text:
                assert entry.text.startswith(shown[entry.offset :][: len(entry.text)])


def test_control_tokens_that_are_not_shown_have_no_width(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(text)[0] for text in ("The", " dog"))
    generation = make(tokenizer, sampling=SamplingParams(logprobs=0, stop_token_ids=(2,)))
    for token in (a, 1, b):  # 1: <|im_start|>
        generation.push(0, output(token, logprobs=scored(token)))
    generation.push(0, output(2, reason=FinishReason.STOP, logprobs=scored(2)))
    one = generation.whole().completions[0]
    size = len(tokenizer.decode([a]))
    assert [entry.offset for entry in one.logprobs or ()] == [0, size, size, len(one.text)]


def test_an_answer_of_max_tokens_0_is_hidden(tokenizer: Tokenizer) -> None:
    params = GenerationParams(max_tokens=0, logprobs=1, prompt_logprobs=1)
    assert params.sampling(GenerationDefaults(), ()).max_tokens == 1
    generation = make(tokenizer, sampling=params.sampling(GenerationDefaults(), (2,)), hides_answer=True)
    prompt = PromptLogprobs(1, (TokenLogprobs(2, -1.0, 3, ()), TokenLogprobs(3, -2.0, 4, ())))
    delta = generation.push(
        0, output(2, reason=FinishReason.STOP, logprobs=scored(2), prompt_logprobs=prompt, num_cached_tokens=1)
    )
    assert (delta.text, delta.token_ids, delta.logprobs, delta.finish_reason) == ("", (), (), FinishReason.LENGTH)
    result = generation.whole()
    assert (result.usage.completion_tokens, result.usage.total_tokens) == (0, 3)
    assert result.completions[0].logprobs == ()
    assert [entry and entry.logprob for entry in result.prompt_logprobs or ()] == [None, -1.0, -2.0]


def test_logprobs_name_their_tokens(tokenizer: Tokenizer) -> None:
    generation = make(tokenizer, sampling=SamplingParams(logprobs=1, prompt_logprobs=0))
    token = tokenizer.encode("🎉")[0]
    entry = TokenLogprobs(token, -0.5, 0, ((token, -0.5),))
    prompt = PromptLogprobs(1, (TokenLogprobs(2, -1.0, 3, ()), TokenLogprobs(3, -2.0, 4, ())))
    generation.push(0, output(token, reason=FinishReason.LENGTH, logprobs=(entry,), prompt_logprobs=prompt))
    result = generation.whole()
    assert result.completions[0].logprobs is not None
    (found,) = result.completions[0].logprobs
    assert (found.logprob, found.rank, found.data) == (-0.5, 0, tokenizer.token_bytes(token))
    assert found.top[0].token_id == token
    assert result.prompt_logprobs is not None
    assert [None if one is None else one.rank for one in result.prompt_logprobs] == [None, 3, 4]


def test_result_raises_for_a_failed_sample_and_output_does_not(tokenizer: Tokenizer) -> None:
    generation = make(tokenizer)
    generation.push(0, output(reason=FinishReason.ERROR, error="NaN"))
    with pytest.raises(RequestFailed, match="NaN"):
        generation.whole()
    assert generation.output().completions[0].error == "NaN"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"n": 0}, "n = 0"),
        ({"n": 33}, "n = 33"),
        ({"n": True}, "n = True"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": -1.0}, "temperature = -1"),
        ({"top_p": 0.0}, "top_p = 0"),
        ({"top_k": 1.5}, "top_k = 1.5"),
        ({"logprobs": 21}, "logprobs = 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs = -1"),
        ({"stop": [""]}, r"stop\[0\]"),
        ({"stop": ["a"] * 17}, "stop has 17"),
        ({"stop_token_ids": range(200)}, "stop_token_ids has 200"),
        ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "logit_bias has 2000"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens = 5"),
        ({"max_tokens": -1}, "max_tokens = -1"),
        ({"max_tokens": False}, "max_tokens = False"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens = 1 is more than max_tokens = 0"),
        ({"seed": 2**70}, "seed ="),
        ({"stop": 5}, "stop = 5"),
        ({"stop_token_ids": 5}, "stop_token_ids = 5"),
        ({"stop_token_ids": [True]}, r"stop_token_ids\[0\] = True"),
        ({"logit_bias": [1]}, r"logit_bias = \[1\]"),
        ({"logit_bias": {True: 1.0}}, r"logit_bias\[0\] = True"),
        ({"ignore_eos": "no"}, "ignore_eos = 'no'"),
        ({"grammar": regex_grammar("a"), "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_bad_params_are_refused_by_name_and_value(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        GenerationParams(**fields)


def test_none_means_unset() -> None:
    """Clients send null for unset fields."""
    params = GenerationParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert (params.stops, params.stop_token_ids, params.logit_bias) == ((), (), {})


def test_params_override_model_defaults_and_neutral_values() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=20)
    params = GenerationParams(top_k=0, seed=5, stop_token_ids=(9,)).sampling(defaults, (2, 9))
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.6, 0, 1.0, 5)
    assert params.stop_token_ids == (9, 2)
    assert GenerationParams(ignore_eos=True).sampling(defaults, (2,)).stop_token_ids == ()
    drawn = {GenerationParams().sampling(defaults, ()).seed for _ in range(3)}
    assert len(drawn) == 3
