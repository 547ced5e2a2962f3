"""Loads a model of `transformers` from a folder, or refuses it by name: no remote code, no pickles, no downloads.

Matrices with the same input, such as q, k and v or gate and up, are merged into one product. Which ones have the same
input is found in a trial pass, so no names are needed. The weights are concatenated once; each `nn.Linear` keeps a view
of its rows. The first of them to be called computes the product for all, the others return their part of it. A call
with another input computes its own product, so results never depend on the order of calls.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.backends.base import Progress
from quire.backends.support import describe_error, find_transformers_problem
from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import Checkpoint
from quire.weights.fields import member, read_json
from quire.weights.opening import DummyCheckpoint
from quire.weights.other import LAYER_TYPES, find_other_layers


class Siblings:
    """Records the inputs of all plain `nn.Linear`s while a model runs."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.inputs: dict[nn.Linear, list[Tensor]] = {}  # kept alive: compared by identity

    @contextmanager
    def recording(self) -> Iterator[None]:
        hooks = [
            module.register_forward_pre_hook(self._record)
            for module in self._model.modules()
            if type(module) is nn.Linear
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _record(self, module: Any, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            self.inputs.setdefault(module, []).append(args[0])

    def groups(self) -> list[list[nn.Linear]]:
        """Return the linears of the same module that were called once, with the same tensor, in the order of calls."""
        found: dict[tuple[int, int, bool, torch.dtype, torch.device], list[nn.Linear]] = {}
        parents = {child: parent for parent in self._model.modules() for child in parent.children()}
        for linear, inputs in self.inputs.items():
            if len(inputs) == 1 and linear in parents:
                weight, has_bias = linear.weight, linear.bias is not None
                kind = (id(parents[linear]), id(inputs[0]), has_bias, weight.dtype, weight.device)
                found.setdefault(kind, []).append(linear)
        return [group for group in found.values() if len(group) > 1 and _can_merge(group)]


def _can_merge(group: list[nn.Linear]) -> bool:
    is_plain = all(not linear._forward_hooks and "forward" not in vars(linear) for linear in group)
    return is_plain and len({linear.weight.data_ptr() for linear in group}) == len(group)


class MergedLinear:
    """One product for several `nn.Linear`s, which return their parts of it."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._weight = _merge([linear.weight for linear in linears])
        biases: list[Any] = [linear.bias for linear in linears]
        self._bias = None if biases[0] is None else _merge(biases)
        self._sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []
        for place, linear in enumerate(linears):
            linear.forward = self._make_forward(place, linear)  # type: ignore[method-assign, assignment]

    def _make_forward(self, place: int, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            part = self._parts[place] if x is self._input else None
            if part is None:
                if place != 0:  # called before the first one, or with another input
                    return F.linear(x, linear.weight, linear.bias)
                self._input = x
                self._parts = list(F.linear(x, self._weight, self._bias).split(self._sizes, -1))  # type: ignore[no-untyped-call]
                part = self._parts[0]
                assert part is not None
            self._parts[place] = None
            if not any(part is not None for part in self._parts):  # all are taken: free the memory
                self._input, self._parts = None, []
            return part

        return forward


def _merge(parts: list[Any]) -> Tensor:
    """Concatenate parameters. Each becomes a view of its rows, so the memory of the parts is freed."""
    merged = torch.cat([part.data for part in parts])
    for part, rows in zip(parts, merged.split([len(part) for part in parts]), strict=True):  # type: ignore[no-untyped-call]
        part.data = rows
    return merged


def merge_siblings(siblings: Siblings) -> int:
    """Merge what was recorded; return the number of merged products."""
    groups = siblings.groups()
    siblings.inputs.clear()
    for group in groups:
        MergedLinear(group)
    return len(groups)


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
    import transformers

    source = str(checkpoint.path)
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
    """Hide the library's warnings and its progress bar, which counts tensors and is reported instead."""
    from transformers.utils import logging

    def make_bar(_: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        items = args[0] if args else settings.get("iterable", ())
        return logging.EmptyTqdm(_reported(items, progress))

    set_hook = getattr(logging, "set_tqdm_hook", lambda _: None)  # versions without it show their own bar
    level, hook = logging.get_verbosity(), set_hook(make_bar)
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        set_hook(hook)


def _reported(items: Iterable[Any], progress: Progress | None) -> Iterator[Any]:
    for place, item in enumerate(items, 1):
        yield item
        if progress is not None and isinstance(items, Sized):
            progress(place, len(items))
