"""The inputs of `tests.precision`, with the logits of a reference in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import harness  # noqa: F401  (finds `tests`)
import numpy as np
from numpy.typing import NDArray

from quire.engine.model_text import ModelText
from tests.precision import Model, Passage, Reference, Verdict, chat_passages, chat_prompts, judge_all, text_passages

Write = Callable[[list[list[int]], Path], object]  # sequences, and the file for their logits, row by row


class Source:
    """A part of the inputs, and the reference's logits."""

    def __init__(self, model: Path, num_threads: int | None, windows: Sequence[int], num_chats: int) -> None:
        text = ModelText.open(model)
        reference = Reference(model, num_threads)
        prompts = chat_prompts(text)[:num_chats]
        answers = reference.answer(prompts, text.eos_token_ids)
        self.passages: list[Passage] = [
            *text_passages(text, windows, has_rest=False),
            *(chat_passages(prompts, answers) if prompts else ()),
        ]
        self._known = {one.tokens: reference.logits(list(one.tokens)) for one in self.passages}
        self.dtype = text.spec.dtype
        text.close()
        reference.close()

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        return self._known[tuple(tokens)]

    def judge(self, model: Model) -> Verdict:
        return judge_all(self.passages, self, model)[-1]

    def judge_written(self, write: Write) -> Verdict:
        """Judge a model of another process, which writes its logits to a file."""
        sequences = [list(passage.tokens) for passage in self.passages]
        with TemporaryDirectory() as folder:
            path = Path(folder) / "logits"
            write(sequences, path)
            return self.judge(_Written(sequences, path))


class _Written:
    """Logits in a file, in the order of the sequences."""

    def __init__(self, sequences: Sequence[list[int]], path: Path) -> None:
        ends = np.cumsum([len(tokens) for tokens in sequences]).tolist()
        self._last_rows = dict(zip(map(tuple, sequences), ends, strict=True))
        self._rows: NDArray[np.float32] = np.memmap(path, np.float32, "r").reshape(ends[-1], -1)

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        last = self._last_rows[tuple(tokens)]
        return self._rows[last - len(tokens) : last]
