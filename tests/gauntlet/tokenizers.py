"""R34: hostile tokenizers beside a good model: refused, or run within limits; the good model keeps answering."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gauntlet.crowds import memory_of
from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly
from tests.gauntlet.watch import idle_base, left_over
from tests.server.rig import Answer, Server, serving
from tests.text.test_hostile_tokenizers import REFUSED, TRIED, Edit, cut, framed, normalized, replace, split
from tests.text.vocabularies import byte_level_json
from tests.tiny import write_tiny_model
from tests.waiting import HANG_S

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
class Witness(threading.Thread):
    """Asks for /health and for an answer of the good model, one after the other, until it is told to stop."""

    server: Server
    expected: Any
    slowest_s: float = 0.0
    num_asked: int = 0
    num_wrong: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        while not self.is_over.wait(0.01):
            self.num_asked += 1
            try:
                begin_s = time.monotonic()
                is_healthy = self.server.get("/health").status == 200
                self.slowest_s = max(self.slowest_s, time.monotonic() - begin_s)
                answer = self.server.chat(model="good", temperature=0).json["choices"]
                self.num_wrong += not is_healthy or answer != self.expected
            except (OSError, ValueError, KeyError):
                self.num_wrong += 1


@contextlib.contextmanager
def witnessed(server: Server) -> Iterator[Witness]:
    witness = Witness(server, server.chat(model="good", temperature=0).json["choices"])
    witness.start()
    try:
        yield witness
    finally:
        witness.is_over.set()
        witness.join(HANG_S)


def write_tokenizer(folder: Path, edit: Edit) -> None:
    spec = byte_level_json()
    edit(spec)
    (folder / "tokenizer.json").write_text(json.dumps(spec))


def is_refused(answer: Answer, status: int) -> bool:
    return status <= answer.status < 500 and "error" in answer.json


def load_refused(server: Server, folder: Path, cases: Sequence[tuple[Edit, str]], outcomes: Counter[str]) -> None:
    for edit, message in cases:
        write_tokenizer(folder, edit)
        answer = server.post("/v1/models/load", {"model": "hostile"})
        is_clear = answer.status >= 400 and message in answer.json.get("error", {}).get("message", "")
        outcomes["refused" if is_clear else "not refused"] += 1
        if answer.status == 200:
            server.post("/v1/models/unload", {"model": "hostile"})


def use_loaded(server: Server, folder: Path, cases: Sequence[tuple[Edit, str]], outcomes: Counter[str]) -> None:
    for edit, text in cases:
        write_tokenizer(folder, edit)
        outcomes["loaded" if server.post("/v1/models/load", {"model": "hostile"}).status == 200 else "not loaded"] += 1
        for answer in (
            server.chat(text, model="hostile"),
            server.post("/v1/completions", {"model": "hostile", "prompt": text, "max_tokens": 4}),
            server.post("/tokenize", {"model": "hostile", "prompt": text}),
            server.chat("Hi", model="hostile", prediction={"type": "content", "content": text}),
            server.chat("Hi", model="hostile", ignore_eos=False, structured_outputs={"choice": [text[:400], "a"]}),
        ):
            outcomes["answered" if answer.status == 200 else "400" if is_refused(answer, 400) else "other"] += 1
        outcomes["used"] += server.chat("Hi", model="hostile").status == 200
        server.post("/v1/models/unload", {"model": "hostile"})


def run(gauntlet: Gauntlet) -> Sequence[Figure]:
    good, folder = gauntlet.tiny, write_tiny_model(gauntlet.folder / "hostile")
    config = gauntlet.folder / "models.yaml"
    config.write_text(
        f"threads: 1\nmemory: 600M\nmodels:\n  - {{model: {good}, name: good, kv_memory: 16M}}\n"
        f"  - {{model: {folder}, name: hostile, kv_memory: 16M}}\n"
    )
    refused = [*REFUSED.values(), *TRIED.values()][:: gauntlet.size(1, 5)]
    loaded = [*LOADED.values()][: gauntlet.size(len(LOADED), 2)]
    outcomes: Counter[str] = Counter()
    with serving("--config", str(config)) as server:
        server.post("/v1/models/load", {"model": "hostile"})
        server.chat(model="hostile")
        server.post("/v1/models/unload", {"model": "hostile"})
        server.chat(model="good")
        base = idle_base(server)
        with witnessed(server) as witness, memory_of(server.process.pid) as memory:
            load_refused(server, folder, refused, outcomes)
            use_loaded(server, folder, loaded, outcomes)
        num_deaths = int(server.process.poll() is not None)
        left = left_over(server, base)
    gauntlet.say(f"{dict(outcomes)}; {witness.num_asked} requests beside them")
    return [
        Figure("hostile tokenizers refused when they are loaded", outcomes["refused"], at_least=len(refused)),
        Figure("hostile tokenizers that load", outcomes["loaded"], at_least=len(loaded)),
        Figure("dangerous texts answered", outcomes["answered"]),
        Figure("dangerous texts refused with 400", outcomes["400"], at_least=1),
        exactly("dangerous texts with another status", outcomes["other"]),
        exactly("hostile tokenizers that answer no other text", outcomes["loaded"] - outcomes["used"]),
        exactly("deaths of the server", num_deaths),
        Figure("requests of the other model and of /health", witness.num_asked, at_least=1),
        exactly("wrong or missing answers of the other model and of /health", witness.num_wrong),
        Figure("slowest /health", witness.slowest_s, "s", at_most=MAX_HEALTH_S, is_timed=True),
        Figure("growth of the server's memory", memory.growth_mb, "MB", at_most=MAX_GROWTH_MB),
        *left,
    ]


ROWS: tuple[Row, ...] = (
    Row("R34", "A hostile tokenizer is refused, or stops neither the server nor another model", run, 600),
)
