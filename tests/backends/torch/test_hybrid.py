"""Models with window blocks on the real scheduler: the same distributions as `transformers`, however a prompt runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.backends import kv_memory
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.runner import TorchRunner
from quire.core.kv_cache import KVCacheManager
from quire.engine import composition
from tests.backends.contract import Contract, Pair, random_prompt
from tests.backends.torch.families import Reference
from tests.backends.torch.rig import Rig

WINDOW = 24


@pytest.fixture(scope="module", params=["gemma3", "mistral with a window", "olmo3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Reference, Rig]]:
    folder = tmp_path_factory.mktemp("model")
    reference = Reference(request.param, folder)

    def make_cache(*args: Any, **settings: Any) -> KVCacheManager:
        return KVCacheManager(*args, **{"window": WINDOW, "num_window_blocks": 24, **settings})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_memory, "HAS_WINDOWS", True)
        patch.setattr(composition, "KVCacheManager", make_cache)
        rig = Rig(folder, max_chunk_tokens=128, num_blocks=80)
        runner = rig.engine.runner
        assert isinstance(runner, TorchRunner)
        assert runner.capacity().num_window_blocks == 24
        poison(runner.store)
        yield reference, rig
        rig.engine.close()


@torch.inference_mode()
def poison(store: KVStore) -> None:
    """Make the rows of free window blocks large, so that an unmasked read of them changes the result."""
    for shape, pool in store.pools.items():
        if shape.window:
            pool[:, 1:] = torch.randn_like(pool[:, 1:]) * 50


class TestWindows(Contract):
    bound = 5e-5

    def test_prefixes_are_shared(self, pair: Pair) -> None:
        """Requests that diverge at any token: those before it are read from shared blocks or computed again."""
        reference, rig = pair
        rig.reset()
        whole = random_prompt(9, 150)
        for cut in (150, 140, 97, 64, 30, 150):
            prompt = [*whole[:cut], *random_prompt(cut, 7)]
            answer = rig.answer(prompt, 5)
            assert cut == 150 or answer.num_cached_tokens > 0
            self.check(reference, prompt, answer)

    def test_long_contexts_over_few_window_blocks(self, pair: Pair) -> None:
        """Three contexts of 300 tokens have 30 blocks; there are 23 window blocks, with room for the windows."""
        reference, rig = pair
        rig.reset(max_chunk_tokens=32)
        prompts = [random_prompt(50 + seed, 290) for seed in range(3)]
        ids = [rig.start(prompt, 10) for prompt in prompts]
        answers = rig.run(*ids)
        for prompt, request_id in zip(prompts, ids, strict=True):
            self.check(reference, prompt, answers[request_id])
