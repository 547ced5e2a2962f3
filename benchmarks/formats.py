"""Measures how far formats move a model's distributions: those of `quire quantize`, and the KV cache in FP8.

    python benchmarks/formats.py
    python benchmarks/formats.py --only kv-fp8

Converts a folder of plain safetensors to each format and compares the logits with those of the source, both on the
torch backend in fp32, over a part of the inputs of `tests.precision`. Without --model, the source is the default model
with its weights expanded to fp32. Its file has 4 bits, so these weights were rounded once already. For `kv-fp8` the
weights are those of the source, and only keys and values are rounded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import harness
from precision import Source

from quire.backends.kv_memory import KVSpec
from quire.errors import InvalidRequest
from quire.weights.hub import resolve
from quire.weights.opening import open_checkpoint
from quire.weights.quantization import FORMATS
from quire.weights.quantizing import quantize_folder
from tests.precision import Reference, Verdict
from tests.weights.plain_folder import write_plain_folder

GROUP_SIZES = (32, 64, 128)
KV_FP8 = "kv-fp8"


def judge(source: Source, folder: Path, num_threads: int | None, kv_cache_dtype: str = "auto") -> Verdict:
    model = Reference(folder, num_threads, kv_cache_dtype)
    try:
        return source.judge(model)
    finally:
        model.close()


def kv_share(folder: Path) -> float:
    """Return the bytes of a token in FP8, relative to 16 bits."""
    checkpoint = open_checkpoint(folder)
    spec = checkpoint.spec
    checkpoint.close()
    return KVSpec.of(spec, is_fp8=True).block_bytes(1, 2) / KVSpec.of(spec).block_bytes(1, 2)


def row(form: str, group: str, size: float, one: Verdict) -> str:
    return (
        f"{form:12}{group:>6}{size:7.2f}{one.mean_kl:10.5f}{one.max_kl:9.4f}{one.agreement:9.2%}"
        f"{one.perplexity_ratio:12.5f}"
    )


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--model", help="folder of plain safetensors (default: the default model, expanded)")
    parser.add_argument("--only", nargs="+", choices=[*FORMATS, KV_FP8], default=[*FORMATS, KV_FP8])
    parser.add_argument("--threads", type=int, help="compute threads")
    parser.add_argument("--windows", type=int, nargs="+", default=[512, 512], help="tokens of each window of text")
    parser.add_argument("--chats", type=int, default=10, help="chats to compare, not 1")
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        work = Path(name)
        plain = resolve(args.model) if args.model else write_plain_folder(work / "plain", resolve(None))
        source = Source(plain, args.threads, args.windows, args.chats)
        print(f"{'format':12}{'group':>6}{'size':>7}{'mean KL':>10}{'max KL':>9}{'top-1':>9}{'perplexity':>12}")
        for form in args.only:
            if form == KV_FP8:
                print(row(form, "-", kv_share(plain), judge(source, plain, args.threads, "fp8")))
                continue
            is_grouped = not FORMATS[form].is_float
            for size in GROUP_SIZES if is_grouped else (128,):
                target = work / f"{form}-{size}"
                try:
                    report = quantize_folder(plain, target, form, size)
                except InvalidRequest as error:
                    print(f"{form}, groups of {size}: {error}", file=sys.stderr)
                    continue
                share = report.num_bytes / report.num_source_bytes
                harness.say(row(form, str(size) if is_grouped else "-", share, judge(source, target, args.threads)))
    num_positions = sum(last - first for passage in source.passages for _, first, last in passage.parts)
    print(f"{num_positions} positions. size: of the weights, relative to the source in {source.dtype};")
    print("of kv-fp8, of keys and values, relative to 16 bits.")
    print("perplexity: relative to the source.")


if __name__ == "__main__":
    main()
