"""Measures how far formats move a model's distributions: those of `quire quantize`, and the KV cache in FP8.

    python benchmarks/formats.py
    python benchmarks/formats.py --only kv-fp8

Converts a folder of plain safetensors to each format and compares the logits with those of the source, both on the
torch backend in fp32, over a part of the inputs of `tests.precision`. Without --model, the source is the default model
with its weights expanded to fp32. Its file has 4 bits, so these weights were rounded once already. For `kv-fp8` the
weights are those of the source, and only keys and values are rounded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tests` is not installed

from quire.backends.kv_memory import KVSpec
from quire.engine.model_text import ModelText
from quire.errors import InvalidRequest
from quire.weights.hub import resolve
from quire.weights.opening import open_checkpoint
from quire.weights.quantizing import FORMATS, quantize_folder
from tests.precision import Passage, Reference, Verdict, chat_passages, chat_prompts, judge_all, text_passages
from tests.weights.plain_folder import write_plain_folder

GROUP_SIZES = (32, 64, 128)
KV_FP8 = "kv-fp8"


class Source:
    """The logits of the source on all passages."""

    def __init__(self, folder: Path, num_threads: int | None, windows: Sequence[int], num_chats: int) -> None:
        text = ModelText.open(folder)
        reference = Reference(folder, num_threads)
        prompts = chat_prompts(text)[:num_chats]
        answers = reference.answer(prompts, text.eos_token_ids)
        self.passages: list[Passage] = [
            *text_passages(text, windows, has_rest=False),
            *(chat_passages(prompts, answers) if prompts else ()),
        ]
        self._known = {one.tokens: reference.logits(list(one.tokens)) for one in self.passages}
        self.dtype = text.spec.dtype
        text.close()
        reference.close()

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        return self._known[tuple(tokens)]


def measure(source: Source, folder: Path, num_threads: int | None, kv_cache_dtype: str = "auto") -> Verdict:
    model = Reference(folder, num_threads, kv_cache_dtype)
    try:
        return judge_all(source.passages, source, model)[-1]
    finally:
        model.close()


def cases() -> list[tuple[str, int]]:
    """Return all formats, with the group sizes that each has."""
    return [(name, size) for name, form in FORMATS.items() for size in (GROUP_SIZES if form.is_grouped else (128,))]


def kv_share(folder: Path) -> float:
    """Return the bytes of a token in FP8, relative to 16 bits."""
    checkpoint = open_checkpoint(folder)
    spec = checkpoint.spec
    checkpoint.close()
    return KVSpec.of(spec, is_fp8=True).block_bytes(1, 2) / KVSpec.of(spec).block_bytes(1, 2)


def convert(form: str, size: int, plain: Path, target: Path) -> tuple[Path, float]:
    """Return the folder of a format, and its size relative to that of the source."""
    if form == KV_FP8:
        return plain, kv_share(plain)
    report = quantize_folder(plain, target, form, size)
    return target, report.num_bytes / report.num_source_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of plain safetensors (default: the default model, expanded)")
    parser.add_argument("--only", nargs="+", choices=[*FORMATS, KV_FP8], help="formats to measure (default: all)")
    parser.add_argument("--threads", type=int, help="compute threads")
    parser.add_argument("--windows", type=int, nargs="+", default=[512, 512], help="tokens of each window of text")
    parser.add_argument("--chats", type=int, default=10, help="chats to compare, not 1")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        work = Path(name)
        plain = resolve(options.model) if options.model else write_plain_folder(work / "plain", resolve(None))
        source = Source(plain, options.threads, options.windows, options.chats)
        rows = [f"{'format':12}{'group':>6}{'size':>7}{'mean KL':>10}{'max KL':>9}{'top-1':>9}{'perplexity':>12}"]
        for form, size in [*cases(), (KV_FP8, 0)]:
            if options.only and form not in options.only:
                continue
            try:
                folder, share = convert(form, size, plain, work / f"{form}-{size}")
            except InvalidRequest as error:
                print(f"{form}, groups of {size}: {error}", file=sys.stderr)
                continue
            one = measure(source, folder, options.threads, "fp8" if form == KV_FP8 else "auto")
            group = str(size) if form in FORMATS and FORMATS[form].is_grouped else "-"
            rows.append(
                f"{form:12}{group:>6}{share:7.2f}{one.mean_kl:10.5f}{one.max_kl:9.4f}{one.agreement:9.2%}"
                f"{one.perplexity_ratio:12.5f}"
            )
            if options.json:
                print(json.dumps({"format": form, "group_size": size, "size": share, "mean_kl": one.mean_kl}))
        print("\n".join(rows))
        num_positions = sum(last - first for passage in source.passages for _, first, last in passage.parts)
        print(f"{num_positions} positions. size: of the weights, relative to the source in {source.dtype};")
        print("of kv-fp8, of keys and values, relative to 16 bits.")
        print("perplexity: relative to the source.")


if __name__ == "__main__":
    main()
