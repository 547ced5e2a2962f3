"""Loads a model of `transformers` from a folder, or refuses it by name: no remote code, no pickles, no downloads."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quire.backends.base import Progress
from quire.backends.support import describe_error, find_transformers_problem
from quire.errors import MissingExtra, ModelFileError, UnsupportedModel
from quire.weights.checkpoint import Checkpoint
from quire.weights.fields import read_json
from quire.weights.folder import member
from quire.weights.opening import DummyCheckpoint
from quire.weights.other import LAYER_TYPES, find_other_layers

DUMMY_SEED = 0
PADDING_CHECK = "warn_if_padding_and_no_attention_mask"


def _refuse_stateful(transformers: Any, config: Any, source: str) -> None:
    """Refuse layers with a recurrent state. A class that may have such layers runs if this model has none."""
    text = config.get_text_config()
    values = {name: getattr(text, name, None) for name in LAYER_TYPES}
    problem = find_other_layers(values)
    model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    if not problem and getattr(model_class, "_is_stateful", False) and not any(values.values()):
        problem = "models with a recurrent state do not run"
    if problem:
        raise UnsupportedModel(f"{source}: {problem}")


def load_hf_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> Any:
    """Load a model and its weights. Raises UnsupportedModel with what is wrong."""
    source = str(checkpoint.path)
    transformers = _import_transformers()
    if not checkpoint.path.is_dir():
        raise UnsupportedModel(f"{source}: transformers runs folders of safetensors, not GGUF files")
    problem = find_transformers_problem(read_json(member(checkpoint.path, "config.json")))
    if problem:
        raise UnsupportedModel(f"{source}: {problem}")
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a library that checks little; its errors are of any type
        problem = describe_error(error, "it does not have the fields of its type")
        raise UnsupportedModel(f"{source}: transformers does not read its config.json: {problem}") from None
    config = _neutral(config)
    _refuse_stateful(transformers, config, source)
    with _quiet(progress):
        try:
            if isinstance(checkpoint, DummyCheckpoint):
                model = _make_dummy(transformers, config, dtype, device)
            else:
                model = _load(transformers, config, source, dtype, device)
        except (UnsupportedModel, ModelFileError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            problem = describe_error(error, f"its {type(config).__name__} fails with these settings")
            raise UnsupportedModel(f"{source}: transformers does not load it: {problem}") from error
    return model.eval().requires_grad_(False)


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtra.of("a model that quire has no equations for", "transformers") from None
    return transformers


def silence(model: nn.Module) -> None:
    """Skip the library's check of every input for padding tokens, which waits for the device."""
    for module in model.modules():
        if hasattr(module, PADDING_CHECK):
            setattr(module, PADDING_CHECK, lambda *_, **__: None)


def _neutral(config: Any) -> Any:
    """Remove settings that only training uses, or that would load kernels or other files."""
    for one in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))):
        if one is None:
            continue
        for name in ("fusion_config", "transformers_weights", "distributed_config"):
            if hasattr(one, name):
                setattr(one, name, None)
        for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
            if getattr(one, name, False):
                setattr(one, name, False)
    return config


def _load(transformers: Any, config: Any, source: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Load into the device if `accelerate` is installed, which that needs; else through the host's memory."""
    direct = {"device_map": {"": device}} if device.type != "cpu" and importlib.util.find_spec("accelerate") else {}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
        **direct,
    )
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            names = sorted(str(key) for key in info[kind])
            raise ModelFileError(f"{source}: {len(names)} tensors are missing or have other shapes: {names[0]}, ...")
    return model.to(device)


def _make_dummy(transformers: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Make a model with the random weights of its own initialisation, on the device."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.device(device):
        torch.manual_seed(DUMMY_SEED)
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )


@contextmanager
def _quiet(progress: Progress | None) -> Iterator[None]:
    """Report the library's progress bar to `progress` instead of showing it."""
    from transformers.utils import logging

    def report(_: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        return _Bar(args[0] if args else settings.get("iterable", ()), progress)

    hook = getattr(logging, "set_tqdm_hook", None)
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    previous = hook(report) if hook is not None else None
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if hook is not None:
            hook(previous)


class _Bar:
    """The part of a progress bar that loading uses. Counts tensors, not bytes."""

    def __init__(self, items: Any, progress: Progress | None) -> None:
        self._items = items
        self._progress = progress

    def __iter__(self) -> Iterator[Any]:
        total = len(self._items) if hasattr(self._items, "__len__") else 0
        for place, item in enumerate(self._items, 1):
            yield item
            if self._progress is not None and total:
                self._progress(place, total)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        return None
