"""Tests of the default model: logits equal those of `transformers`, and answers do not depend on batching."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.generation import GenerationParams
from quire.engine.llm import as_chat
from quire.engine.model_text import ModelText
from quire.weights.opening import open_checkpoint
from quire.weights.quants import to_float32
from quire.weights.tensors import transformers_parameters
from tests.backends.torch.rig import Answer, Rig, same_rows
from tests.equality import CONDITIONS, answer_alone, compare, compare_on_hits, make_prompts

BOUND = 5e-4  # largest difference of log probabilities, after thirty layers in fp32
NUM_PROMPTS, NUM_TOKENS = 5, 8  # `make equality` uses 300 and 24


@pytest.fixture(scope="module")
def text(default_model: Path) -> Iterator[ModelText]:
    text = ModelText.open(default_model)
    yield text
    text.close()


@pytest.fixture(scope="module")
def rig(default_model: Path) -> Iterator[Rig]:
    rig = Rig(default_model, num_blocks=400, max_num_seqs=16)
    yield rig
    rig.engine.close()


@pytest.fixture(scope="module")
def reference(default_model: Path) -> Any:
    """The Llama model of `transformers` with the same weights, dequantized the same way."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(default_model)
    spec, rope = checkpoint.spec, checkpoint.spec.attention.rope
    assert rope is not None
    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.mlp.size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.attention.num_heads,
        num_key_value_heads=spec.attention.num_kv_heads,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_model_len,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    names = transformers_parameters(spec)
    weights = {name: torch.from_numpy(to_float32(checkpoint.read(own))) for name, (own,) in names.items()}
    missing = model.load_state_dict(weights, strict=False, assign=True)
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    assert not missing.unexpected_keys
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # `to_empty` left its buffer uninitialized
    checkpoint.close()
    return model.eval()


def distance(reference: Any, prompt: tuple[int, ...], answer: Answer) -> float:
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([[*prompt, *answer.tokens]])).logits[0]
    return same_rows(answer, torch.log_softmax(logits, -1), len(prompt))


def chat(text: ModelText, question: str) -> tuple[int, ...]:
    return text.encode_chat(as_chat(question), text.spec.max_model_len)


def test_sampling_defaults_of_the_default_model(text: ModelText) -> None:
    """The model file has none. With those of its authors (top_p = 0.9) a third of first answers are wrong."""
    params = GenerationParams().sampling(text.defaults, text.eos_token_ids)
    assert (params.temperature, params.top_p) == (0.2, 0.5)


def test_logits_are_those_of_transformers(rig: Rig, text: ModelText, reference: Any) -> None:
    """Checks prefill and decode, with and without chunks, then with shared blocks and a copied tail."""
    japan = chat(text, "What is the capital of Japan?")
    rig.reset()
    first = rig.answer(japan, 8)
    assert text.tokenizer.decode(first.tokens) == "The capital of Japan is Tokyo."
    assert distance(reference, japan, first) < BOUND
    peru, spain = (
        chat(text, f"Tell me in one plain sentence: what is the capital of {name}?") for name in ("Peru", "Spain")
    )
    rig.answer(peru, 2)
    rig.num_copies = 0
    shared = rig.answer(spain, 6)
    assert shared.num_cached_tokens > 32
    assert rig.num_copies == 1
    assert distance(reference, spain, shared) < BOUND
    rig.reset(max_chunk_tokens=11)
    chunked = rig.answer(japan, 4)
    assert distance(reference, japan, chunked) < BOUND


@pytest.fixture(scope="module")
def alone(rig: Rig, text: ModelText) -> list[Any]:
    return answer_alone(rig, make_prompts(text, NUM_PROMPTS), NUM_TOKENS)


@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.kept("batched", "preempted", "drafts, step")
def test_greedy_answers_do_not_depend_on_batching(rig: Rig, alone: list[Any], name: str) -> None:
    outcome = compare(rig, alone, name)
    print(f"{name}: {outcome.num_tokens} equal tokens, near ties {outcome.near_ties}")
    assert outcome.differences == []
    assert outcome.num_prompts == NUM_PROMPTS
    assert len(outcome.near_ties) <= 2
    assert bool(outcome.num_preemptions) == (name == "preempted")
    assert bool(outcome.num_accepted) == ("drafts" in name)


def test_greedy_answers_do_not_depend_on_the_cache(rig: Rig, alone: list[Any]) -> None:
    outcome = compare_on_hits(rig, alone)
    assert outcome.differences == []
    assert len(outcome.near_ties) <= 2
    assert outcome.num_cached_tokens == sum(len(one.prompt) - 1 for one in alone)


@pytest.mark.nightly
def test_the_kv_cache_in_fp8(default_model: Path, text: ModelText, rig: Rig) -> None:
    """Its answers are near those of fp32, and depend on chunks and cached prefixes only where tokens nearly tie."""
    japan = chat(text, "What is the capital of Japan?")
    rig.reset()
    expected = rig.answer(japan, 8)
    fp8 = Rig(default_model, num_blocks=400, max_num_seqs=16, kv_cache_dtype="fp8")
    answer = fp8.answer(japan, 8)
    assert answer.tokens == expected.tokens
    kl = torch.stack([(one.exp() * (one - other)).sum() for one, other in zip(expected.rows, answer.rows, strict=True)])
    assert 1e-6 < float(kl.mean()) < 0.02
    assert fp8.engine.runner.facts().kv_bytes * 128 == rig.engine.runner.facts().kv_bytes * 33  # 66 bytes for 256
    alone = answer_alone(fp8, make_prompts(text, NUM_PROMPTS), NUM_TOKENS)
    outcomes = [compare(fp8, alone, "in chunks of 13"), compare_on_hits(fp8, alone)]
    for outcome in outcomes:
        assert outcome.differences == []
        assert len(outcome.near_ties) <= 2
    assert outcomes[1].num_cached_tokens == sum(len(one.prompt) - 1 for one in alone)
    fp8.engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.nightly
def test_weights_stream(default_model: Path) -> None:
    """While loading, memory contains the model and one tensor, never a second copy of the model."""
    script = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "import gguf, numpy, torch\n"
        "from quire.backends.base import BackendOptions\n"
        "from quire.backends.torch.build import make_runner\n"
        "from quire.weights.opening import open_checkpoint\n"
        "def used():\n"
        "    return int(re.search(r'RssAnon:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) * 1024\n"
        "checkpoint = open_checkpoint(Path(sys.argv[1]))\n"
        "before, peak = used(), 0\n"
        "def watch(done, total):\n"
        "    global peak\n"
        "    peak = max(peak, used())\n"
        "make_runner(checkpoint, BackendOptions(num_blocks=10, threads=1), watch)\n"
        "sizes = [info.shape[0] * (info.shape[1:] or (1,))[0] * 4 for info in checkpoint.tensors.values()]\n"
        "print(peak - before, sum(sizes), max(sizes))\n"
    )
    command = [sys.executable, "-c", script, str(default_model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, model, largest = map(int, done.stdout.split())
    assert model < peak < model + 1.5 * largest
