"""Loads any checkpoint into a model of mlx-lm.

A folder is read by mlx-lm, which reads weights quantised by MLX or by other common tools; a GGUF file is read by
`gguf_model`.
Parameters of MLX are computed when they are evaluated. They are evaluated module by module, so the peak memory is the
model plus one module.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
from mlx.nn.layers.base import Module
from mlx.utils import tree_map_with_path

from quire.backends.base import BackendOptions, Progress
from quire.backends.mlx.gguf_model import load_tensors
from quire.backends.mlx.parameters import evaluate, file_errors, main_layout, quantize_layers
from quire.backends.mlx.spec_model import MODEL_TYPES, apply_spec, config_from_spec, file_norm_shift, known_spec
from quire.errors import InvalidRequest, ModelFileError, UnsupportedModel
from quire.weights.checkpoint import PACKED_TYPES, Checkpoint
from quire.weights.config import MAX_LAYERS
from quire.weights.families import BY_ARCHITECTURE
from quire.weights.fields import member, read_json, show
from quire.weights.gguf import GgufCheckpoint
from quire.weights.opening import DummyCheckpoint
from quire.weights.safetensors import SafetensorsCheckpoint
from quire.weights.spec import ModelSpec

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
DUMMY_SEED = 0
DUMMY_STD = 0.02  # as most models are initialised: answers are nonsense, but every number is finite
MAX_EXPERTS = 1024
QUANT_CONFIG = "hf_quant_config.json"  # of NVIDIA's files, read by mlx-lm

_MODEL_TYPE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)  # it becomes part of a module's name


def load_model(checkpoint: Checkpoint, options: BackendOptions, progress: Progress | None = None) -> Module:
    """Load a folder, a GGUF file or a dummy into a model of mlx_lm.models. Raises only quire's errors and MemoryError.

    dtype "auto" is the type of the file's weights. For a quantised GGUF it is float16, which holds the file's scales
    exactly, but bfloat16 for Gemma, whose activations exceed the range of float16. On a CPU it is float32: MLX's
    products with 4-bit weights take 43 times as long there in float16, and experts are computed in float32 only.
    """
    if options.dtype != "auto" and options.dtype not in DTYPES:
        raise InvalidRequest(f"dtype = {options.dtype!r}: the MLX backend has auto, {', '.join(DTYPES)}")
    dtype = "float32" if options.dtype == "auto" and mx.default_device().type == mx.cpu else options.dtype
    if _has_own_reader(checkpoint):
        return load_from_tensors(checkpoint, options, dtype, progress)
    with file_errors(checkpoint.path):
        is_dummy = isinstance(checkpoint, DummyCheckpoint)
        model = _make_dummy(checkpoint, options) if is_dummy else _open_folder(checkpoint, options)
        if dtype != "auto":
            _cast(model, DTYPES[dtype])
        if options.quantize is not None:
            if (layout := main_layout(model)) is not None:
                raise InvalidRequest(
                    f"quantize = {options.quantize}: {checkpoint.path} is quantised already, to {layout}"
                )
            quantize_layers(model, options.quantize)
        model.eval()
    evaluate(model, checkpoint.path, progress)
    return model


def _has_own_reader(checkpoint: Checkpoint) -> bool:
    """Return whether quire reads the tensors itself.

    mlx-lm knows only the older tensor names of a multimodal Gemma with plain weights. Of quantised weights, it reads
    neither FP8 nor groups of other sizes than 32 of compressed-tensors.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        return True
    spec = checkpoint.spec
    if isinstance(checkpoint, DummyCheckpoint) or spec.family not in MODEL_TYPES or spec.unsupported:
        return False
    is_packed = any(info.type in PACKED_TYPES for info in checkpoint.tensors.values())
    return is_packed or spec.architecture == "Gemma3ForConditionalGeneration"


# GGUF


def load_from_tensors(
    checkpoint: Checkpoint, options: BackendOptions, dtype: str, progress: Progress | None = None
) -> Module:
    """Load a model of quire's own families from the tensors of its checkpoint, GGUF or safetensors."""
    spec = checkpoint.spec
    if dtype == "auto":
        dtype = "bfloat16" if spec.dtype == "float16" and spec.family == "gemma3" else spec.dtype
    with file_errors(checkpoint.path):
        model = _make_model(config_from_spec(spec), spec, options)
    load_tensors(model, checkpoint, DTYPES[dtype], options.quantize, progress)
    model.eval()
    return model


def _make_model(config: dict[str, Any], spec: ModelSpec, options: BackendOptions) -> Module:
    model_class, arguments = find_classes(config)
    model: Module = model_class(arguments.from_dict(config))
    if spec.is_tied and "lm_head" in model:
        model.sanitize({})  # Gemma decides by the names of its weights
    apply_spec(model, spec, options.max_model_len or spec.max_model_len)
    return model


# A folder


def _open_folder(checkpoint: Checkpoint, options: BackendOptions) -> Module:
    """Make the model. Its parameters are not read yet."""
    config = _read_config(checkpoint)
    spec = known_spec(checkpoint.spec, config.get("model_type"))
    fields = _fields_of_spec(spec, config) if spec else _rotary_fields(config, checkpoint)
    model: Module
    model, _ = mlx_lm.utils.load_model(
        checkpoint.path, lazy=True, model_config=fields, get_model_classes=find_classes, trust_remote_code=False
    )
    if spec:
        apply_spec(model, spec, options.max_model_len or spec.max_model_len)
    return model


def _read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config = mlx_lm.utils.load_config(checkpoint.path)
    if not isinstance(config, dict):
        raise ModelFileError(f"{checkpoint.path}: config.json is {show(config)}: not an object")
    if config.get("model_file") is not None:
        raise UnsupportedModel(
            f"{checkpoint.path}: model_file {show(config['model_file'])} is code in the folder, which is not run"
        )
    _check_counts(config, str(checkpoint.path))
    _check_files(checkpoint)
    return config


def _check_files(checkpoint: Checkpoint) -> None:
    """Refuse files that mlx-lm would read and quire has not checked."""
    checked = {path.name for path in checkpoint.files} if isinstance(checkpoint, SafetensorsCheckpoint) else set()
    for path in sorted(checkpoint.path.glob("model*.safetensors")):
        if path.name not in checked:
            raise ModelFileError(f"{path}: is neither the only file of weights nor in their index: remove it")
    if (checkpoint.path / QUANT_CONFIG).exists():
        read_json(member(checkpoint.path, QUANT_CONFIG))


def _check_counts(config: dict[str, Any], source: str) -> None:
    """Raise if there are too many layers or experts, whatever their names: mlx-lm makes a module for each."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_counts(value, source)
            continue
        is_layers, is_experts = name.endswith(("layer", "layers")), "expert" in name and not name.endswith("size")
        most = MAX_LAYERS if is_layers else MAX_EXPERTS
        if (is_layers or is_experts) and isinstance(value, int | float) and value > most:
            raise ModelFileError(f"{source}: {show(name)} in config.json is {show(value)}: more than {most}")


def _fields_of_spec(spec: ModelSpec, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that the spec decides."""
    fields = config_from_spec(spec)
    if not any(spec.windows):  # transformers' Llama has none, but mlx-lm's has, and folders for mlx-lm may use them
        fields = {name: value for name, value in fields.items() if name not in ("layer_types", "sliding_window")}
    if config.get("model_type") != "gemma3":
        return fields
    text = {**(config.get("text_config") or {}), **fields}
    return {"model_type": "gemma3", "text_config": text, "vocab_size": spec.vocab_size}


def _rotary_fields(config: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the names that mlx-lm reads for those of transformers 5, such as `rope_parameters`.

    Most of mlx-lm's models do not read `rope_parameters` and would use their defaults instead.
    """
    fields = _older_names(config)
    text = config.get("text_config")
    if isinstance(text, dict):
        fields["text_config"] = {**text, **_older_names(text)}
        if checkpoint.spec.architecture in BY_ARCHITECTURE:  # transformers reads it outside, mlx-lm inside
            fields["text_config"]["tie_word_embeddings"] = checkpoint.spec.is_tied
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and any(isinstance(value, dict) for value in parameters.values()):
        _, arguments = find_classes(config)
        if "rope_parameters" not in inspect.signature(arguments).parameters:
            raise UnsupportedModel(
                f"{checkpoint.path}: rope_parameters differ by layer type; mlx-lm's {config.get('model_type')} does not"
                " read them"
            )
    return fields


def _older_names(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(num_experts := config.get("num_local_experts"), int):  # as transformers 5 writes it
        found["num_experts"] = num_experts
    parameters = config.get("rope_parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    found |= {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind != "default":
        found["rope_scaling"] = {"type": kind, **parameters}
    return {name: value for name, value in found.items() if config.get(name) is None}


def find_classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
    """Return mlx-lm's classes of a model and of its arguments."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not _MODEL_TYPE.fullmatch(model_type):
        raise ModelFileError(f"model_type is {show(model_type)}: not the name of an architecture")
    try:
        classes: tuple[type[Any], type[Any]] = mlx_lm.utils._get_classes(config)
    except (ValueError, AttributeError):
        raise UnsupportedModel(f"mlx-lm {mlx_lm.__version__} has no model_type {show(model_type)}") from None
    except SystemExit:  # the module of OLMo 1 ends the process if another package is missing
        raise UnsupportedModel(
            f"mlx-lm {mlx_lm.__version__} needs another package for model_type {show(model_type)}"
        ) from None
    return classes


def _cast(model: Module, dtype: mx.Dtype) -> None:
    """Convert all parameters except those that the model wants in float32."""
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def cast(path: str, array: mx.array) -> mx.array:
        is_real = mx.issubdtype(array.dtype, mx.floating)
        return array.astype(dtype) if is_real and may_cast(path) else array

    model.update(tree_map_with_path(cast, model.parameters()))


# Random weights


def _make_dummy(checkpoint: Checkpoint, options: BackendOptions) -> Module:
    spec = checkpoint.spec
    model = _make_model(config_from_spec(spec), spec, options)
    dtype = DTYPES[spec.dtype]
    mx.random.seed(DUMMY_SEED)

    def fill(path: str, array: mx.array) -> mx.array:
        if path.endswith("norm.weight"):
            return mx.full(array.shape, 1 + file_norm_shift(spec) - spec.norm_offset, dtype)
        return mx.random.normal(array.shape, dtype, scale=DUMMY_STD)

    model.update(tree_map_with_path(fill, model.parameters()))
    return model
