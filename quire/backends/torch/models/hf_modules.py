"""The attention function that models of `transformers` call, over quire's paged cache.

`transformers` calls a registered function with queries, keys and values that are already rotated. A forward pass sets
what the function does (`visiting`): record the calls of a trial pass, or attend to the paged cache. The place of a call
in the pass selects its layer of the cache, because the order of calls is the same in every pass. This also covers
models that call attention twice in a layer, or a layer twice in a pass.

RMS norms of `transformers`, which are six operations, are replaced by the norm of quire's passes. A class of norms is
replaced only if its result on random numbers is that of the standard equation, with weight w or 1 + w.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.backends.torch.forward_pass import Pass
from quire.backends.torch.layers import Heads, RMSNorm
from quire.errors import UnsupportedModel
from quire.weights.spec import AttentionSpec

# T tokens in the row, H query heads, K kv heads, D head size, Dv size of a value

PAGED = "quire"  # names of attention implementations
RECORDING = "quire_recording"  # the same function; it also gets masks

_SINKS = ("s_aux", "sinks")
# Arguments of attention functions that are used here, or that do not change the result.
_KNOWN = {
    *_SINKS, "scaling", "softcap", "sliding_window", "is_causal", "dropout", "position_ids", "position_embeddings",
    "cache_position", "use_cache", "past_key_values", "output_attentions", "output_hidden_states", "return_dict",
}  # fmt: skip


# What the attention function does in this forward pass.
_visitor: ContextVar[PagedAttention | Recorder | None] = ContextVar("visitor", default=None)


@contextmanager
def visiting(visitor: PagedAttention | Recorder) -> Iterator[None]:
    token = _visitor.set(visitor)
    try:
        yield
    finally:
        _visitor.reset(token)


def register() -> None:
    """Make the function known to `transformers`. Without a mask function of its name, models make no masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(RECORDING, _attend)
    AttentionMaskInterface.register(RECORDING, _record_mask)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **settings: Any
) -> tuple[Tensor, None]:
    visitor = _visitor.get()
    assert visitor is not None, "a model runs only inside `visiting`"
    return visitor.attend(module, query, key, value, attention_mask, settings), None


def _record_mask(*args: Any, **settings: Any) -> Tensor | None:
    from transformers.masking_utils import eager_mask

    mask: Tensor | None = eager_mask(*args, **{**settings, "allow_is_bidirectional_skip": False})
    visitor = _visitor.get()
    if isinstance(visitor, Recorder) and mask is not None:
        visitor.masks.append(RecordedMask(mask, settings.get("mask_function")))
    return mask


class RecordedMask(NamedTuple):
    mask: Tensor  # [1, 1, T, T]: 0, or the lowest number for keys that are not seen
    function: Callable[..., Tensor] | None  # (batch index, head, query, key): whether the query sees the key


class AttentionCall(NamedTuple):
    module: nn.Module
    heads: Heads
    value_size: int  # at most the head size


class PagedAttention:
    """Attends to the paged cache in one pass over a step.

    Attends with q [1, H, T, D], k [1, K, T, D] and v [1, K, T, Dv]; returns [1, T, H, Dv].
    """

    def __init__(self, step: Pass, calls: Sequence[AttentionCall]) -> None:
        self.step = step
        self._calls = iter(calls)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: Mapping[str, Any]
    ) -> Tensor:
        del mask, settings  # as in the recorded call
        call = next(self._calls)
        assert call.module is module, "attention is called in another order than in the trial"
        size = call.heads.spec.head_size
        qkv = torch.cat([_rows(one, size) for one in (q, k, v)], 1)  # [T, H + 2K, D]
        out = self.step.attend(qkv.view(len(qkv), -1), call.heads)  # [T, H * D]
        return out.view(1, len(out), -1, size)[..., : call.value_size]


def _rows(x: Tensor, size: int) -> Tensor:
    """Return [T, heads, size] of [1, heads, T, D]: narrow heads are padded with zeros, which change no product."""
    rows = x[0].transpose(0, 1)
    return rows if rows.shape[-1] == size else F.pad(rows, (0, size - rows.shape[-1]))


class Recorder:
    """Records the calls of a trial pass over one prompt, and attends densely.

    The window of a call is taken from its mask's function, because eager attention of `transformers` uses the mask
    only. Masks that are not causal, or not windows, are refused: so are chunks, prefixes and biases.
    """

    def __init__(self, source: str, max_model_len: int) -> None:
        self.calls: list[AttentionCall] = []
        self.masks: list[RecordedMask] = []
        self._stored: list[tuple[Tensor, Tensor, int]] = []  # keys, values, window; kept alive: compared by identity
        self._source = source
        self._max_model_len = max_model_len

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: Mapping[str, Any]
    ) -> Tensor:
        if q.dim() != 4 or len(q) != 1 or k.shape[:1] != q.shape[:1] or k.shape[2] != q.shape[2]:
            raise UnsupportedModel(f"{self._source}: attends to something else than the tokens before")
        others = sorted(
            name for name, value in settings.items() if name not in _KNOWN and value is not None and value is not False
        )
        if others:
            raise UnsupportedModel(f"{self._source}: its attention needs {', '.join(others)}: not supported")
        if "get_seq_length" in inspect.getsource(type(module).forward):
            raise UnsupportedModel(f"{self._source}: its attention takes positions from a cache of the library")
        scale = settings.get("scaling")
        window = self._window(module, mask, settings)
        spec = AttentionSpec(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_size=max(q.shape[-1], v.shape[-1]),
            scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
            rope=None,  # queries and keys are rotated already
            window=window,
            softcap=float(settings.get("softcap") or 0.0),
        )
        sinks = next((settings[name] for name in _SINKS if settings.get(name) is not None), None)
        heads = Heads(self._layer(k, v, window), spec, sinks=sinks)
        self.calls.append(AttentionCall(module, heads, v.shape[-1]))
        return _attend_densely(q, k, v, heads)

    def _layer(self, k: Tensor, v: Tensor, window: int) -> int:
        """Return the cache's layer: layers that attend to the same keys and values share one."""
        for index, (key, value, other) in enumerate(self._stored):
            if key is k and value is v and other == window:
                return index
        self._stored.append((k, v, window))
        return len(self._stored) - 1

    def _window(self, module: nn.Module, mask: Tensor | None, settings: Mapping[str, Any]) -> int:
        is_causal = settings.get("is_causal")
        if (getattr(module, "is_causal", True) if is_causal is None else is_causal) is False and mask is None:
            raise UnsupportedModel(f"{self._source}: attends to later tokens as well: only decoders run")
        if mask is None:
            return int(settings.get("sliding_window") or 0)
        for recorded in self.masks:
            if _is_part(mask, recorded.mask):
                return self._window_of(recorded, settings)
        raise UnsupportedModel(
            f"{self._source}: changes the mask of its attention: position biases and masks of its own do not run"
        )

    def _window_of(self, recorded: RecordedMask, settings: Mapping[str, Any]) -> int:
        if recorded.function is None:
            return 0
        device = recorded.mask.device
        try:
            return find_window(recorded.function, self._max_model_len, device, self._source)
        except IndexError:  # the mask depends on the tokens of this prompt: images, of which it has none
            seen = find_window(recorded.function, recorded.mask.shape[-1], device, self._source)
            return seen or int(settings.get("sliding_window") or 0)


def _is_part(mask: Tensor, whole: Tensor) -> bool:
    """Return whether `mask` is `whole` or a view of it, not changed."""
    if mask is whole:
        return True
    is_view = mask.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return is_view and mask.shape[-2:] == whole.shape[-2:]


def find_window(sees: Callable[..., Tensor], max_model_len: int, device: torch.device, source: str) -> int:
    """Return the number of keys that a query sees, itself included; 0: all before it. Refuses other patterns."""
    length = max(max_model_len, 2)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    places = torch.arange(length, device=device)
    later = places[1:]
    if bool(sees(zero, zero, places[:-1], later).any()):
        raise UnsupportedModel(f"{source}: attends to later tokens as well: only decoders run")
    last = sees(zero, zero, places[-1:], places).expand(length)
    window = int(last.sum())
    seen = (
        bool(last[length - window :].all())
        and (window < 2 or bool(sees(zero, zero, later, later - 1).all()))
        and bool(sees(zero, zero, places[window - 1 :], places[: length - window + 1]).all())
        and not bool(sees(zero, zero, places[window:], places[: length - window]).any())
    )
    if not window or not seen:
        raise UnsupportedModel(f"{source}: chunked attention and other masks than windows do not run")
    return 0 if window == length else window


def _attend_densely(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    num_groups = heads.spec.num_heads // heads.spec.num_kv_heads
    k, v = k.repeat_interleave(num_groups, 1), v.repeat_interleave(num_groups, 1)
    scores = (q @ k.transpose(-1, -2)).float() * heads.spec.scale  # [1, H, T, T]
    if heads.spec.softcap:
        scores = torch.tanh(scores / heads.spec.softcap) * heads.spec.softcap
    places = torch.arange(q.shape[2], device=q.device)
    hidden = places[None] > places[:, None]
    if heads.spec.window:
        hidden |= places[None] <= places[:, None] - heads.spec.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if heads.sinks is not None:
        sinks = heads.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[2]]
    return (weights.to(v.dtype) @ v).transpose(1, 2).contiguous()


MAX_ERROR = 1e-5
TRIAL_SHAPE = (3, 5)  # leading dimensions of the random input


def replace_norms(model: nn.Module) -> int:
    """Replace the forward functions of standard RMS norms; return their number."""
    offsets: dict[tuple[type[nn.Module], float], float | None] = {}
    num_replaced = 0
    for module in model.modules():
        eps = _find_eps(module)
        if eps is None or "forward" in vars(module):
            continue
        kind = (type(module), eps)
        if kind not in offsets:
            offsets[kind] = _find_offset(module, eps)
        offset = offsets[kind]
        if offset is not None:
            weight: Any = module.weight
            norm = RMSNorm(weight.data.float() + offset, eps)
            module.forward = _make_forward(norm, weight.dtype, module.forward)
            num_replaced += 1
    return num_replaced


def _find_eps(module: nn.Module) -> float | None:
    """Return the epsilon of what may be a standard RMS norm: a module with one vector of weights."""
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or dict(module.named_buffers()):
        return None
    for name in ("variance_epsilon", "eps"):
        if isinstance(value := getattr(module, name, None), float):
            return value
    return None


def _find_offset(module: nn.Module, eps: float) -> float | None:
    """Return what the norm adds to its weights, 0 or 1; None: it is another equation."""
    trial: Any = copy.deepcopy(module).float().cpu()
    generator = torch.Generator().manual_seed(0)
    trial.weight.data = torch.randn(trial.weight.shape, generator=generator)
    x = torch.randn((*TRIAL_SHAPE, trial.weight.shape[0]), generator=generator) * 0.1
    with torch.no_grad():
        try:
            found = trial(x)
        except Exception:  # it needs other arguments
            return None
        for offset in (0.0, 1.0):
            expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (trial.weight + offset)
            if found.shape == expected.shape and float((found - expected).abs().max()) < MAX_ERROR:
                return offset
    return None


def _make_forward(norm: RMSNorm, dtype: torch.dtype, original: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    size = norm.shape[-1]

    def forward(x: Tensor) -> Tensor:
        visitor = _visitor.get()
        if not isinstance(visitor, PagedAttention) or x.dtype is not dtype:
            return original(x)
        return visitor.step.norm(x.reshape(-1, size).contiguous(), norm).view(x.shape)

    return forward
