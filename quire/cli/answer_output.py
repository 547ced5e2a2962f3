"""Writes answers to the terminal as they arrive, and measures tokens per second."""

from __future__ import annotations

import io
import os
import sys
import time
from dataclasses import dataclass, field

import typer

from quire.cli.chat_model import AnswerUsage, Piece

# A model must not move the cursor or set colours of a terminal: of control characters, only \n and \t are printed.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class AnswerWriter:
    """Writes answers to stdout without delay, and reasoning to stderr if that is a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._is_stderr_terminal = sys.stderr.isatty()
        self._is_dumb = os.environ.get("TERM") == "dumb"  # would print the codes for dim text
        self._is_line_open = self._is_thought_open = False
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # for characters that the encoding of the terminal lacks

    def think(self, text: str) -> None:
        """Write reasoning, dimmed, to stderr if that is a terminal."""
        if text and self._is_stderr_terminal:
            self._is_thought_open = True
            text = text.translate(_CONTROLS)
            typer.echo(text if self._is_dumb else typer.style(text, dim=True), nl=False, err=True)

    def say(self, text: str) -> None:
        if text:
            self._end_thought()
            self._is_line_open = not text.endswith("\n")  # before the flush, after which Ctrl-C may interrupt
            sys.stdout.write(text.translate(_CONTROLS) if self._is_terminal else text)
            sys.stdout.flush()

    def end_line(self) -> None:
        self._end_thought()
        if self._is_line_open:
            self.say("\n")

    def _end_thought(self) -> None:
        if self._is_thought_open:
            self._is_thought_open = False
            typer.echo("", err=True)


@dataclass(slots=True)
class TokenRate:
    """Number of tokens and their rate."""

    started_s: float = field(default_factory=time.perf_counter)
    num_tokens: int = 0
    _num_first: int = 0
    _first_s: float | None = None
    _last_s: float = 0.0

    def take(self, piece: Piece) -> None:
        """Count a piece. If its tokens are not reported, it counts as one until `settle`."""
        self.count(int(bool(piece.text or piece.thought)) if piece.num_tokens is None else piece.num_tokens)

    def settle(self, usage: AnswerUsage | None) -> None:
        if usage is not None:
            self.num_tokens = usage.completion_tokens

    def count(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        self._last_s = time.perf_counter()
        if self._first_s is None:
            self._first_s, self._num_first = self._last_s, num_tokens
        self.num_tokens += num_tokens

    @property
    def ttft_ms(self) -> float | None:
        return None if self._first_s is None else (self._first_s - self.started_s) * 1000

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token, which includes the prompt. None if there is only one."""
        if self._first_s is None or self._last_s <= self._first_s:
            return None
        return (self.num_tokens - self._num_first) / (self._last_s - self._first_s)

    def __str__(self) -> str:
        tokens = f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"
        return tokens if self.tokens_per_s is None else f"{tokens}, {self.tokens_per_s:.{self._digits()}f} tok/s"

    def _digits(self) -> int:
        return 0 if (self.tokens_per_s or 0) >= 10 else 1
