"""R34: hostile tokenizers beside a good model: refused, or run within limits; the good model keeps answering."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gauntlet.crowds import memory_of
from tests.gauntlet.figures import Figure, Gauntlet, Row, counted, timed
from tests.gauntlet.files import answer_of_good, load_hostile, two_models
from tests.gauntlet.flood import idle_base, left_over
from tests.server.rig import Answer, Server
from tests.text.test_hostile_tokenizers import REFUSED, TRIED, Edit, cut, framed, normalized, replace, split
from tests.text.vocabularies import byte_level_json
from tests.waiting import repeating

MAX_HEALTH_S = 2.0
MAX_GROWTH_MB = 256.0
# Tokenizers that load, with a text that is dangerous for them. Each runs in a child process or adds little.
LOADED: dict[str, tuple[Edit, str]] = {
    "exponential at a request": (cut(split("(z+)+q")), "z" * 60 + " q"),
    "cubic at every position": (cut(split("z*z*z*q")), "z" * 380 + " q"),
    "31 characters for one": (normalized(replace("z", "z" * 31)), "z" * 60_000),
    "a normal form and 31 characters": (normalized({"type": "NFKC"}, replace("z", "z" * 31)), "\ufdfa" * 8000),
    "64 tokens before every text": (framed(60, 1), "z" * 60),
    "an expression that compiles to much": (cut(split("(((z{1,90}){1,90}){1,90}){1,90}")), "z" * 3000),
}


@dataclass
class Witness:
    """Asks for /health and for an answer of the good model, one after the other."""

    server: Server
    expected: Any
    slowest_s: float = 0.0
    num_asked: int = 0
    num_wrong: int = 0

    def ask(self) -> None:
        self.num_asked += 1
        try:
            begin_s = time.monotonic()
            is_healthy = self.server.get("/health").status == 200
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin_s)
            answer = answer_of_good(self.server)
            self.num_wrong += not is_healthy or answer != self.expected
        except (OSError, ValueError, KeyError):
            self.num_wrong += 1


def load(server: Server, folder: Path, edit: Edit) -> Answer:
    """Load the hostile model with another tokenizer."""
    spec = byte_level_json()
    edit(spec)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return load_hostile(server)


def ask(server: Server, text: str) -> Iterator[Answer]:
    yield server.chat(text, model="hostile")
    yield server.post("/v1/completions", {"model": "hostile", "prompt": text, "max_tokens": 4})
    yield server.post("/tokenize", {"model": "hostile", "prompt": text})
    yield server.chat("Hi", model="hostile", prediction={"type": "content", "content": text})
    yield server.chat("Hi", model="hostile", ignore_eos=False, structured_outputs={"choice": [text[:400], "a"]})


def outcome(answer: Answer) -> str:
    if answer.status == 200:
        return "dangerous texts answered"
    is_refused = 400 <= answer.status < 500 and "error" in answer.json
    return "dangerous texts refused with 400" if is_refused else "dangerous texts with another status"


def run(gauntlet: Gauntlet) -> Sequence[Figure]:
    refused = [*REFUSED.values(), *TRIED.values()][:: gauntlet.size(1, 5)]
    loaded = [*LOADED.values()][: gauntlet.size(len(LOADED), 2)]
    texts: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    with two_models(gauntlet) as (server, folder):
        base = idle_base(server)
        witness = Witness(server, answer_of_good(server))
        with repeating(witness.ask, pause_s=0.01), memory_of(server.process.pid) as memory:
            for edit, message in refused:
                answer = load(server, folder, edit)
                is_clear = answer.status >= 400 and message in answer.json.get("error", {}).get("message", "")
                faults["hostile tokenizers that were not refused when they were loaded"] += not is_clear
                if answer.status == 200:
                    server.post("/v1/models/unload", {"model": "hostile"})
            for edit, text in loaded:
                faults["tokenizers that do not load"] += load(server, folder, edit).status != 200
                texts.update(map(outcome, ask(server, text)))
                is_used = server.chat("Hi", model="hostile").status == 200
                faults["hostile tokenizers that answer no other text"] += not is_used
                server.post("/v1/models/unload", {"model": "hostile"})
        faults["deaths of the server"] += server.process.poll() is not None
        left = left_over(server, base)
    gauntlet.say(f"{dict(texts)}; {witness.num_asked} requests beside them")
    faults["dangerous texts with another status"] += texts.pop("dangerous texts with another status", 0)
    faults["wrong or missing answers of the other model and of /health"] += witness.num_wrong
    return [
        Figure("hostile tokenizers", len(refused) + len(loaded), at_least=2),
        *(Figure(name, count) for name, count in texts.items()),
        *counted("", faults),
        Figure("requests of the other model and of /health", witness.num_asked, at_least=1),
        timed("slowest /health", witness.slowest_s, MAX_HEALTH_S),
        Figure("growth of the server's memory", memory.growth_mb, "MB", at_most=MAX_GROWTH_MB),
        *left,
    ]


ROWS: tuple[Row, ...] = (
    Row("R34", "A hostile tokenizer is refused, or stops neither the server nor another model", run, 600),
)
