"""Grammars compiled for a real vocabulary, refused grammars, and constrained answers of a worker."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil  # type: ignore[import-untyped]
import pytest

from quire.core.values import FinishReason, SamplingParams
from quire.engine import grammars as grammars_module
from quire.engine.generation import GenerationOutput, GenerationParams, GenerationRequest
from quire.engine.grammars import Compiled, GrammarQueue, Grammars
from quire.engine.llm import LLM
from quire.engine.worker.client import EngineClient
from quire.engine.worker.protocol import Add
from quire.errors import InvalidRequest, QueueFull
from quire.text.grammar import (
    Grammar,
    GrammarKind,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    token_grammar,
)
from quire.text.tokenizer import Tokenizer
from tests.engine.serving import client, result, usage, worker_pid
from tests.waiting import paused

pytestmark = pytest.mark.anyio

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return grammars_module.open_tokenizer(tiny_model, "auto")[0]


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(lambda: (tokenizer, (2, 3)), tokenizer.vocab_size + 5)  # some models have more logits than tokens
    yield made
    made.close()


def allowed(mask: bytes) -> set[int]:
    return {8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


SLICED = (
    ({"type": "string", "maxLength": 12}, '"a cat, \\"Zoë\\""'),
    ({"type": "string", "minLength": 3, "maxLength": 40}, '"The quick brown fox jumps"'),
    ({"type": "string", "format": "email"}, '"john.smith42@mail.example.com"'),
    ({"type": "string", "format": "uri"}, '"https://example.com/a?b=c"'),
    ({"type": "string", "pattern": "^[a-z0-9-]{3,20}$"}, '"a-slug-of-2026"'),
    ({"type": "array", "items": {"enum": ["new", "newer", "Old"]}}, '["new", "Old", "newer"]'),
    ({"type": "number", "minimum": -1, "maximum": 10}, "9.75"),
)


def test_slices_change_no_mask(default_model: Path) -> None:
    """They only affect speed: every mask is the same without them."""
    tokenizer, eos_token_ids = grammars_module.open_tokenizer(default_model, "auto")
    compiler = grammars_module._Compiler(tokenizer, eos_token_ids, tokenizer.vocab_size)
    tokenizers = (compiler._tokenizer, compiler._tokenizer.with_slices([]))
    for schema, text in SLICED:
        source = compiler.translate(json_schema_grammar(schema))
        sliced, plain = (compiler._library.LLMatcher(one, source, log_level=0) for one in tokenizers)
        for token in (*tokenizer.encode_plain(text, at_start=False), eos_token_ids[0]):
            assert sliced.compute_bitmask() == plain.compute_bitmask()
            assert sliced.consume_token(token), text
            assert plain.consume_token(token)
        assert sliced.is_stopped()


def follows(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the text is a complete answer: every token is allowed, and end-of-text after the last."""
    matcher = grammars.compile(grammar).matcher()
    tokens = tokenizer.encode_plain(text, at_start=False)
    for place, token in enumerate(tokens):
        if token not in allowed(matcher.mask()):
            return False
        if matcher.consume(token):
            return place == len(tokens) - 1
    return 2 in allowed(matcher.mask())


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (regex_grammar("[0-9]{3}"), ["123"], ["12", "1234", "abc"]),
        (regex_grammar("^a+$"), ["a", "aaa"], ["", "ab"]),
        (choice_grammar(["yes", "no", 'a.b*"c" \\d']), ["yes", "no", 'a.b*"c" \\d'], ["y", "axb", "maybe"]),
        (json_schema_grammar(PERSON), ['{"name": "Bo", "age": 7}'], ['{"name": "Bo"}', '{"name": "Bo", "age": 121}']),
        (json_object_grammar(), ["{}", '{"a": [1, null]}'], ["[]", "{", '{"a": }']),
        (lark_grammar('start: "a" b\nb: "b" | "c" b'), ["ab", "accb"], ["a", "acc"]),
        (json_schema_grammar({"type": "string", "not": {"format": "x"}}, strict=False), ['"x"'], ["1"]),
    ],
)
def test_masks_allow_exactly_what_matches(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not follows(grammars, tokenizer, grammar, text)] == []
    assert [text for text in wrong if follows(grammars, tokenizer, grammar, text)] == []


def test_special_tokens_and_ids_without_a_token_are_never_allowed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    mask = grammars.compile(regex_grammar(r"(?s:.)*")).matcher().mask()
    assert len(mask) == -(-(tokenizer.vocab_size + 5) // 8)
    assert allowed(mask) & (tokenizer.special_ids | tokenizer.control_ids | {3}) == {2, 3}  # the answer may end here
    assert max(allowed(mask)) < tokenizer.vocab_size
    mask = grammars.compile(regex_grammar(r"(?s:.)+")).matcher().mask()
    assert allowed(mask) & (tokenizer.special_ids | tokenizer.control_ids | {3}) == set()  # and may not end here


def as_it_is(schema: dict[str, Any]) -> Grammar:
    """A schema that was not rewritten: the compiler omits no keyword by itself."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


REFUSED: list[tuple[str, Grammar, str]] = [
    ("an open group", regex_grammar("(a"), "unclosed group"),
    ("a look-around", regex_grammar("(?=a)b"), "look-around"),
    ("a regex that matches nothing", regex_grammar(r"[^\s\S]"), "no answer matches it"),
    ("a schema that refers to itself", as_it_is({"$ref": "#"}), "no answer matches it"),
    ("a remote schema", as_it_is({"$ref": "http://127.0.0.1:9/x"}), "does not fetch"),
    ("unenforceable keywords", as_it_is({"type": "array", "uniqueItems": True}), "uniqueItems"),
    ("an unknown format", as_it_is({"type": "string", "format": "color"}), "Unknown format: color"),
    ("x-guidance", as_it_is({"not": {}, "x-guidance": {"lenient": True}}), '"not"'),
    ("a contradiction", json_schema_grammar({"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
    ("an unknown rule", lark_grammar("start: nothing"), "nothing"),
    ("a chain of rules", lark_grammar("\n".join(f"a{i}: a{i + 1}" for i in range(4000)).replace("a0", "start")), ""),
    (
        "a chain of references",
        as_it_is(
            {"$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1200)}, "$ref": "#/$defs/d0"}
        ),
        "",
    ),
]


@pytest.mark.parametrize(("grammar", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused_grammars_name_the_problem(grammars: Grammars, grammar: Grammar, message: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar") as caught:
        grammars.compile(grammar)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400
    assert grammars.find(grammar) is None


def test_a_grammar_whose_first_token_takes_too_long_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.grammars.FIRST_MASK_LIMIT_S", -1.0)
    with pytest.raises(InvalidRequest, match=r"grammar is too complex: choosing its first token takes [0-9]+ ms"):
        grammars.compile(regex_grammar("a{1000}"))


def test_a_grammar_that_compiles_too_long_is_refused(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="compiling it takes more than 2 s"):
        grammars.compile(as_it_is({"type": "integer", "multipleOf": 99999999}))
    assert grammars.compile(regex_grammar("next")).matcher().mask()


def test_a_stopped_child_is_replaced(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.text.child_process.IDLE_LIMIT_S", 0.5)
    grammars.compile(regex_grammar("before"))
    (child,) = [one for one in psutil.Process().children() if "trial_child.py" in " ".join(one.cmdline())]
    child.suspend()
    assert grammars.compile(regex_grammar("after a stop")).matcher().mask()
    assert not child.is_running()


def test_the_cache_of_compiled_grammars_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_COMPILED", 3)
    made = Grammars(lambda: (tokenizer, (2,)), tokenizer.vocab_size)
    try:
        first = made.compile(regex_grammar("a0"))
        for i in range(1, 6):
            made.compile(regex_grammar(f"a{i}"))
            assert made.compile(regex_grammar("a0")) is first  # recently used, so it stays
        assert len(made._compiled) == 3
        assert made.find(regex_grammar("a1")) is None
        monkeypatch.setattr(grammars_module, "MAX_COMPILED_BYTES", 1)
        made.compile(regex_grammar("b"))
        assert len(made._compiled) == 0
        assert made._num_bytes == 0
    finally:
        made.close()


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    grammar = json_schema_grammar({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}})
    jobs = {id(grammars.submit(grammar)) for _ in range(5)}
    assert len(jobs) == 1
    assert grammars.compile(grammar) is grammars.find(grammar)


def test_a_model_without_end_of_text_refuses_grammars(tokenizer: Tokenizer) -> None:
    made = Grammars(lambda: (tokenizer, ()), tokenizer.vocab_size)
    with pytest.raises(InvalidRequest, match="no end-of-text token"):
        made.compile(regex_grammar("a"))
    made.close()


def add_of(number: int, pattern: str, tenant: str) -> Add:
    grammar = regex_grammar(pattern)
    return Add((number,), GenerationRequest.of((1,), SamplingParams(), grammar=grammar, tenant=tenant))


class ManualGrammars(Grammars):
    """Jobs end when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, Future[Compiled]]] = []

    def find(self, grammar: Grammar, owner: str = "") -> Compiled | None:  # noqa: ARG002
        return None

    def submit(self, grammar: Grammar, owner: str = "") -> Future[Compiled]:
        job: Future[Compiled] = Future()
        self.jobs.append((f"{owner} {grammar.source}", job))
        return job

    def fail(self, name: str) -> None:
        dict(self.jobs)[name].set_exception(InvalidRequest(name))


def test_tenants_take_turns_in_the_grammar_queue() -> None:
    grammars = ManualGrammars()
    waiting = GrammarQueue(grammars, lambda: None)
    for number in range(6):
        waiting.add(add_of(number, f"g{number}", "greedy"))
    assert [name for name, _ in grammars.jobs] == ["greedy g0", "greedy g1"]  # a thread stays free for other tenants
    waiting.add(add_of(10, "p", "patient"))
    waiting.add(add_of(11, "q", "patient"))
    assert [name for name, _ in grammars.jobs[2:]] == ["patient p"]
    waiting.cancel(0)
    waiting.take()
    assert len(grammars.jobs) == 3  # the thread still compiles the grammar of the cancelled request
    grammars.fail("greedy g0")
    assert not waiting.take()
    assert [name for name, _ in grammars.jobs[3:]] == ["greedy g2"]
    grammars.fail("greedy g1")
    assert [message.request_ids for message, _ in waiting.take()] == [(1,)]
    assert [name for name, _ in grammars.jobs[4:]] == ["patient q"]  # its turn
    assert len(waiting) == 6


def test_a_full_grammar_queue_leaves_room_for_other_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.grammars.MAX_COMPILING", 4)
    waiting = GrammarQueue(ManualGrammars(), lambda: None)
    for number in range(4):
        waiting.add(add_of(number, f"g{number}", "greedy"))
    for number in (10, 11):
        waiting.add(add_of(number, f"p{number}", "patient"))
    for tenant in ("greedy", "patient"):
        with pytest.raises(QueueFull, match="6 requests wait"):
            waiting.add(add_of(20, "x", tenant))


def test_owners_share_no_compiled_grammar(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast answer would reveal that another key has sent the same schema."""
    monkeypatch.setattr(grammars_module, "MAX_COMPILED", 3)
    made = Grammars(lambda: (tokenizer, (2,)), tokenizer.vocab_size)
    try:
        made.submit(regex_grammar("secret"), "alice").result()
        assert made.find(regex_grammar("secret"), "alice") is not None
        assert made.find(regex_grammar("secret"), "bob") is None
        for number in range(5):
            made.submit(regex_grammar(f"b{number}"), "bob").result()
        assert made.find(regex_grammar("secret"), "alice") is not None  # the owner with the most loses its oldest
        assert made.find(regex_grammar("b3"), "bob") is not None
        assert made.find(regex_grammar("b2"), "bob") is None
    finally:
        made.close()


def test_large_grammars_displace_none_of_an_owner_with_many_small_ones(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "MAX_COMPILED_BYTES", 1000)
    made = Grammars(lambda: (tokenizer, (2,)), tokenizer.vocab_size)
    sizes = [("small", number, 10) for number in range(20)] + [("large", number, 300) for number in range(9)]
    for owner, number, num_bytes in sizes * 2:  # the second time, each replaces itself or returns
        made._remember((owner, regex_grammar(f"{number}")), cast("Compiled", SimpleNamespace(num_bytes=num_bytes)))
    assert all(made.find(regex_grammar(f"{number}"), "small") is not None for number in range(20))
    assert made.find(regex_grammar("8"), "large") is not None
    assert made._num_bytes == 20 * 10 + 2 * 300


def test_the_engine_imports_without_llguidance() -> None:
    code = "import sys; sys.modules['llguidance'] = None\nimport quire.engine.worker.worker, quire.engine.llm"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_llguidance_the_error_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    made = Grammars(lambda: (tokenizer, (2,)), tokenizer.vocab_size)
    with pytest.raises(ImportError, match=r"a structured answer needs llguidance, .* -m pip install llguidance"):
        made.compile(regex_grammar("a"))
    made.close()


# Through a worker


def ask(engine: EngineClient, prompt: str = "The quick", **params: Any) -> GenerationRequest:
    settings = GenerationParams(**{"max_tokens": 60, "seed": 1, **params})
    return engine.text.request(engine.text.encode(prompt, engine.max_model_len), settings)


async def answer(engine: EngineClient, **params: Any) -> GenerationOutput:
    generation = await engine.submit(ask(engine, **params))
    return await result(generation)


async def test_answers_of_a_worker_follow_their_grammars(tiny_model: Path) -> None:
    """With random weights, so that only the masks can be the reason."""
    async with client(tiny_model, backend="native") as engine:
        grammar = regex_grammar("(?:[a-z]{2} ){3}[0-9]{4}")
        answers = await asyncio.gather(
            answer(engine, grammar=grammar, n=3),
            answer(engine, grammar=choice_grammar(["left", "right"])),
            answer(engine),
        )
        for completion in answers[0].completions:
            assert re.fullmatch("([a-z]{2} ){3}[0-9]{4}", completion.text)
            assert completion.finish_reason is FinishReason.STOP
        assert len({completion.text for completion in answers[0].completions}) > 1
        assert answers[1].text in ("left", "right")
        alone = await answer(engine, grammar=grammar, n=3)
        assert [one.text for one in alone.completions] == [one.text for one in answers[0].completions]
        assert await usage(engine) == (0, 0, 0)


def test_the_mask_of_a_token_list_is_constant(grammars: Grammars) -> None:
    matcher = grammars.compile(token_grammar([9, 4, 9])).matcher()
    for token in (4, 9, 4):
        assert allowed(matcher.mask()) == {4, 9}  # the end of text is not among them
        assert not matcher.consume(token)
    with pytest.raises(InvalidRequest, match="grammar: token id 4000000 is outside the vocabulary"):
        grammars.compile(token_grammar([4, 4_000_000]))
    with pytest.raises(InvalidRequest, match="0 tokens are not 1 to 4096"):
        token_grammar([])


async def test_a_hostile_grammar_does_not_affect_other_requests(tiny_model: Path) -> None:
    """A stream continues while a grammar takes two seconds of CPU time to compile, in the same worker."""
    async with client(tiny_model, backend="fake", device="5ms", max_num_seqs=32) as engine:
        await engine.start()
        pid = worker_pid(engine)
        first = await answer(engine, grammar=regex_grammar("a"))  # the child has started
        assert first.text == "a"
        refused = [
            asyncio.create_task(answer(engine, grammar=grammar))
            for _, grammar, _ in [*REFUSED, ("", as_it_is({"multipleOf": 99999999}), "")]
        ]
        stream = await engine.submit(ask(engine, max_tokens=200, ignore_eos=True))
        num_meanwhile = 0
        async for _ in stream.deltas():
            num_meanwhile += not refused[-1].done()
        assert num_meanwhile >= 10
        found = await asyncio.gather(*refused, return_exceptions=True)
        assert {type(one) for one in found} == {InvalidRequest}
        assert worker_pid(engine) == pid


async def test_a_request_may_be_cancelled_while_its_grammar_is_compiled(tiny_model: Path) -> None:
    async with client(tiny_model, backend="fake") as engine:
        assert (await answer(engine, grammar=choice_grammar(["off"]))).text == "off"  # the child has started
        assert worker_pid(engine) is not None
        (child,) = psutil.Process(worker_pid(engine)).children()
        with paused(child.pid):
            generation = await engine.submit(ask(engine, grammar=regex_grammar("[a-z]{3}")))
            assert await usage(engine) == (0, 1, 0)
            generation.cancel()
            assert await usage(engine) == (0, 0, 0)
        assert (await answer(engine, grammar=choice_grammar(["on"]))).text == "on"


def test_a_stop_string_and_a_bias_hold_inside_a_grammar(tiny_model: Path) -> None:
    with LLM(tiny_model, num_blocks=100, threads=1) as llm:
        grammar = regex_grammar("[ab]{1,30}x[cd]{1,30}")
        (output,) = llm.generate("The", GenerationParams(grammar=grammar, stop="x", max_tokens=200, seed=2))
        assert set(output.text) <= {"a", "b"}
        assert output.completions[0].stop == "x"
        tokens = {token: llm.text.tokenizer.encode_plain(token, at_start=False)[0] for token in "abcd"}
        bias = {tokens["a"]: -100.0, tokens["c"]: -100.0}
        plain = choice_grammar(["a", "b"])
        (output,) = llm.generate("The", GenerationParams(grammar=plain, logit_bias=bias, temperature=0))
        assert output.text == "b"


def test_the_vocabulary_of_a_gguf_is_opened_from_its_file(default_model: Path) -> None:
    made = Grammars(lambda: grammars_module.open_tokenizer(default_model, "auto"), 49152)
    matcher = made.compile(json_object_grammar()).matcher()
    assert not matcher.consume(min(allowed(matcher.mask())))
    made.close()
