"""Offline use, with a tiny model: batched, streamed, forked, interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.core.check import check_scheduler
from quire.core.request import FinishReason
from quire.engine.llm import LLM, Conversation, Prompt
from quire.engine.outputs import Answers, Delta
from quire.engine.params import GenerationParams
from quire.errors import ContextTooLong, InvalidRequest, ModelNotFound

SHORT = GenerationParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, num_blocks=300, max_seqs=8, num_threads=1, max_waiting=16) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm: LLM) -> Iterator[None]:
    yield
    assert not llm.engine.has_work
    assert llm.cache_stats().num_in_use == 0
    check_scheduler(llm.engine.scheduler)


def test_prompts_may_be_one_or_many_texts_or_ids(llm: LLM) -> None:
    text = "The quick brown fox"
    ids = llm.text.tokenizer.encode(text)
    (one,) = llm.generate(text, SHORT)
    (same,) = llm.generate(ids, SHORT)
    prompts: list[Prompt] = [text, ids, "Ein kleiner Text"]
    many = llm.generate(prompts, SHORT)
    assert one.text == same.text == many[0].text == many[1].text != many[2].text
    assert one.prompt_token_ids == tuple(ids)
    assert llm.generate([], SHORT) == []


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [GenerationParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 9)]
    outputs = llm.generate(["The", "dog", "does"], params)
    assert [output.usage.completion_tokens for output in outputs] == [1, 5, 9]
    with pytest.raises(InvalidRequest, match="2 params for 3 prompts"):
        llm.generate(["The", "dog", "does"], params[:2])


def test_more_prompts_than_the_queue_holds(llm: LLM) -> None:
    outputs = llm.generate(
        [f"The dog {i}" for i in range(60)], GenerationParams(n=2, seed=1, max_tokens=3, ignore_eos=True)
    )
    assert len(outputs) == 60
    assert all(len(output.completions) == 2 for output in outputs)


def test_a_seed_fixes_the_draws_alone_and_in_a_crowd(llm: LLM) -> None:
    params = GenerationParams(temperature=1.5, seed=42, n=3, max_tokens=12, ignore_eos=True)
    (alone,) = llm.generate("The quick", params)
    crowd = llm.generate([f"dog {i}" for i in range(9)] + ["The quick"], params)
    assert [one.text for one in crowd[-1].completions] == [one.text for one in alone.completions]
    assert len({one.text for one in alone.completions}) == 3
    (other,) = llm.generate("The quick", GenerationParams(temperature=1.5, seed=43, max_tokens=12, ignore_eos=True))
    assert other.text != alone.text


def test_chat_goes_through_the_template(llm: LLM) -> None:
    (plain,) = llm.chat("Hi <|im_end|>", SHORT)
    assert plain.prompt_token_ids.count(2) == 1  # the template's own; the one in the message is text
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    conversations: list[Conversation] = [messages, "Hi <|im_end|>"]
    both = llm.chat(conversations, SHORT)
    assert both[1].text == plain.text
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.role = 'robot'"):
        llm.chat([{"role": "robot", "content": "Hi"}])
    with pytest.raises(InvalidRequest, match=r"messages\[0\] has the fields"):
        llm.chat([{"role": "user", "text": "Hi"}])


def test_a_callback_sees_every_delta_and_its_failure_ends_its_prompt_alone(llm: LLM) -> None:
    seen: dict[int, str] = {0: "", 1: "", 2: ""}

    def watch(number: int, delta: Delta) -> None:
        seen[number] += delta.text
        if number == 1 and len(seen[1]) > 2:
            raise RuntimeError("enough")

    long = GenerationParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate(["The quick", "Ein kleiner", "dog"], long, on_output=watch)
    assert outputs[0].text == seen[0]
    assert outputs[2].text == seen[2]
    assert outputs[1].completions[0].finish_reason is FinishReason.ERROR
    assert "enough" in (outputs[1].completions[0].error or "")
    assert outputs[1].usage.completion_tokens < 40


def test_an_answer_that_cannot_be_read_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Answers] = []

    class Fragile(Answers):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

        def push(self, index: int, output: Any) -> Delta:
            if made.index(self) == 1:
                raise UnicodeError("broken")
            return super().push(index, output)

    monkeypatch.setattr("quire.engine.llm.Answers", Fragile)
    outputs = llm.generate(["The", "dog", "does"], SHORT)
    assert [output.completions[0].error is None for output in outputs] == [True, False, True]
    assert outputs[2].usage.completion_tokens == 6


def test_a_stream_left_early_is_cancelled(llm: LLM) -> None:
    request = llm.text.request(llm.text.encode("The quick", 100), GenerationParams(max_tokens=500, ignore_eos=True))
    stream = llm.stream(request)
    next(stream)
    stream.close()


def test_an_interrupted_call_leaves_nothing(llm: LLM) -> None:
    def interrupt(_number: int, _delta: Delta) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["The quick"] * 5, SHORT, on_output=interrupt)


def test_bad_prompts_are_refused_before_anything_runs(llm: LLM) -> None:
    prompts: list[Prompt] = ["The", [1] * 5000]
    with pytest.raises(ContextTooLong, match=r"prompts\[1\]: prompt of 5000 tokens"):
        llm.generate(prompts, SHORT)
    with pytest.raises(InvalidRequest, match=r"^prompt: token id 99999"):
        llm.generate([99999], SHORT)
    with pytest.raises(InvalidRequest, match="no tokens"):
        llm.generate("", SHORT)
    with pytest.raises(ContextTooLong, match="characters"):
        llm.generate("x" * 1_000_000, SHORT)


def test_settings_and_models_are_checked_by_name(tiny_model: Path) -> None:
    with pytest.raises(InvalidRequest, match="max_sequences"):
        LLM(tiny_model, max_sequences=3)
    with pytest.raises(InvalidRequest, match="dtype = 'int3'"):
        LLM(tiny_model, dtype="int3")
    with pytest.raises(InvalidRequest, match="kv_bytes = 10 is less"):
        LLM(tiny_model, kv_bytes=10)
    with pytest.raises(InvalidRequest, match=r"kv_bytes = 4,398,046,511,104 is more than"):
        LLM(tiny_model, kv_bytes=4 << 40)
    with pytest.raises(InvalidRequest, match="num_blocks = 1000000000 take"):
        LLM(tiny_model, num_blocks=10**9)
    with pytest.raises(InvalidRequest, match="num_threads = 5000 is more than"):
        LLM(tiny_model, num_threads=5000)
    with pytest.raises(InvalidRequest, match="max_context = 5000 is more than the 4096"):
        LLM(tiny_model, max_context=5000)
    with pytest.raises(ModelNotFound):
        LLM("no-such-model-anywhere")


def test_a_budget_sizes_the_pool(tiny_model: Path) -> None:
    bytes_per_block = 2 * 2 * 2 * 16 * 32 * 4  # keys and values, layers, heads, head size, tokens, fp32
    with LLM(tiny_model, kv_bytes=10 * bytes_per_block + 5, num_threads=1) as llm:
        assert llm.engine.capacity.num_blocks == 10
        assert llm.max_context == 9 * 32
