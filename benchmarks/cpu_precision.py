"""Measures how far each contender's distributions are from fp32 of the shipped model: the price of its speed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tests` is not installed

from quire.engine.model_text import ModelText
from tests.precision import (
    Native,
    Passage,
    Reference,
    Verdict,
    chat_passages,
    chat_prompts,
    judge_all,
    table,
    text_passages,
)

Write = Callable[[list[list[int]], Path], None]  # sequences, and the file for their logits, row by row

__all__ = ["Judge", "Verdict", "table"]


class Judge:
    """A part of the inputs of `tests.precision`, with the reference's logits."""

    def __init__(self, model: Path, num_threads: int, windows: Sequence[int], num_chats: int) -> None:
        self._model = model
        self._num_threads = num_threads
        text = ModelText.open(model)
        self._reference = Reference(model, num_threads)
        prompts = chat_prompts(text)[:num_chats]
        answers = self._reference.answer(prompts, text.eos_token_ids)
        self._passages: list[Passage] = [
            *text_passages(text, windows, has_rest=False),
            *chat_passages(prompts, answers),
        ]
        self._known = {passage.tokens: self._reference.logits(list(passage.tokens)) for passage in self._passages}
        text.close()

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Return the reference's logits."""
        return self._known[tuple(tokens)]

    def ours(self, settings: dict[str, Any]) -> Verdict:
        if settings["backend"] != "native":
            return judge_all(self._passages, self, self._reference)[-1]
        native = Native(self._model, settings.get("precision"), self._num_threads)
        try:
            return judge_all(self._passages, self, native)[-1]
        finally:
            native.close()

    def theirs(self, write: Write) -> Verdict:
        sequences = [list(passage.tokens) for passage in self._passages]
        with TemporaryDirectory() as folder:
            write(sequences, Path(folder) / "logits")
            return judge_all(self._passages, self, _Written(sequences, Path(folder) / "logits"))[-1]

    def close(self) -> None:
        self._reference.close()


class _Written:
    """Logits in a file, in the order of the sequences."""

    def __init__(self, sequences: Sequence[list[int]], path: Path) -> None:
        ends = np.cumsum([len(tokens) for tokens in sequences]).tolist()
        self._last_rows = dict(zip(map(tuple, sequences), ends, strict=True))
        self._rows: NDArray[np.float32] = np.memmap(path, np.float32, "r").reshape(ends[-1], -1)

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        last = self._last_rows[tuple(tokens)]
        return self._rows[last - len(tokens) : last]
