"""Any decoder of `transformers`, over quire's paged cache: correct, slower than a native family.

The tokens of all requests run as one row with their own positions. All models of the library call a registered
attention function (`hf_modules.py`), so only attention knows about requests. When a model is loaded, a trial compares
it with the library's own attention on a few tokens, at the first positions and at the last ones of the context: a model
with other results is refused.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.backends import support
from quire.backends.base import Progress
from quire.backends.kv_memory import KVSpec, LayerKV
from quire.backends.support import describe_error, long_rope_notice
from quire.backends.torch.attention import ReferencePass
from quire.backends.torch.batch import build_batch
from quire.backends.torch.forward_pass import Pass
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.models import hf_modules
from quire.backends.torch.models.hf_loading import Siblings, load_hf_model, merge_siblings, silence
from quire.backends.torch.models.hf_modules import (
    AttentionCall,
    PagedAttention,
    Recorder,
    replace_norms,
    visiting,
)
from quire.errors import UnsupportedModel
from quire.weights.checkpoint import Checkpoint
from quire.weights.spec import ModelSpec

log = logging.getLogger(__name__)

# T tokens in the batch, R rows that need logits, E hidden size, V vocabulary


def load_transformers_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Progress | None = None,
) -> TransformersModel:
    """Load a model of `transformers` and try it. Raises UnsupportedModel if it does not run, and says why."""
    model = load_hf_model(checkpoint, dtype, device, progress)
    return adapt_model(model, checkpoint.spec, max_model_len, str(checkpoint.path))


@torch.inference_mode()
def adapt_model(model: Any, spec: ModelSpec, max_model_len: int, source: str) -> TransformersModel:
    """Prepare a loaded model for quire's passes: merge its products and replace its norms, then compare results."""
    hf_modules.register()
    original_context = freeze_rope(model, max_model_len)
    silence(model)
    device = next(model.parameters()).device
    prompts = support.make_prompts(spec.vocab_size)
    starts = support.first_positions(max_model_len)
    expected = [_run_eagerly(model, prompts[1], device, source)]
    recorder = Recorder(source, max_model_len)
    siblings = Siblings(model)
    body = _record(model, recorder, siblings, prompts[0], device, source)
    expected.insert(0, _run_eagerly(model, prompts[0], device, source, starts[0]))
    num_merged = merge_siblings(siblings)
    num_norms = replace_norms(model)
    log.info("%s: %d products merged, %d norms replaced", source, num_merged, num_norms)
    adapted = TransformersModel(model, body, recorder.calls, spec, int(expected[0].shape[-1]))
    if original_context:
        adapted.notice = long_rope_notice(original_context, max_model_len)
    problem = _try_model(adapted, prompts, expected, starts)
    if problem:
        raise UnsupportedModel(f"{source}: does not run through transformers over quire's paged cache: {problem}")
    return adapted


class TransformersModel:
    """A model of `transformers` as a `Model`.

    `is_capturable`: passes never wait for the device, so CUDA graphs of them can be captured.
    """

    def __init__(
        self, model: Any, body: Body, calls: Sequence[AttentionCall], spec: ModelSpec, vocab_size: int
    ) -> None:
        _use_attention(model, hf_modules.PAGED)
        self.model = model
        self.kv_spec = _kv_spec(calls)
        first: Tensor = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self.packed_types: tuple[str, ...] = ()
        self.num_layer_weights = _count_layer_weights(model)
        self.is_capturable = True
        self.notice = ""
        self.spec = replace(spec, vocab_size=vocab_size, hidden_size=body.hidden_size)
        self._calls = tuple(calls)
        self._body = body
        self._head = model.get_output_embeddings()
        self._has_plain_head = type(self._head) is nn.Linear and self._head.bias is None

    def forward(self, step: Pass) -> Tensor:
        """Return the hidden states [T, E] after the last norm."""
        with visiting(PagedAttention(step, self._calls)):
            out = self._body.module(
                input_ids=step.token_ids()[None], position_ids=step.positions()[None], use_cache=False
            )
        hidden: Tensor = out[0][0]
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Map [R, E] to logits [R, V], into `out` if given."""
        if self._has_plain_head:
            weight = self._head.weight
            return torch.mm(hidden, weight.t(), out=out) if out is not None else hidden @ weight.t()
        logits = self.logits_of_head(hidden)
        return logits if out is None else out.copy_(logits)

    def logits_of_head(self, hidden: Tensor) -> Tensor:
        """Compute logits as the model does: scaled or capped, if it does that."""
        with self._body.replaying(hidden):
            logits: Tensor = self.model(
                input_ids=torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device), use_cache=False
            ).logits
        return logits[0]

    def choose_head(self, hidden: Tensor) -> None:
        """Use the matrix of the head alone if that gives the model's logits."""
        if self._has_plain_head:
            self._has_plain_head = torch.equal(self._head(hidden), self.logits_of_head(hidden))


class Body:
    """The part of a model that ends with its last norm. It can return given hidden states, to compute the head only."""

    def __init__(self, module: Any, output: Any) -> None:
        self.module = module
        self.hidden_size = int(output.last_hidden_state.shape[-1])
        self._output_type = type(output)
        self._replayed: Tensor | None = None
        self._forward = module.forward
        module.forward = self._run

    def _run(self, *args: Any, **settings: Any) -> Any:
        if self._replayed is None:
            return self._forward(*args, **settings)
        return self._output_type(last_hidden_state=self._replayed[None])

    @contextmanager
    def replaying(self, hidden: Tensor) -> Iterator[None]:
        self._replayed = hidden
        try:
            yield
        finally:
            self._replayed = None


def _kv_spec(calls: Sequence[AttentionCall]) -> KVSpec:
    specs = {call.heads.index: call.heads.spec for call in calls}
    ordered = [specs[index] for index in range(len(specs))]
    return KVSpec(
        tuple(
            LayerKV(one.num_kv_heads, one.head_size, one.window, one.num_heads // one.num_kv_heads) for one in ordered
        )
    )


def _count_layer_weights(model: Any) -> int:
    """Return the number of weights that take part in the product of one token, without embedding and head."""
    config = model.config.get_text_config()
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    num_chosen = next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)
    outer = {id(one.weight) for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None}
    total = 0
    for parameter in model.parameters():
        if parameter.dim() == 3 and 0 < num_chosen < len(parameter):  # experts, one matrix each
            total += parameter.numel() // len(parameter) * num_chosen
        elif id(parameter) not in outer:
            total += parameter.numel()
    return total


def _use_attention(model: nn.Module, name: str) -> None:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation_internal = name


def freeze_rope(model: nn.Module, max_model_len: int) -> int:
    """Choose the frequencies for contexts up to `max_model_len`, the same for all requests of an engine.

    The library chooses them by the longest request of every pass, which would change the keys of the others. Returns
    the length up to which the library rotates a request alone in another way; 0: there is none.
    """
    original_context = 0
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        changing = [name for name, kind in by_layer.items() if kind == "longrope" or "dynamic" in str(kind)]
        if not changing:
            continue
        alone = [_rotate(module, name, [0, 1]) for name in changing]
        beside = [_rotate(module, name, [0, 1, max_model_len - 1]) for name in changing]
        frozen: Any = by_layer | dict.fromkeys(changing, "default")
        module.rope_type = frozen if isinstance(kinds, dict) else frozen[None]
        if not _are_equal([_rotate(module, name, [0, 1]) for name in changing], beside):
            _always_see(module, max_model_len - 1)  # the module itself looks at the longest request (phimoe)
        if not _are_equal(alone, beside):
            original_context = max(original_context, *(_original_context(module, name) for name in changing))
    return original_context


def _rotate(module: Any, layer_type: str | None, positions: list[int]) -> list[Tensor]:
    """Return the cosines and sines of the first two positions of a pass."""
    device = next(module.buffers()).device
    settings = {} if layer_type is None else {"layer_type": layer_type}
    found = module(torch.zeros(1, device=device), torch.tensor([positions], device=device), **settings)
    return [part[:, :2].clone() for part in (found if isinstance(found, tuple) else (found,))]


def _are_equal(some: Sequence[list[Tensor]], others: Sequence[list[Tensor]]) -> bool:
    pairs = zip(itertools.chain(*some), itertools.chain(*others), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def _always_see(module: Any, last: int) -> None:
    """Let a rotary module see the last position of the context in every pass, so that it always decides alike."""
    forward = module.forward

    def run(x: Tensor, position_ids: Tensor, **settings: Any) -> tuple[Tensor, ...]:
        seen = torch.nn.functional.pad(position_ids, (0, 1), value=last)
        return tuple(part[:, :-1] for part in forward(x, position_ids=seen, **settings))

    module.forward = run


def _original_context(module: Any, layer_type: str | None) -> int:
    parameters = module.config.rope_parameters
    found = (parameters if layer_type is None else parameters[layer_type]).get("original_max_position_embeddings")
    return int(found or module.original_max_seq_len)


# Trial


def _run_eagerly(model: Any, tokens: Sequence[int], device: torch.device, source: str, start: int = 0) -> Tensor:
    """Return the library's logits of a prompt whose first position is `start`."""
    _use_attention(model, "eager")
    positions = torch.arange(start, start + len(tokens), device=device)[None]
    settings = {"position_ids": positions} if start else {}
    try:
        out = model(input_ids=torch.tensor([tokens], device=device), use_cache=False, **settings)
        logits: Tensor = out.logits[0].float()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        problem = describe_error(error, "its code fails on a prompt")
        raise UnsupportedModel(f"{source}: transformers does not run it on text: {problem}") from error
    return logits


def _record(
    model: Any, recorder: Recorder, siblings: Siblings, tokens: Sequence[int], device: torch.device, source: str
) -> Body:
    """Run one prompt, and find the model's calls of attention and the module that ends with its last norm."""
    from transformers import PreTrainedModel

    depth = 0
    found: list[tuple[Any, Any]] = []

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(module: Any, _: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0 and hasattr(output, "last_hidden_state"):
            found.append((module, output))

    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not model]
    hooks = [
        one for part in parts for one in (part.register_forward_pre_hook(enter), part.register_forward_hook(leave))
    ]
    _use_attention(model, hf_modules.RECORDING)
    ids = torch.tensor([tokens], device=device)
    try:
        with visiting(recorder), siblings.recording():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except Exception as error:
        problem = describe_error(error, "its code fails on a prompt")
        raise UnsupportedModel(f"{source}: does not run with another attention: {problem}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if not recorder.calls:
        raise UnsupportedModel(f"{source}: has attention of its own, without the interface of transformers")
    if len(found) != 1:
        raise UnsupportedModel(f"{source}: has {len(found)} parts that end with hidden states, not one")
    return Body(*found[0])


def _try_model(
    model: TransformersModel, prompts: Sequence[list[int]], expected: Sequence[Tensor], starts: Sequence[int]
) -> str:
    """Run the steps of the trial. Returns what is wrong."""
    store = KVStore(model.kv_spec, support.NUM_BLOCKS, support.BLOCK_SIZE, model.dtype, model.device)
    samples = torch.zeros(len(prompts), dtype=torch.int64, device=model.device)
    errors: list[float] = []
    try:
        for slices in support.make_steps(prompts):
            batch = build_batch(slices, store, model.kv_spec.windows, samples)
            rows = [starts[index] for index in batch.order for _ in range(slices[index].length)]
            # The requests begin at given positions, without the keys of the positions before.
            moved = batch.positions + torch.tensor(rows, device=model.device)
            step = ReferencePass(replace(batch, positions=moved), store)
            hidden = model.forward(step)[list(batch.last_rows)]
            model.choose_head(hidden)
            model.is_capturable = model.is_capturable and not _waits_for_device(model, step, hidden)
            for row, index in zip(model.logits(hidden).float(), batch.order, strict=True):
                errors.append(_relative_error(row, expected[index][support.last_position(slices[index])]))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model file may do anything
        return describe_error(error, "its code fails in a step with several requests")
    largest = support.find_error(errors, is_exact=model.dtype == torch.float32)
    return "" if largest is None else f"logits differ by {largest:.2g} of their spread"


def _waits_for_device(model: TransformersModel, step: Pass, hidden: Tensor) -> bool:
    """Return whether a pass reads results back from the GPU, which a CUDA graph cannot. Capturing it would fail.

    It is found out here because the device was not tested after a failed capture.
    """
    if model.device.type != "cuda":
        return False
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.logits(hidden)
        model.forward(step)  # stores the same keys again
    except RuntimeError as error:
        log.warning("decode steps run without CUDA graphs, which is slower: %s", describe_error(error, "unknown"))
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _relative_error(logits: Tensor, expected: Tensor) -> float:
    difference = (logits - expected).square().mean().sqrt()
    return float(difference / expected.std().clamp(min=1e-6))
