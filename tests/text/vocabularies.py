"""Small vocabularies for tests: trained on a few sentences, or written by hand."""

from __future__ import annotations

import functools
import json
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOLS = ("<think>", "</think>", "<tool_call>")  # added, not special: as in Qwen
CORPUS = (
    "The quick brown fox jumps over the lazy dog. The dog does not mind. user assistant system",
    "Ein kleiner Text mit Umlauten: äöü ß, und noch ein Wort. 1234 5678 90",
    "日本語のテキスト。中文也有一些。 emoji: 🎉🎉 👩‍💻",
    "def main(argv: list[str]) -> int:\n    return len(argv)\n\n\n",
)
# Difficult texts that every tokenizer must encode and decode without loss.
TEXTS = (
    "",
    " ",
    "a",
    " a",
    "a ",
    "Hello, world!",
    "  two  spaces  ",
    "\n\n\n\ttabs\r\n",
    "I'm sure they'LL say it's 'fine'",
    "1234567890 3.14 ①②③ ½ ٣٤",
    "naïve café Ångström e\u0301 o\u0308",
    "日本語テキスト。中文",
    "עברית العربية हिन्दी ไทย",
    "🎉👩‍💻🏳️‍🌈🇩🇪",
    "\x00\x01\x7f\u200b\u200d\ufeff",
    "\U0010ffff\U000f0000\ue000",
    "x" * 300,
    "a\u0300" * 50,
    'for (int i=0; i<10; i++) { printf("%d\\n", i); }',
    "<|im_start",
    "\u2581 is not a space",
    "<0x0A>",
)


@functools.cache
def _trained() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(list(TOOLS))
    return str(tokenizer.to_str())


def library_tokenizer(metadata: dict[str, Any]) -> Any:
    """The tokenizer of the library for GGUF metadata, with its pre-tokenizer and decoder."""
    from tokenizers import Tokenizer

    from quire.text.vocab_spec import check_spec, gguf_vocab

    spec = gguf_vocab(metadata).spec
    check_spec(spec)
    return Tokenizer.from_str(json.dumps(spec))


def byte_level_json() -> dict[str, Any]:
    """A tokenizer.json in the style of GPT-2 with ChatML. A new copy, which tests may modify."""
    spec: dict[str, Any] = json.loads(_trained())
    return spec


def byte_level_gguf(pre: str = "gpt-2") -> dict[str, Any]:
    """The same vocabulary as GGUF metadata."""
    spec = byte_level_json()
    ids = dict(spec["model"]["vocab"]) | {token["content"]: token["id"] for token in spec["added_tokens"]}
    tokens = sorted(ids, key=lambda token: int(ids[token]))
    types = [3 if token in SPECIAL else 4 if token in TOOLS else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


PIECES = (
    "\u2581t", "he", "\u2581the", "in", "er", "\u2581a", "\u2581w", "\u2581wor", "or", "ld", "\u2581world",
    "\u2581\u2581", "llo", "ll", "\u2581he", "\u2581hello", "hello", "an", "and", "\u2581and", "on", "es",
    "\u2581\u2581\u2581\u2581",
)  # fmt: skip


def sentencepiece_gguf(*, prefix: bool = True) -> dict[str, Any]:
    """A SentencePiece vocabulary: control tokens, all bytes, pieces by rank, single characters last."""
    letters = sorted(set("".join(PIECES)) | set("abcdefghijklmnopqrstuvwxyz.,!?é日<|>/_"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *letters]
    tokens += ["[INST]", "\n\n", "<tool>"]
    num_pieces = len(PIECES) + len(letters)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(num_pieces)] + [-1000.0] * 3,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * num_pieces, 3, 4, 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
