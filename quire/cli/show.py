"""`quire show`: the facts of one model, and whether it runs on this machine."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.backends.kv_memory import KVSpec
from quire.cli.answer_output import AnswerWriter
from quire.cli.backend_fit import find_backend_problem, needs_mlx, read_config
from quire.cli.machine_fit import fit, fit_mlx, read_memory
from quire.cli.models import short_path
from quire.cli.terminal import echo
from quire.sizes import file_size, memory_size
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import DTYPES
from quire.weights.hub import resolve, size_of, weight_bytes

KV_BYTES = 2  # of one element of the KV cache in 16 bits
CONTEXT_SHOWN = 32_768


def show(
    name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A name from `quire models`, a folder or a .gguf file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Print the chat template and nothing else.")] = False,
) -> None:
    """Show the facts of a model on this machine: family, size, context, memory, chat template."""
    from quire.weights.opening import open_checkpoint

    path = resolve(name)
    checkpoint = open_checkpoint(path)
    try:
        facts = find_facts(checkpoint, path)
        text = checkpoint.tokenizer_files().chat_template
    finally:
        checkpoint.close()
    if template:
        AnswerWriter().say(f"{text or ''}\n")  # a pipe gets it unchanged
    elif as_json:
        echo(json.dumps(facts, indent=2))
    else:
        for label, value in _lines(facts):
            echo(f"{label:14}{value}")


def find_facts(checkpoint: Checkpoint, path: Path) -> dict[str, Any]:
    spec = checkpoint.spec
    weights: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        weights[tensor.type.value] += math.prod(tensor.shape)
    if spec.unsupported and spec.quantization not in DTYPES:
        weights.clear()  # MLX packs several weights into a number: shapes do not say how many there are
    memory = read_memory()
    if needs_mlx(spec):
        place = fit_mlx(weight_bytes(path), memory)
    else:
        place = fit(weights, memory, has_experts=spec.has_experts, has_sigmoids=spec.has_sigmoids)
    problem = find_backend_problem(spec.unsupported, read_config(path))
    return {
        "path": str(path),
        "size_bytes": size_of(path),
        "family": spec.family,
        "architecture": spec.architecture,
        "num_parameters": weights.total() or None,
        "quantization": spec.quantization,
        "weights": dict(weights.most_common()),
        "max_model_len": spec.max_model_len,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_heads": spec.attention.num_heads,
        "num_kv_heads": spec.attention.num_kv_heads,
        "vocab_size": spec.vocab_size,
        "skipped": list(spec.skipped),
        "kv_bytes_per_token": KVSpec.of(spec).block_bytes(1, KV_BYTES),
        "window": KVSpec.of(spec).window or None,
        "state_bytes": KVSpec.of(spec).state_bytes(KV_BYTES) or None,
        "context_bytes": KVSpec.of(spec).context_bytes(min(spec.max_model_len, CONTEXT_SHOWN), KV_BYTES),
        "has_chat_template": checkpoint.tokenizer_files().chat_template is not None,
        "memory_bytes": place.num_bytes,
        "runs_on": None if problem else place.device or None,
        "runs_here": problem or (f"{place}, with mlx" if needs_mlx(spec) and place.device else str(place)),
    }


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    num_tokens = min(facts["max_model_len"], CONTEXT_SHOWN)
    kv = memory_size(facts["context_bytes"])
    total = facts["num_parameters"]
    shown = [(kind, count) for kind, count in facts["weights"].items() if count >= total / 200]
    types = ", ".join(f"{kind} {count / total:.0%}" for kind, count in shown) or facts["quantization"]
    is_runnable = facts["runs_on"] is not None
    return [
        ("family", f"{facts['family']} ({facts['architecture']})"),
        *([("parameters", _count(total))] if total else []),
        ("context", f"{facts['max_model_len']:,} tokens"),
        ("quantisation", types),
        ("layers", f"{facts['num_layers']}, hidden size {facts['hidden_size']:,}"),
        ("attention", f"{facts['num_heads']} heads, {facts['num_kv_heads']} KV heads"),
        ("vocabulary", f"{facts['vocab_size']:,} tokens"),
        *([("skipped", f"{', '.join(facts['skipped'])}: text only")] if facts["skipped"] else []),
        ("chat template", "yes; --template prints it" if facts["has_chat_template"] else "none: generate --raw only"),
        ("size", file_size(facts["size_bytes"])),
        ("path", short_path(Path(facts["path"]))),
        ("memory", f"{memory_size(facts['memory_bytes'])} of weights, {kv} of KV cache for {num_tokens:,} tokens"),
        ("runs here", facts["runs_here"] if is_runnable else f"no: {facts['runs_here']}"),
    ]


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"
