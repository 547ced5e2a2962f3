"""LLM with a tiny model: batching, streams, samples, interrupts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.core.check import check_scheduler
from quire.engine.generation import Delta, EngineOutput, Generation, GenerationParams
from quire.engine.llm import LLM, Conversation, Prompt
from quire.errors import InvalidRequest, ModelNotFound

SHORT = GenerationParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, num_blocks=300, max_num_seqs=8, threads=1, max_waiting=16) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm: LLM) -> Iterator[None]:
    yield
    assert not llm.engine.has_work
    assert llm.cache_stats().num_in_use == 0
    check_scheduler(llm.engine.scheduler)


def test_prompts_are_texts_or_token_ids(llm: LLM) -> None:
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


def test_a_bar_counts_the_answers_on_a_terminal(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    for several, progress in ((["a", "b"], False), (["a"], True)):
        llm.generate(several, SHORT, progress=progress)
        assert "answers" not in capsys.readouterr().err
    llm.chat(["a", "b"], SHORT)
    assert "answers" in capsys.readouterr().err


def test_more_prompts_than_the_queue_can_hold(llm: LLM) -> None:
    outputs = llm.generate(
        [f"The dog {i}" for i in range(60)], GenerationParams(n=2, seed=1, max_tokens=3, ignore_eos=True)
    )
    assert len(outputs) == 60
    assert all(len(output.completions) == 2 for output in outputs)


def test_chat_uses_the_template(llm: LLM) -> None:
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


def test_an_answer_that_cannot_be_decoded_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Generation] = []

    class Fragile(Generation):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

        def push(self, index: int, output: Any) -> Delta:
            if made.index(self) == 1:
                raise UnicodeError("broken")
            return super().push(index, output)

    monkeypatch.setattr("quire.engine.llm.Generation", Fragile)
    outputs = llm.generate(["The", "dog", "does"], SHORT)
    assert [output.completions[0].error is None for output in outputs] == [True, False, True]
    assert outputs[2].usage.completion_tokens == 6


def test_calls_may_be_nested(llm: LLM) -> None:
    params = GenerationParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = [llm.generate(prompt, params)[0].text for prompt in ("The quick", "does not")]
    inner: list[str] = []
    outer = llm.generate(
        "The quick", params, on_output=lambda *_: inner.append(llm.generate("does not", params)[0].text)
    )
    assert (outer[0].text, set(inner)) == (alone[0], {alone[1]})


def test_threads_may_share_a_model(llm: LLM) -> None:
    params = GenerationParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [f"The dog {i}" for i in range(8)]
    alone = [llm.generate(prompt, params)[0].text for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: llm.generate(prompt, params)[0].text, prompts))
    assert together == alone


def test_a_closed_model_raises(tiny_model: Path) -> None:
    llm = LLM(tiny_model, num_blocks=50, threads=1)
    llm.close()
    llm.close()
    with pytest.raises(InvalidRequest, match="closed"):
        llm.generate("The quick", SHORT)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 5, [5], "x"])
def test_invalid_params_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequest, match="params = "):
        llm.chat("hi", params)


def test_ctrl_c_waits_for_the_end_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, was_whole = llm.engine.step, []

    def interrupted() -> list[EngineOutput]:
        os.kill(os.getpid(), signal.SIGINT)
        outputs = step()
        was_whole.append(True)
        return outputs

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("The quick", SHORT)
    assert was_whole
    monkeypatch.undo()
    assert llm.generate("The quick", SHORT)[0].usage.completion_tokens == 6


def test_min_tokens_applies_to_stop_strings(llm: LLM) -> None:
    whole = llm.generate("The quick", GenerationParams(temperature=0, max_tokens=30, ignore_eos=True))[0].text
    stop = whole[1:3]
    long = GenerationParams(temperature=0, max_tokens=30, min_tokens=10, stop=stop, ignore_eos=True)
    assert llm.generate("The quick", long)[0].usage.completion_tokens >= 10
    short = GenerationParams(temperature=0, max_tokens=30, stop=stop, ignore_eos=True)
    assert llm.generate("The quick", short)[0].usage.completion_tokens < 10


@pytest.mark.parametrize("prompts", [None, 5, b"hello", {"a": 1}, [["a"]], [None], [[1.5]], [b"x"]])
def test_invalid_prompts_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(prompts, SHORT)


def test_an_interrupted_call_frees_everything(llm: LLM) -> None:
    def interrupt(_number: int, _delta: Delta) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["The quick"] * 5, SHORT, on_output=interrupt)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["The", [1] * 5000], r"prompts\[1\]: prompt of 5000 tokens"),
        ([99999], r"^prompt: token id 99999"),
        ("", "no tokens"),
        ("x" * 1_000_000, "characters"),
    ],
    ids=["long", "outside", "empty", "text"],
)
def test_all_prompts_are_checked_before_the_first_runs(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompts, SHORT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 10**7}, "block_size = "),
        ({"max_num_seqs": 10**8}, "max_num_seqs = "),
        ({"patience": "x"}, "patience = "),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching = "),
        ({"dtype": "int3"}, "dtype = 'int3'"),
        ({"kv_memory": 10}, "kv_memory = 10 bytes is less"),
        ({"kv_memory": 4 << 40}, "kv_memory = 4,096 GiB is more than"),
        ({"num_blocks": 10**9}, "num_blocks = 1000000000 take"),
        ({"threads": 5000}, "threads = 5000 is more than"),
        ({"max_model_len": 5000}, "max_model_len = 5000 is more than the 4096"),
    ],
)
def test_settings_are_checked_by_name(tiny_model: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        LLM(tiny_model, **settings)


def test_an_unknown_model() -> None:
    with pytest.raises(ModelNotFound):
        LLM("no-such-model-anywhere")
