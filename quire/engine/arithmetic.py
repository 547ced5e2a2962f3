"""Describes everything that determines the numbers that an engine computes, besides its tokens.

The same description is the key of cached content on disk and a part of `system_fingerprint`.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from quire.backends.base import RunnerFacts
from quire.engine.levels.weights_digest import weights_digest
from quire.engine.tuning import lower_thread_priority
from quire.version import __version__

# The digest of larger files is not awaited by the start of a worker: 1.6 GB/s with one core that has SHA instructions.
MAX_AWAITED_BYTES = 256 << 20
MAX_FORGOTTEN_BYTES = 16 << 20  # takes 10 ms: not worth an entry in the memo
log = logging.getLogger(__name__)


def describe(weights: str, load_format: str, facts: RunnerFacts) -> dict[str, str]:
    """`weights`: the digest of the files with the weights and their settings.

    The layout has the kernels, the precision, the libraries, the device and the types that the runner computes and
    stores in; the type of the weights says how they were quantised at load.
    """
    return {
        "weights": weights,
        "load_format": load_format,
        "layout": facts.layout,
        "backend": facts.backend,
        "dtype": facts.dtype,
    }


def system_fingerprint(arithmetic: Mapping[str, str], text: str, *, has_drafts: bool) -> str:
    """Identifies everything on the side of the server that changes answers.

    `text`: the names and digests of the files that determine prompts and sampling. `has_drafts`: tokens are guessed and
    verified in larger batches, with a runner whose results depend on the batch.
    """
    facts = {**arithmetic, "text": text, "drafts": str(has_drafts), "quire": __version__}
    return "fp_" + sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


class Fingerprinting:
    """Computes the fingerprint of an engine in a thread, because it depends on the contents of the model's files.

    Digests are remembered, so that only the first start with new files reads them. `on_end` is called in the thread.
    """

    def __init__(
        self,
        weights: Sequence[Path],
        text: Sequence[Path],
        memo: Path,
        fingerprint_of: Callable[[str, str], str],
        on_end: Callable[[], None],
    ) -> None:
        self._weights = weights
        self._text = text
        self._fingerprint_of = fingerprint_of
        self._on_end = on_end
        num_bytes = sum(file.stat().st_size for file in (*weights, *text))
        self._memo = memo if num_bytes > MAX_FORGOTTEN_BYTES else None
        self._is_large = num_bytes > MAX_AWAITED_BYTES
        self._found = ""
        self._thread = threading.Thread(target=self._run, name="fingerprint", daemon=True)
        self._thread.start()

    @property
    def found(self) -> str:
        """The fingerprint; empty: it is not known yet, or the files cannot be read."""
        return self._found

    def wait(self) -> str:
        """Wait for the fingerprint, unless the files are large."""
        if not self._is_large:
            self._thread.join()
        return self._found

    def _run(self) -> None:
        try:
            if self._is_large:
                lower_thread_priority()
            max_threads = 1 if self._is_large else None
            weights = weights_digest(self._weights, self._memo, max_threads)
            text = [f"{file.name}={weights_digest([file], self._memo, max_threads)}" for file in self._text]
            self._found = self._fingerprint_of(weights, " ".join(text))
        except OSError as error:
            log.warning("answers have no system_fingerprint: a file of the model cannot be read: %s", error)
        self._on_end()
