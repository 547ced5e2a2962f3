"""Models on this machine: `quire models`, `show`, `rm`, `quantize` and `pull`. Families, and models to suggest.

`quire pull` checks first whether quire can run the model here. For a model of the hub, only the list of files and
config.json are fetched before that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from quire.backends.kv_memory import KVSpec
from quire.cli import terminal
from quire.cli.doctor import (
    FILE_BITS,
    MLX_4BIT,
    MLX_FILE_BITS,
    PACKED_BITS,
    Fit,
    Memory,
    Weights,
    find_backend_problem,
    fit,
    free_disk_bytes,
    needs_mlx,
    read_config,
    read_memory,
)
from quire.cli.terminal import AnswerWriter, confirm_deletion, download_bar, echo, short_path
from quire.errors import DownloadFailed, InvalidRequest, ModelNotFound, QuireError, UnsupportedModel
from quire.sizes import file_size, memory_size
from quire.text.tool_formats import PROMPTED
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import DTYPES
from quire.weights.families import FAMILIES, GGUF_ARCHITECTURES
from quire.weights.fields import Fields
from quire.weights.fields import show as shown
from quire.weights.gguf import is_later_part
from quire.weights.hub import (
    DEFAULT_MODEL,
    ELSEWHERE,
    KNOWN_MODELS,
    HubName,
    LocalModel,
    cache_dir,
    cached_folders,
    failure_reason,
    find_cached,
    find_known,
    import_hub,
    is_model,
    is_path,
    local_models,
    models_dir,
    resolve,
    size_of,
)
from quire.weights.hub import pull as pull_model
from quire.weights.opening import open_checkpoint
from quire.weights.other import read_spec
from quire.weights.quantization import FORMATS, read_quantization
from quire.weights.spec import ModelSpec

OWN_BACKENDS = ("native", "torch")  # mlx runs what mlx-lm runs
AGENT_CONTEXT = 32_768  # tokens; coding agents such as Claude Code send prompts of this order
KV_BYTES = 2  # of one element of the KV cache in 16 bits
CONTEXT_SHOWN = 32_768
DEFAULT_FORMAT = "fp8"
DEFAULT_GROUP_SIZE = 128
TEXT_COLUMNS = ("quire pull ...", "name", "architecture", "family", "type", "path")


def models(
    families: Annotated[
        bool, typer.Option("--families", help="List the model families that run, and nothing else.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """List the models on this machine with sizes and paths, and suggest models that run on it."""
    if families:
        echo(json.dumps({"families": family_rows()}, indent=2)) if as_json else _print_families()
        return
    here = [  # with a problem if the backend of this machine does not run it
        replace(model, problem=model.problem or find_backend_problem(model.unsupported, read_config(model.path)))
        for model in local_models()
    ]
    names = {model.name for model in here if not model.problem}
    suggested = suggest(read_memory(), names)
    if as_json:
        echo(json.dumps(_document(here, names, suggested), indent=2))
    else:
        _print_tables(here, names, suggested)


def _document(here: list[LocalModel], names: set[str], suggested: list[tuple[Suggestion, Fit]]) -> dict[str, object]:
    return {
        "local": [{**asdict(model), "path": str(model.path)} for model in here],
        "known": [{**asdict(model), "is_local": model.name in names} for model in KNOWN_MODELS.values()],
        "suggested": [
            {**asdict(one), "size_bytes": one.size_bytes, "device": place.device} for one, place in suggested
        ],
    }


def _print_tables(here: list[LocalModel], names: set[str], suggested: list[tuple[Suggestion, Fit]]) -> None:
    rows = [
        (model.name, model.architecture, model.quantization, file_size(model.size_bytes), short_path(model.path))
        for model in here
        if not model.problem
    ]
    if rows:
        columns = ("name", "architecture", "type", "size", "path")
        terminal.show(terminal.table(columns, rows, texts=TEXT_COLUMNS))
    for model in here:
        if model.problem:
            terminal.show(f"{model.name}: {model.problem} ({short_path(model.path)})")
    missing = [known for known in KNOWN_MODELS.values() if known.name not in names]
    if missing or suggested:
        terminal.show(*([""] if names else []), "Can be pulled and runs here:")
        rows = [(one.name, "gguf", "", file_size(one.size_bytes), "") for one in missing]
        rows += [
            (one.name, one.family, one.type, file_size(one.size_bytes), f"{one.max_model_len:,}")
            for one, _ in suggested
        ]
        columns = ("quire pull ...", "family", "type", "size", "context")
        terminal.show(terminal.table(columns, rows, texts=TEXT_COLUMNS))
    if suggested:
        terminal.show(f"Coding agents need at least {AGENT_CONTEXT:,} tokens of context, and KV memory for them.")


# Families


def family_rows() -> list[dict[str, Any]]:
    """Return one row per family, as plain values."""
    return [
        {
            "family": row.name,
            "models": row.models,
            "architectures": list(row.architectures),
            "gguf": row.gguf,
            "backends": list(OWN_BACKENDS),
            "formats": ["safetensors", "gguf"],
            "has_experts": row.experts is not None,
            "has_windows": row.windows.value != 0,
            "tools": row.tools or PROMPTED.name,
            "reasoning": row.reasoning or None,
        }
        for row in FAMILIES
    ]


def _print_families() -> None:
    heads = ("FAMILY", "MODELS", "TOOLS", "REASONING")
    rows = [(row["family"], row["models"], row["tools"], row["reasoning"] or "") for row in family_rows()]
    terminal.show(
        terminal.table(heads, rows, texts=heads, pad_edge=False, header_style="bold"),
        "\nEach runs on the native and torch backends, from safetensors and GGUF files. The mlx backend runs the models"
        "\nof mlx-lm. Other decoders run through transformers on the torch backend: `quire doctor PATH` says which.",
    )


# Suggestions


@dataclass(frozen=True, slots=True)
class Suggestion:
    name: str  # for `quire pull`
    family: str
    parameters: str
    type: str  # of most weights
    size_gb: float
    max_model_len: int

    @property
    def size_bytes(self) -> int:
        return int(self.size_gb * 1e9)

    @property
    def weights(self) -> Weights:
        return Weights({self.type: int(self.size_bytes * 8 / {**FILE_BITS, **MLX_FILE_BITS}[self.type])})


# Models of the hub that quire runs, for `quire models`: families it supports, in file types it reads. Sizes are of the
# download, rounded. A GGUF in 4 bits is for a CPU, a folder in 16 bits for an NVIDIA GPU, and a folder in MLX's 4 bits
# for Apple silicon.
SUGGESTIONS = (
    Suggestion("Qwen/Qwen3-0.6B-GGUF:Q8_0", "qwen3", "0.6B", "Q8_0", 0.64, 40_960),
    Suggestion("ggml-org/gemma-3-1b-it-GGUF:Q4_K_M", "gemma3", "1B", "Q4_K", 0.81, 32_768),
    Suggestion("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", "llama", "1B", "Q4_K", 0.81, 131_072),
    Suggestion("Qwen/Qwen3-1.7B-GGUF:Q8_0", "qwen3", "1.7B", "Q8_0", 1.8, 40_960),
    Suggestion("bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", "llama", "3B", "Q4_K", 2.0, 131_072),
    Suggestion("ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", "gemma3", "4B", "Q4_K", 2.5, 131_072),
    Suggestion("bartowski/microsoft_Phi-4-mini-instruct-GGUF:Q4_K_M", "phi3", "4B", "Q4_K", 2.5, 131_072),
    Suggestion("unsloth/Qwen3-4B-Instruct-2507-GGUF:Q4_K_M", "qwen3", "4B", "Q4_K", 2.5, 262_144),
    Suggestion("Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M", "qwen2", "7B", "Q4_K", 4.7, 32_768),
    Suggestion("Qwen/Qwen3-8B-GGUF:Q4_K_M", "qwen3", "8B", "Q4_K", 5.0, 40_960),
    Suggestion("Qwen/Qwen3-14B-GGUF:Q4_K_M", "qwen3", "14B", "Q4_K", 9.0, 40_960),
    Suggestion("Qwen/Qwen3-0.6B", "qwen3", "0.6B", "BF16", 1.5, 40_960),
    Suggestion("Qwen/Qwen3-4B-Instruct-2507", "qwen3", "4B", "BF16", 8.0, 262_144),
    Suggestion("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2", "7B", "BF16", 15.2, 32_768),
    Suggestion("Qwen/Qwen3-8B", "qwen3", "8B", "BF16", 16.4, 40_960),
    Suggestion("Qwen/Qwen3-14B", "qwen3", "14B", "BF16", 29.5, 40_960),
    Suggestion("Qwen/Qwen3-32B", "qwen3", "32B", "BF16", 65.5, 40_960),
    Suggestion("mlx-community/Qwen3-0.6B-4bit", "qwen3", "0.6B", MLX_4BIT, 0.34, 40_960),
    Suggestion("mlx-community/Llama-3.2-1B-Instruct-4bit", "llama", "1B", MLX_4BIT, 0.70, 131_072),
    Suggestion("mlx-community/Qwen3-1.7B-4bit", "qwen3", "1.7B", MLX_4BIT, 0.97, 40_960),
    Suggestion("mlx-community/Llama-3.2-3B-Instruct-4bit", "llama", "3B", MLX_4BIT, 1.8, 131_072),
    Suggestion("mlx-community/Phi-4-mini-instruct-4bit", "phi3", "4B", MLX_4BIT, 2.2, 131_072),
    Suggestion("mlx-community/Qwen3-4B-Instruct-2507-4bit", "qwen3", "4B", MLX_4BIT, 2.3, 262_144),
    Suggestion("mlx-community/Qwen2.5-Coder-7B-Instruct-4bit", "qwen2", "7B", MLX_4BIT, 4.3, 32_768),
    Suggestion("mlx-community/Qwen3-8B-4bit", "qwen3", "8B", MLX_4BIT, 4.6, 40_960),
    Suggestion("mlx-community/Qwen3-14B-4bit", "qwen3", "14B", MLX_4BIT, 8.3, 40_960),
    Suggestion("mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit", "qwen3_moe", "30B", MLX_4BIT, 17.2, 262_144),
    Suggestion("mlx-community/Qwen3-32B-4bit", "qwen3", "32B", MLX_4BIT, 18.4, 40_960),
)
KINDS = {"cuda": ("BF16",), "metal": (MLX_4BIT,), "cpu": ("Q8_0", "Q4_K")}  # types that are suggested for a device


def suggest(memory: Memory, local_names: set[str]) -> list[tuple[Suggestion, Fit]]:
    """The models that fit into the free memory, smallest first; those on this machine are left out.

    With an NVIDIA GPU: folders in 16 bits. On Apple silicon: folders in MLX's 4 bits. On other machines: GGUF files.
    """
    device = "metal" if memory.has_metal else "cuda" if memory.gpu_total else "cpu"
    local_repos = {name.partition(":")[0] for name in local_names}
    absent = [one for one in SUGGESTIONS if one.name.partition(":")[0] not in local_repos]
    places = [(one, fit(one.weights, memory)) for one in absent if one.type in KINDS[device]]
    fitting = [(one, place) for one, place in places if place.device == device and place.is_free]
    return sorted(fitting, key=lambda row: row[0].size_gb)


# quire show


def show(
    name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A name from `quire models`, a folder or a .gguf file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Print the chat template and nothing else.")] = False,
) -> None:
    """Show the facts of a model on this machine: family, size, context, memory, chat template."""
    path = resolve(name)
    with closing(open_checkpoint(path)) as checkpoint:
        facts = find_facts(checkpoint, path)
        text = checkpoint.tokenizer_files().chat_template
    if template:
        AnswerWriter().say(f"{text or ''}\n")  # a pipe gets it unchanged
    elif as_json:
        echo(json.dumps(facts, indent=2))
    else:
        for label, value in _lines(facts):
            echo(f"{label:14}{value}")


def find_facts(checkpoint: Checkpoint, path: Path) -> dict[str, Any]:
    spec = checkpoint.spec
    weights = Weights.of(checkpoint, path)
    place = fit(weights, read_memory())
    backend = ", with mlx" if weights.mlx_bytes is not None and place.device else ""
    problem = find_backend_problem(spec.unsupported, read_config(path))
    # MLX packs several weights into a number: shapes do not say how many there are
    is_counted = not spec.unsupported or spec.quantization in DTYPES
    counts = sorted(weights.counts.items(), key=lambda one: -one[1]) if is_counted else []
    return {
        "path": str(path),
        "size_bytes": size_of(path),
        "family": spec.family,
        "architecture": spec.architecture,
        "num_parameters": sum(count for _, count in counts) or None,
        "quantization": spec.quantization,
        "weights": dict(counts),
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
        "runs_here": problem or f"{place}{backend}",
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


# quire rm


class Removal(NamedTuple):
    """Files of a model."""

    name: str
    path: Path  # a folder is removed with all below it
    files: Sequence[Path]


def rm(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A downloaded model that `quire models` lists.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a downloaded model from the disk."""
    found = find_removal(name)
    size = file_size(sum(file.lstat().st_size for file in found.files if not file.is_symlink()))
    question = f"Delete {found.name}, {size}, from {short_path(found.path)}?"
    confirm_deletion(f"{found.name} ({size})", question, is_confirmed=yes)
    for file in found.files:
        file.unlink(missing_ok=True)
    if found.path.is_dir():
        for path in sorted(found.path.rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
        found.path.rmdir()
    echo(f"deleted {found.name}: {size} freed")


def find_removal(name: str) -> Removal:
    """The files to delete. Refuses models that `quire pull` did not download."""
    known = find_known(name)
    if known is not None:
        path = models_dir() / known.file_name
        if not path.is_file():
            raise ModelNotFound(f"{known.name} is not on this machine")
        return Removal(known.name, path, [path])
    path = Path(name).expanduser()
    if "/" not in name and (own := models_dir() / f"{name}.gguf").is_file():
        path = own
    if is_path(name) or is_model(path):
        raise InvalidRequest(f"{name}: quire did not download this model; delete {path.absolute()} yourself")
    hub_name = HubName.parse(name)
    homes = {repo: folder.parent.parent for repo, folder in cached_folders()}
    if hub_name is None or hub_name.repo not in homes:
        raise ModelNotFound(f"{name}: no such model on this machine; `quire models` lists them")
    home = homes[hub_name.repo]
    if hub_name.gguf is None:
        files = [path for path in sorted(home.rglob("*")) if path.is_symlink() or path.is_file()]
        return Removal(hub_name.repo, home, files)
    return _one_gguf(name, home)


def _one_gguf(name: str, home: Path) -> Removal:
    """The links of one model in the snapshots, and the blobs they point to."""
    model = next((one for one in local_models() if one.name == name), None)
    path = model.path if model is not None else resolve(name)
    stem = path.name.partition("-00001-of-")[0]
    parts = [path, *(file for file in path.parent.glob("*.gguf") if is_later_part(file) and file.name.startswith(stem))]
    blobs = [part.resolve() for part in parts if part.is_symlink()]
    return Removal(name, path, [*parts, *(blob for blob in blobs if blob.is_relative_to(home))])


# quire quantize


def quantize(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A folder of safetensors, or a downloaded model that has one.")
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to write. It must not exist.")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="fp8: blocks of 128 x 128; fp8-channel: a scale per output, faster on a GPU; w4a16, w8a16: 4"
            " or 8 bits in groups; w4a16-asym: 4 bits with zero points.",
        ),
    ] = DEFAULT_FORMAT,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            help="Weights that share a scale, for w4a16, w4a16-asym and w8a16: 32, 64 or 128. Default: 128.",
        ),
    ] = None,
) -> None:
    """Write a copy of a model with quantised weights, in the layout of compressed-tensors, which vLLM reads too.

    Weights are rounded to the nearest code, without calibration. Norms, embeddings, head and routers stay as they are.
    """
    if group_size is not None and form in FORMATS and FORMATS[form].is_float:
        raise InvalidRequest(f"--group-size {group_size}: the format {form} has no groups")
    from quire.weights.quantizing import quantize_folder  # needs numpy

    with terminal.bytes_bar(f"writing {target.name}", "left") as progress:
        report = quantize_folder(resolve(source), target, form, group_size or DEFAULT_GROUP_SIZE, progress)
    before, after = file_size(report.num_source_bytes), file_size(report.num_bytes)
    echo(f"{short_path(target)}: {report.num_matrices:,} matrices quantised to {form}, {before} -> {after}")


# Types in names of GGUF files: `Q4_K_M` is a mixture, mostly of Q4_K.
_TYPE = re.compile(r"(?<![A-Za-z0-9])([IT]Q\d_[A-Z0-9]+|Q\d(?:_[01K])?|BF16|F16|F32|FP16|MXFP4|NVFP4)", re.IGNORECASE)
_MIXTURES = {"FP16": "F16", "IQ2_M": "IQ2_S", "IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S"}  # names that are no types
SAFETENSORS_TYPES = {dtype: name for name, dtype in DTYPES.items()}


def pull(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A name from `quire models`, or org/name of the Hugging Face hub; org/name:Q4_K_M for a GGUF file.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Download a model even if it will not run here.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the bare path.")] = False,
) -> None:
    """Download a model; without a name, the default one. Checks first whether the model runs on this machine."""
    wanted = name or DEFAULT_MODEL
    check_download(wanted, is_forced=force)
    with download_bar(wanted) as progress:
        path = pull_model(wanted, progress)
    echo(json.dumps({"name": wanted, "path": str(path)}) if as_json else str(path))


def check_download(name: str, *, is_forced: bool) -> None:
    """Refuse a model that would not run here, before it is downloaded. Models on this machine are not checked."""
    known, hub_name = find_known(name), None if is_path(name) else HubName.parse(name)
    if known is not None:
        free = free_disk_bytes(cache_dir())
        if free < known.size_bytes and not is_forced and not (models_dir() / known.file_name).is_file():
            size, there = file_size(known.size_bytes), file_size(free)
            raise DownloadFailed(f"{known.name} needs {size}, and {there} are free in {cache_dir()}")
    elif hub_name is not None and find_cached(hub_name) is None and not import_hub().constants.HF_HUB_OFFLINE:
        echo(_check(hub_name, is_forced=is_forced), err=True)


# Models of the hub


@dataclass(frozen=True, slots=True)
class Download:
    """The files that `quire pull` would download, and their metadata."""

    name: HubName
    files: Mapping[str, int]  # files to download: name -> bytes
    others: tuple[str, ...]  # the other files in the top folder of the repository
    config: Mapping[str, Any]  # config.json; empty if there is none
    gguf: Mapping[str, Any]  # the hub's metadata of the GGUF files: architecture, context_length

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def type(self) -> str | None:
        """The type of most weights; None: not known."""
        if self.name.gguf is not None:
            found = _TYPE.search(next(iter(self.files), ""))
            return None if found is None else _MIXTURES.get(found[1].upper(), found[1].upper())
        with suppress(QuireError):  # weights that are quantised in a way that is not known
            quantization = read_quantization(Fields("config.json", self.config))
            if quantization is not None and quantization.schemes:
                scheme = quantization.schemes[0]
                return "FP8" if scheme.is_float else f"INT{scheme.bits}"
        dtype = str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16")
        return SAFETENSORS_TYPES.get(dtype.removeprefix("torch."))

    @property
    def spec(self) -> ModelSpec | str:
        """The spec of a folder of safetensors, or why it cannot be read."""
        try:
            return read_spec(self.config, {}, "config.json", self.type or "BF16")
        except QuireError as error:
            return str(error)

    @property
    def weights(self) -> Weights:
        num_bytes = sum(size for file, size in self.files.items() if file.endswith((".safetensors", ".gguf")))
        bits = FILE_BITS | PACKED_BITS
        kind = self.type if self.type in bits else "BF16" if self.name.gguf is None else "Q4_K"
        counts = {kind: int(num_bytes * 8 / bits[kind])}
        if self.name.gguf is None:
            if isinstance(spec := self.spec, str):
                return Weights(counts)
            return Weights(counts, spec.has_experts, spec.has_sigmoids, num_bytes if needs_mlx(spec) else None)
        # The families that a GGUF file may belong to: it has experts if all of them have.
        experts = [family.experts for family in FAMILIES if family.gguf == self.gguf.get("architecture")]
        if not experts or None in experts:
            return Weights(counts)
        return Weights(counts, True, any(one is not None and one.bias for one in experts))

    @property
    def max_model_len(self) -> int | None:
        if self.name.gguf is None:
            return None if isinstance(spec := self.spec, str) else spec.max_model_len
        context = self.gguf.get("context_length")
        return context if type(context) is int else None


def look_up(name: HubName) -> Download:
    """Query the hub for the files of a model. Raises DownloadFailed."""
    hub = import_hub()
    try:
        info = hub.HfApi().model_info(name.repo, files_metadata=True)
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or () if "/" not in one.rfilename}
        config: Any = {}
        if "config.json" in sizes:
            config = json.loads(Path(hub.hf_hub_download(name.repo, "config.json")).read_text("utf-8"))
    except Exception as error:  # network failures raise exceptions of many classes
        raise DownloadFailed(f"{name.repo}: {failure_reason(hub, error)}") from None
    files = {
        file: size
        for file, size in sorted(sizes.items())
        if any(fnmatch(file, pattern) for pattern in name.patterns)
        and not any(fnmatch(file, pattern) for pattern in ELSEWHERE)
        and not (name.gguf is not None and file.startswith("mmproj"))
    }
    others = tuple(file for file in sorted(sizes) if file not in files)
    gguf = getattr(info, "gguf", None) or {}
    return Download(name, files, others, config if isinstance(config, dict) else {}, gguf)


def find_problems(found: Download, memory: Memory, num_free_bytes: int) -> list[str]:
    """Reasons why the model would not run here; empty if it would."""
    problem = _file_problem(found) or _family_problem(found)
    problems = [problem] if problem else []
    if found.num_bytes > num_free_bytes:
        problems.append(f"it needs {file_size(found.num_bytes)}, and {file_size(num_free_bytes)} are free on the disk")
    place = fit(found.weights, memory)
    if not place.device:
        total = memory.gpu_total if memory.has_metal else max(memory.cpu_total, memory.gpu_total)
        owner = "the GPU may use" if memory.has_metal else "this machine has"
        problems.append(f"its weights take {memory_size(place.num_bytes)}, and {owner} {memory_size(total)}")
    return problems


def _file_problem(found: Download) -> str:
    name = found.name
    if name.gguf is not None:
        if not found.files:
            choices = [file for file in found.others if file.endswith(".gguf")]
            there = f"; there are {', '.join(choices[:12])}" if choices else ""
            return f"no GGUF file of {name.repo} matches {name.gguf!r}{there}"
        if found.type is not None and found.type not in FILE_BITS:
            return f"weights of type {found.type} are not supported; these are: {', '.join(FILE_BITS)}"
        return ""
    if any(file.endswith(".safetensors") for file in found.files) and found.config:
        return ""
    if any(file.endswith(".gguf") for file in found.others):
        return f"the repository has GGUF files: name one, as in `quire pull {name.repo}:Q4_K_M`"
    if any(file.endswith((".bin", ".pt", ".pth", ".ckpt")) for file in found.others):
        return "its weights are in a format that can run code when read (.bin, .pt): only safetensors and GGUF are read"
    return "the repository has no config.json with safetensors and no GGUF file"


def _family_problem(found: Download) -> str:
    if found.name.gguf is not None:
        family = found.gguf.get("architecture")
        if family is None or family in GGUF_ARCHITECTURES:
            return ""
        return f"architecture {shown(family)} is not supported; these run: {', '.join(GGUF_ARCHITECTURES)}"
    spec = found.spec
    return spec if isinstance(spec, str) else find_backend_problem(spec.unsupported, found.config)


def _check(name: HubName, *, is_forced: bool) -> str:
    """Refuse a model that would not run here, unless forced. Returns one line about the download."""
    found, memory = look_up(name), read_memory()
    problems = find_problems(found, memory, free_disk_bytes(Path(import_hub().constants.HF_HUB_CACHE)))
    title = f"{name.repo}{f':{name.gguf}' if name.gguf else ''}"
    if problems and (not is_forced or not found.files):
        advice = "" if not found.files else ". --force downloads it anyway"
        raise UnsupportedModel(f"{title}: {'; '.join(problems)}{advice}")
    place = fit(found.weights, memory)
    parts = [f"{title}: {file_size(found.num_bytes)}", *(["forced: " + "; ".join(problems)] if problems else [])]
    if context := found.max_model_len:
        parts.append(f"{context:,} tokens of context")
    if place.device and not problems:
        parts.append(f"runs on {place}{'' if found.weights.mlx_bytes is None else ', with mlx'}")
    return ", ".join(parts)
