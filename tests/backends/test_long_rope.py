"""Rope with factors for short and for long contexts: all requests have the same ones, and users are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.cli.doctor import check_model, report_lines
from tests.backends.contract import random_prompt
from tests.backends.torch.hf_architectures import BOUND, EagerReference, write_model
from tests.backends.torch.rig import Answer, Rig, same_rows

ORIGINAL = 64
ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [32.0] * 8}
SIZES: dict[str, Any] = {"original_max_position_embeddings": ORIGINAL, "sliding_window": None}
NOTICE = "requests of up to 64 tokens have the rotary factors of longer ones, because max_model_len is {}: their"
BACKENDS = [{"backend": "native"}, {"backend": "torch"}, {"backend": "mlx", "dtype": "float32"}]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EagerReference]:
    folder = tmp_path_factory.mktemp("phi3")
    return folder, EagerReference(write_model(folder, "phi3", rope_parameters=ROPE, **SIZES))


def answer(folder: Path, prompt: list[int], max_model_len: int, settings: dict[str, Any]) -> tuple[Answer, str]:
    rig = Rig(folder, max_model_len=max_model_len, **settings)
    found, notice = rig.answer(prompt, 3), rig.engine.runner.facts().notice
    rig.engine.close()
    return found, notice


@pytest.mark.parametrize("settings", BACKENDS, ids=lambda one: one["backend"])
def test_engines_say_that_short_requests_have_the_factors_of_long_ones(
    settings: dict[str, Any],
    reference: tuple[Path, EagerReference],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, library = reference
    bound = 0.06 if settings["backend"] == "native" else BOUND  # weights of 8 bits there
    short, long = random_prompt(1, 40), random_prompt(2, 100)
    found, notice = answer(folder, long, 256, settings)
    assert notice.startswith(NOTICE.format(256))
    assert f"{folder.name}: {notice}" in caplog.text
    assert same_rows(found, library.logprobs([*long, *found.tokens]), 100) < bound
    found, notice = answer(folder, short, ORIGINAL, settings)
    assert notice == ""
    assert same_rows(found, library.logprobs([*short, *found.tokens]), 40) < bound
    found, _ = answer(folder, short, 256, settings)
    difference = (torch.stack(found.rows) - library.logprobs([*short, *found.tokens])[39:42]).abs().max()
    assert float(difference) > 2 * bound  # what the notice says


def test_doctor_says_it_before_the_model_is_loaded(reference: tuple[Path, EagerReference]) -> None:
    report = check_model(reference[0])
    assert report["notice"].startswith(NOTICE.format(512))
    assert any("--max-model-len 64 uses the factors of short contexts" in line for line in report_lines(report))
