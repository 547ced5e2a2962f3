"""Which models the backends run.

mlx-lm and `transformers` have more architectures than quire's own equations: the mlx and the torch backend run them.

A model of another library is tried when it is loaded: two short prompts in three steps over a paged cache. The backend
compares the logits of the steps with those of the library's own cache. A model whose logits differ is refused: a wrong
position or a wrong key changes them completely. Some models rotate keys by the longest request of a pass. The trial
finds this without a long prompt if the first prompt has the last positions of the context (`first_positions`): the
other one runs alone and beside it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import re
import resource
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.backends.machine import is_apple_silicon
from quire.core.step import SeqSlice
from quire.core.values import SamplingParams
from quire.errors import UnsupportedModel, install_command
from quire.weights.config import DTYPES, QUANTIZED
from quire.weights.families import GGUF_ARCHITECTURES
from quire.weights.fields import show
from quire.weights.other import find_other_layers
from quire.weights.spec import AttentionSpec, ModelSpec

log = logging.getLogger(__name__)

MLX_GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3")  # whose GGUF files mlx-lm can be given
MIN_TRANSFORMERS = (5, 10)
# Errors that tell where another library's code failed, not what is wrong with a model.
_INTERNAL_ERRORS = (
    AttributeError, LookupError, TypeError, NameError, AssertionError, NotImplementedError, ArithmeticError,
    ImportError, RecursionError,
)  # fmt: skip
_INTERNAL_TEXT = re.compile("is not in list|invalid literal|values to unpack|could not convert|NoneType")
MAX_ERROR_CHARS = 300
_QUANTIZED = (*QUANTIZED, "compression_config")


def mlx_reads(spec: ModelSpec) -> bool:
    """Return whether the mlx backend runs a model: GGUF files only of some families, and no recurrent states."""
    if any(not isinstance(layer.mixer, AttentionSpec) for layer in spec.layers):
        return False
    return spec.architecture not in GGUF_ARCHITECTURES or spec.family in MLX_GGUF_FAMILIES


def refuse_unsupported(spec: ModelSpec) -> None:
    """Raise if quire's own equations do not run the model: for every backend but mlx and fake."""
    if spec.unsupported:
        if spec.has_other_layers:
            raise UnsupportedModel(spec.unsupported)
        hint = transformers_hint() if spec.quantization in DTYPES else ""  # transformers runs no packed weights
        raise UnsupportedModel(f"{spec.unsupported}{hint}{mlx_hint()}")


def transformers_hint() -> str:
    """Return advice to run a model through transformers."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            return f". Many models run through transformers: {install_command('torch transformers')}"
    return ". The torch backend may run it, through transformers: --backend torch"


def mlx_hint() -> str:
    """Return advice to try the mlx backend, on machines that can run it."""
    if importlib.util.find_spec("mlx_lm") is not None:
        return ". The mlx backend may run it: --backend mlx"
    if is_apple_silicon():
        return ". The mlx backend may run it: install mlx-lm, then use --backend mlx"
    return ""


def backend_hint(spec: ModelSpec, config: Mapping[str, Any] | None) -> str:
    """Return advice for a model that mlx-lm does not run. `config`: config.json; None for a GGUF file."""
    if not spec.unsupported:
        return ". The native backend runs it: --backend native"
    return "" if config is None or find_transformers_problem(config) else transformers_hint()


def describe_error(error: BaseException, otherwise: str) -> str:
    """Return the text of another library's error, on one line; `otherwise` if it is not meant for users.

    Such a text ("'NoneType' object has no attribute 'get'") goes to the log.
    """
    text = re.sub(r"\b[A-Z]\w*Error: ", "", " ".join(str(error).split()))
    if not text or isinstance(error, _INTERNAL_ERRORS) or _INTERNAL_TEXT.search(text):
        log.info("%s: %s: %s", otherwise, type(error).__name__, show(text))
        return otherwise
    text = text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def find_mlx_problem(model_type: object) -> str:
    """Return why mlx-lm does not run a `model_type` of config.json; empty: it may run it.

    mlx-lm has a module for each type, and a table of types that use another's module. Importing the table takes
    seconds, so the module is looked for first.
    """
    package = importlib.util.find_spec("mlx_lm")
    if package is None or not package.submodule_search_locations:
        return "mlx-lm is not installed"
    if isinstance(model_type, str) and re.fullmatch(r"[\w-]{1,100}", model_type, re.ASCII):
        if (Path(package.submodule_search_locations[0]) / "models" / f"{model_type}.py").is_file():
            return ""
        import_mlx_lm()
        from mlx_lm.utils import MODEL_REMAPPING

        if model_type in MODEL_REMAPPING:
            return ""
    return f"mlx-lm has no models of type {show(model_type)}"


def import_mlx_lm() -> None:
    """Import mlx-lm without its side effect: it lowers the process's limit of open files for good."""
    set_limits = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        import mlx_lm  # noqa: F401
    finally:
        resource.setrlimit = set_limits


def skip_notice(spec: ModelSpec) -> str:
    """Return the line that tells users which parts of the file are not used; empty: all are."""
    if not spec.skipped:
        return ""
    parts = " and ".join(spec.skipped)
    return f"{parts} {'are' if len(spec.skipped) > 1 else 'is'} skipped: quire runs the language model only"


def rope_notice(spec: ModelSpec, max_model_len: int) -> str:
    """Return the line that tells users that short requests have the rotary factors of long ones; empty: they have not.

    One set of factors is used for all requests of an engine, because keys in the prefix cache are rotated.
    """
    for layer in spec.layers:
        rope = layer.mixer.rope if isinstance(layer.mixer, AttentionSpec) else None
        if rope is None or not rope.long_factors:
            continue
        if rope.inverse_frequencies(max_model_len) != rope.inverse_frequencies(rope.original_context):
            return long_rope_notice(rope.original_context, max_model_len)
    return ""


def long_rope_notice(original_context: int, max_model_len: int) -> str:
    return (
        f"requests of up to {original_context:,} tokens have the rotary factors of longer ones, because"
        f" max_model_len is {max_model_len:,}: their answers differ from those of transformers."
        f" --max-model-len {original_context} uses the factors of short contexts"
    )


def transformers_notice(architecture: str) -> str:
    """Return the line that tells users who has the equations of their model."""
    version = importlib.metadata.version("transformers")
    return f"{architecture} runs through transformers {version}: correct, slower than a native family"


def find_transformers_problem(config: Mapping[str, Any]) -> str:
    """Return why `transformers` does not run a model with this config.json; empty: the torch backend may run it."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    version = importlib.metadata.version("transformers")
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_TRANSFORMERS:
        return f"transformers {version} is installed: {'.'.join(map(str, MIN_TRANSFORMERS))} or newer is needed"
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}
    if any(holder.get(name) for holder in (config, text) for name in _QUANTIZED):
        return "quantised weights do not run through transformers: use a checkpoint in 16 bits"
    return _find_type_problem(config) or find_other_layers(config)


def _find_type_problem(config: Mapping[str, Any]) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config.get("model_type")
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return ""
    if model_type in CONFIG_MAPPING_NAMES:
        return f"transformers has no decoder of text for models of type {show(model_type)}"
    if config.get("auto_map"):
        return (
            f"models of type {show(model_type)} need the code in their folder, which quire never runs; a newer version"
            " of transformers may have this type"
        )
    return f"transformers has no models of type {show(model_type)}; a newer version may"


LENGTHS = (11, 7)
BLOCK_SIZE = 4
BLOCKS_PER_PROMPT = -(-max(LENGTHS) // BLOCK_SIZE)
NUM_BLOCKS = len(LENGTHS) * BLOCKS_PER_PROMPT + 1  # with the null block
# Largest root mean square error of logits, relative to their spread. In 16 bits, passes of other shapes round
# differently.
MAX_ERROR = 1e-3
MAX_ERROR_16_BITS = 0.15


def make_prompts(vocab_size: int) -> list[list[int]]:
    return [[(7919 * (place + length)) % vocab_size for place in range(length)] for length in LENGTHS]


def first_positions(max_model_len: int) -> tuple[int, int]:
    """Return the first position of each prompt: one ends with the context, the other begins with it."""
    return max(max_model_len - LENGTHS[0], 0), 0


def make_steps(prompts: Sequence[list[int]]) -> Iterator[list[SeqSlice]]:
    """Yield the slices of three steps: chunks of both prompts, a chunk beside a decode, decodes."""
    first, second = (len(prompt) for prompt in prompts)
    cuts = (
        ((0, first - 3), (0, second - 2)),
        ((first - 3, first - 1), (second - 2, second - 1)),
        ((first - 1, first), (second - 1, second)),
    )
    for ranges in cuts:
        yield [_make_slice(index, prompts[index], *ranges[index]) for index in range(len(prompts))]


def last_position(piece: SeqSlice) -> int:
    """Return the position whose logits a slice gives."""
    return piece.start + piece.length - 1


def find_error(errors: Sequence[float], *, is_exact: bool) -> float | None:
    """Return the error if it is too large. `is_exact`: the model computes in fp32.

    In 16 bits, rounding may lead a token to other experts, which changes single rows; an error in a pass changes all.
    """
    error = max(errors) if is_exact else statistics.median(errors)
    return None if error <= (MAX_ERROR if is_exact else MAX_ERROR_16_BITS) else error


def _make_slice(index: int, tokens: list[int], start: int, end: int) -> SeqSlice:
    return SeqSlice(
        request_id=index,
        epoch=0,
        batch_index=index,
        tokens=tokens[start:end],
        start=start,
        length=end - start,
        block_table=[1 + 2 * place + index for place in range(BLOCKS_PER_PROMPT)],  # blocks of both in turn
        history=tokens,
        wants_token=True,
        sampling=SamplingParams(temperature=0.0),
        num_prompt_tokens=len(tokens),
    )
