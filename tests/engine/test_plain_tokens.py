"""The short path of a token, `Generation.push_token`, gives the same text as `Generation.push`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from quire.core.cache import CacheExplanation, StopReason
from quire.core.step import TokenLogprobs
from quire.core.values import FinishReason, SamplingParams
from quire.engine.generation import Delta, EngineOutput, Generation, GenerationRequest
from quire.engine.model_text import ModelText
from quire.engine.worker.protocol import Stepped, from_worker, pack, stepped
from quire.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level_gguf, sentencepiece_gguf

TEXTS = ("naïve 🙂 日本語 👩\u200d💻 \u2028 \u0301", "plain words, one after another\n", 'a "quoted"\t\\ \x01 text')


def output(*tokens: int, reason: FinishReason | None = None) -> EngineOutput:
    return EngineOutput(1, tokens, reason, 0, None, (), None, None)


def submitted(tokenizer: Tokenizer, **fields: object) -> Generation:
    return Generation(GenerationRequest.of((5, 6), SamplingParams(), **fields), tokenizer, (1,))


def by_short_path(generation: Generation, tokens: Sequence[int]) -> list[str]:
    """Push each token like a `WorkerConnection`, and return the text that each released."""
    for token in tokens:
        if not generation.push_token(0, token, 1.0, {}):
            generation.deliver(generation.push(0, output(token)))
    return [delta.text for delta in generation.take()]


def random_tokens(tokenizer: Tokenizer, seed: int) -> list[int]:
    """Random tokens, whole texts, the single bytes of characters, special tokens and ids without a token."""
    random = Random(seed)
    tokens: list[int] = []
    while len(tokens) < 60:
        match random.randrange(4):
            case 0:
                tokens += random.choices(range(tokenizer.vocab_size), k=8)
            case 1:
                tokens += tokenizer.encode_plain(random.choice(TEXTS))
            case 2:
                tokens += tokenizer.encode_plain(random.choice(TEXTS))[random.randrange(6) :: 2]
            case 3:
                tokens += [*random.choices(sorted(tokenizer.special_ids) or [0], k=1), tokenizer.vocab_size + 3]
    return tokens


def check_equal(tokenizer: Tokenizer, seeds: range) -> None:
    num_short = 0
    for seed in seeds:
        for skip_special in (True, False):
            tokens = random_tokens(tokenizer, seed)
            short = submitted(tokenizer, skip_special=skip_special)
            exact = Generation(short.request, tokenizer)
            expected = [exact.push(0, output(token)).text for token in tokens]
            assert by_short_path(short, tokens) == expected, f"{seed = } {skip_special = }"
            end = output(reason=FinishReason.LENGTH)
            assert short.push(0, end) == exact.push(0, end)
            assert short.whole() == exact.whole()
            num_short += sum(bool(tokenizer.plain_texts[token]) for token in tokens)
    assert num_short > 10 * len(seeds)  # the short path was used


@pytest.mark.parametrize("kind", ["bytes", "prefix", "bare"])
def test_texts_are_equal_for_small_vocabularies(kind: str) -> None:
    gguf = byte_level_gguf() if kind == "bytes" else sentencepiece_gguf(prefix=kind == "prefix")
    check_equal(Tokenizer.from_gguf(gguf), range(100))


def test_texts_are_equal_for_the_default_tokenizer(default_model: Path) -> None:
    text = ModelText.open(default_model)
    text.close()  # only the tokenizer is needed
    check_equal(text.tokenizer, range(100))


@pytest.mark.parametrize(
    "fields",
    [{"stop": ("x",)}, {"hides_answer": True}, {"sampling": SamplingParams(logprobs=1)}],
    ids=str,
)
def test_requests_with_more_work_per_token_do_not_use_the_short_path(fields: dict[str, object]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_gguf())
    request = GenerationRequest.of(**{"prompt": (5, 6), "sampling": SamplingParams(), **fields})  # type: ignore[arg-type]
    generation = Generation(request, tokenizer, (1,))
    token = tokenizer.encode_plain("a")[-1]
    generation.push(0, output(token))
    assert not generation.push_token(0, token, 1.0, {})
    assert generation.num_tokens(0) == (0 if request.hides_answer else 1)


class Sink:
    """Takes text while it is open."""

    def __init__(self) -> None:
        self.is_open = True
        self.taken: list[str] = []

    def take_token(self, index: int, token_id: int, text: str, now_s: float) -> bool:
        del index, token_id, now_s
        if self.is_open:
            self.taken.append(text)
        return self.is_open

    def take_delta(self, delta: Delta) -> bool:
        return self.take_token(delta.index, 0, delta.text, 0.0)


def test_a_sink_gets_text_in_order_and_only_while_nothing_is_queued() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_gguf())
    generation = submitted(tokenizer)
    generation.sink = sink = Sink()
    tokens = tokenizer.encode_plain("abcé")
    *letters, first_byte, last_byte = tokens if len(tokens) > 4 else [*tokens, *tokens[-1:]]

    def push(token: int) -> None:
        if not generation.push_token(0, token, 1.0, {}):
            generation.deliver(generation.push(0, output(token)))

    push(letters[0])
    sink.is_open = False
    push(letters[1])  # queued
    sink.is_open = True
    push(letters[2])  # queued behind it, although the sink is open
    queued = [delta.text for delta in generation.take()]
    push(first_byte)
    push(last_byte)
    assert "".join(sink.taken[:1] + queued + sink.taken[1:]) == tokenizer.decode([*letters, first_byte, last_byte])
    assert (len(sink.taken[:1]), len(queued)) == (1, 2)
    generation.deliver(generation.push(0, output(reason=FinishReason.LENGTH)))
    (last,) = generation.take()  # the end is always queued, for the task of the reader
    assert last.finish_reason is FinishReason.LENGTH


def test_equal_gaps_are_counted_together() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_gguf())
    token = tokenizer.encode_plain("a")[-1]
    generations = [submitted(tokenizer) for _ in range(3)]
    for generation in generations:
        generation.push(0, output(token))
        generation.note_tokens(0, 1.0)
    generations[2].note_tokens(0, 1.5)
    previous: dict[float | None, int] = {}
    for generation in generations:
        assert generation.push_token(0, token, 2.0, previous)
    assert previous == {1.0: 2, 1.5: 1}
    assert {(one.first_s, one.last_s) for one in generations} == {(1.0, 2.0)}


def test_only_outputs_of_one_token_and_nothing_else_are_sent_as_integers() -> None:
    logprobs = (TokenLogprobs(7, -0.5, 0, ()),)
    first = EngineOutput(2, (7,), None, 3, CacheExplanation(8, 0, 8, StopReason.NOT_FOUND), (), None, None)
    others = [
        first,
        EngineOutput(3, (7, 8), None, 0, None, (), None, None),
        EngineOutput(4, (), None, 0, None, (), None, None),
        EngineOutput(5, (7,), FinishReason.STOP, 0, None, (), None, None),
        EngineOutput(6, (7,), None, 0, None, logprobs, None, None),
        EngineOutput(7, (), FinishReason.ERROR, 0, None, (), None, "it broke"),
    ]
    plain = [EngineOutput(one, (one + 100,), None, 3, None, (), None, None) for one in (20, 21)]
    message = stepped([plain[0], *others, plain[1]], 9, 0.5)
    assert message == Stepped(tuple(others), 9, 0.5, (20, 21), (120, 121))
    assert message.num_generated == 2 + 1 + 2 + 0 + 1 + 1 + 0
    assert from_worker.decode(pack(message)[4:]) == message
