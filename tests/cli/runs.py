"""Ways to run the command: as a process, in a terminal, and in this process with a model that echoes its prompt."""

from __future__ import annotations

import atexit
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from quire.core.values import FinishReason, PackedPrompt
from quire.engine.generation import Completion, Delta, GenerationOutput, GenerationParams, Usage
from quire.errors import ContextTooLong
from quire.text.messages import ChatRequest, PlainAnswer
from quire.text.reasoning import REASONING_FORMATS, Opening, ThoughtParser
from tests.fork_server import ForkServer
from tests.waiting import HANG_S

LIMIT_S = HANG_S
ROOT = Path(__file__).parents[2]


# What commands import, which takes longer than most of them.
IMPORTED = (
    *("quire.cli.main", "quire.cli.models", "quire.cli.server_client", "quire.cli.sim"),
    *("quire.engine.llm", "quire.backends.native.runner", "quire.server.launcher"),
    *("httpx2", "jinja2.sandbox", "rich.progress", "tokenizers"),
)


@cache
def _forks() -> ForkServer:
    server = ForkServer(*IMPORTED, environment={**os.environ, "PYTHONPATH": str(ROOT)}, limit_s=LIMIT_S)
    atexit.register(server.__exit__)
    return server


def quire(
    *arguments: str, stdin: str = "", env: dict[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, which does not need to import most of it."""
    everything = {**os.environ, **(env or {})}
    command = [sys.executable, "-m", "quire", *arguments]
    if "COVERED_TESTS" in everything:  # coverage.py watches processes that start
        return subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env=everything,
            cwd=folder,
        )
    ended = _forks().run(folder or Path.cwd(), "quire", *arguments, stdin=stdin, environment=everything)
    return subprocess.CompletedProcess(command, ended.code, ended.stdout, ended.stderr)


class Terminal:
    """A process whose stdin, stdout and stderr are one terminal."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.screen = ""
        self._fd, theirs = pty.openpty()
        # Not pty.fork: this process may have threads. The child makes the terminal its controlling one, for Ctrl-C.
        script = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from quire.cli.main import run; run()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        os.close(theirs)

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Read until the text appears. Returns the position after it."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.screen[after:]:
            assert time.monotonic() < deadline, f"{text!r} never came: {self.screen!r}"
            assert self._read(), f"ended without {text!r}: {self.screen!r}"
        return self.screen.index(text, after) + len(text)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def exit_code(self) -> int:
        while self._read():
            pass
        return self._process.wait(LIMIT_S)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._fd], [], [], LIMIT_S)
        assert ready, f"silent for {LIMIT_S} s: {self.screen!r}"
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the other end is closed
            return False
        self.screen += data.decode(errors="replace")
        return bool(data)


@dataclass
class EchoLLM:
    """Answers with its prompt, word by word: a token is a word."""

    max_model_len: int = 60
    has_template: bool = True
    thinks: bool = False  # answers with <think> tags contain reasoning
    finish: FinishReason = FinishReason.STOP
    error: str | None = None
    seen: list[list[str]] = field(default_factory=list)
    params: GenerationParams | None = None

    @property
    def text(self) -> Any:
        return SimpleNamespace(
            template=SimpleNamespace(source="" if self.has_template else None),
            encode=lambda prompt, _size: prompt,
            encode_chat=self._encode_chat,
            new_parser=lambda _chat, _prompt: (
                ThoughtParser(REASONING_FORMATS[0], Opening.FREE, PlainAnswer()) if self.thinks else PlainAnswer()
            ),
            request=lambda prompt, params, chat: (prompt, params),  # noqa: ARG005
        )

    def stream(self, request: Any, _chat: object, on_end: Any) -> Iterator[Delta]:
        prompt, self.params = request
        words = re.findall(r"\S+\s*|\s+", prompt)
        for word in words:
            yield Delta(0, word, (1,), (), None, None)
        yield Delta(0, "", (), (), self.finish, None, self.error)
        completion = Completion(0, prompt, (1,) * len(words), self.finish, error=self.error)
        on_end(GenerationOutput(PackedPrompt.of((1, 2, 3)), (completion,), Usage(3, len(words), 0), None))

    def _encode_chat(self, chat: ChatRequest, _size: int) -> str:
        self.seen.append([message.text for message in chat.messages])
        num_words = len(" ".join(self.seen[-1]).split())
        if num_words > self.max_model_len:
            raise ContextTooLong(f"prompt of {num_words} tokens exceeds the context of {self.max_model_len} tokens")
        return self.seen[-1][-1]

    def close(self) -> None: ...
