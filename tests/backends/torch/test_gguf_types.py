"""The GPU runner on GGUF files whose matrices stay packed, compared with the plain runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.backends.torch import graphs
from quire.backends.torch.packed import JoinedLinear, PackedLinear
from tests.backends.torch.fused_rig import FusedRig
from tests.backends.torch.kernels.device import DEVICE
from tests.backends.torch.rig import Answer, Rig
from tests.selection import mostly_nightly
from tests.weights.layouts import write_k_quants

BOUND = 2e-3 if DEVICE == "cpu" else 2e-2  # difference of log probabilities
ROUNDED_BOUND = 3e-2  # with scales and zeros that are not rounded to fp16
PROMPTS = [[5, 9, 12], [7] * 20, [11, 4, *range(3, 30)]]
pytestmark = [  # rows of padding read memory that was never written
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]


def plain_answers(path: Path, monkeypatch: pytest.MonkeyPatch, *, is_packed: bool) -> list[Answer]:
    """Answer with the plain runner, which decodes weights in every step or once."""
    with monkeypatch.context() as patch:
        patch.setattr(PackedLinear, "holds", classmethod(lambda _cls, _format: is_packed))
        rig = Rig(path)
    assert (rig.engine.runner.facts().dtype == "float32") != is_packed
    answers = [rig.answer(prompt, 2) for prompt in PROMPTS]
    rig.engine.close()
    return answers


def distance(one: Answer, other: Answer) -> float:
    return float((torch.stack(one.rows).cpu() - torch.stack(other.rows)).abs().max())


@pytest.mark.parametrize(
    ("kind", "types", "has_graphs"),
    mostly_nightly(
        [
            (None, ("int4", "int8"), False),
            ("MXFP4", ("fp4",), True),
            (None, ("int4", "int8"), True),
            ("Q5_K", ("int8",), True),
        ],
        1,
    ),
)
def test_packed_models(
    kind: str | None, types: tuple[str, ...], has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a batch, and with graphs, whose products are others."""
    path = write_k_quants(tmp_path, kind)
    expected, decoded = (plain_answers(path, monkeypatch, is_packed=is_packed) for is_packed in (True, False))
    assert max(map(distance, expected, decoded)) < ROUNDED_BOUND
    rig = FusedRig(path)
    monkeypatch.setattr(graphs, "MAX_MISSES", 1 if has_graphs else 1000)
    if has_graphs:
        monkeypatch.setattr(rig.runner._graphs, "_is_compiled", lambda: True)
    assert rig.runner.facts().dtype == ", ".join(("float32", *types))
    model: Any = rig.runner.model
    assert isinstance(model.layers[0].mixer.in_proj, JoinedLinear if kind is None else PackedLinear)
    assert isinstance(model.head, PackedLinear)
    alone = [rig.answer(prompt, 2) for prompt in PROMPTS[:1]]
    rig.reset()
    ids = [rig.start(prompt, 2) for prompt in PROMPTS]
    batched = list(rig.run(*ids).values())
    for answer, other in [*zip(alone, expected, strict=False), *zip(batched, expected, strict=True)]:
        assert answer.tokens == other.tokens
        assert distance(answer, other) < BOUND
    captured = rig.runner._graphs._graphs
    assert bool(captured) == has_graphs
    assert None not in captured.values()
