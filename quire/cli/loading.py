"""What `generate` and `chat` share: their options, finding who answers, and writing answers as they come."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.chat_model import AnswerUsage, ChatModel, LocalModel, Piece
from quire.cli.pull import download_bar
from quire.cli.remote import DEFAULT_URL, choose_address, chosen_key, find_server
from quire.errors import InvalidRequest, ModelNotFound, QuireError
from quire.weights.hub import DEFAULT_MODEL, find_known, pull, resolve

if TYPE_CHECKING:
    from quire.engine.llm import LLM
    from quire.engine.params import GenerationParams

# The options, once. None: what the model's makers recommend.

ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A name `quire models` lists, a folder of safetensors or a .gguf file."),
]
SystemOption = Annotated[str | None, typer.Option("--system", help="Instructions to the model, ahead of the talk.")]
TemperatureOption = Annotated[float | None, typer.Option(help="0: always the most probable token.")]
TopKOption = Annotated[int | None, typer.Option(help="Draw among this many tokens; 0: all.")]
TopPOption = Annotated[float | None, typer.Option(help="Draw among the tokens that make up this probability.")]
MinPOption = Annotated[float | None, typer.Option(help="Leave out what is less probable than this share of the best.")]
RepetitionOption = Annotated[float | None, typer.Option(help="Above 1: avoid tokens already there, the prompt's too.")]
PresenceOption = Annotated[float, typer.Option(help="Above 0: avoid tokens the answer has used.")]
FrequencyOption = Annotated[float, typer.Option(help="Above 0: avoid them the more, the oftener they were used.")]
SeedOption = Annotated[int | None, typer.Option(help="The same seed draws the same answer.")]
StopOption = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End the answer at this text; repeatable.")]
BackendOption = Annotated[
    str | None, typer.Option(help="What computes: auto, native, torch, or fake: nothing, for tests of clients.")
]
PrecisionOption = Annotated[str | None, typer.Option(help="Precision of the native backend: fast, balanced or exact.")]
DtypeOption = Annotated[str | None, typer.Option(help="auto; of the torch backend: float32, float16, bfloat16.")]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
LoadFormatOption = Annotated[str | None, typer.Option(help="auto, or dummy: random weights for a config.json.")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads; as many as there are cores.")]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--max-context", "--max-model-len", help="Most tokens of prompt and answer; as the model was made for."
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the KV cache, like 2G or 512M. By default 40 % of free memory and at most 4G on a CPU;"
        " on a GPU, all that steps leave.",  # `quire.backends.kv_memory` has the numbers; a test compares them
    ),
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", metavar="URL", help=f"Ask this server; else $QUIRE_SERVER, else {DEFAULT_URL} if it is up."
    ),
]
KeyOption = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="For the server; else $QUIRE_API_KEY.")]
LocalOption = Annotated[bool, typer.Option("--local", help="Load the model here, whatever server is up.")]

_TYPED = {"kv_bytes": "--kv-memory", "num_threads": "--threads"}
_FIELDS = {
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "stop", "n", "max_tokens", "logprobs"),
    *("backend", "precision", "dtype", "device", "load_format", "num_threads", "max_context", "kv_bytes"),
}


@contextmanager
def options_named() -> Iterator[None]:
    """Let an error name the option as it is typed, not the field it became."""
    try:
        yield
    except InvalidRequest as error:
        message = str(error).removeprefix("prompts[0]: ")
        name = re.split(r"[^a-z_]", message, maxsplit=1)[0]
        if name in _FIELDS:
            message = _option(name) + message[len(name) :]
        raise type(error)(message) from None


def check_answer(params: GenerationParams) -> None:
    """Refuse an answer of no tokens, which scores prompts over HTTP: here there would be nothing to print."""
    if params.is_empty:
        raise InvalidRequest("max_tokens = 0 leaves no room for an answer")


def _option(name: str) -> str:
    return _TYPED.get(name, f"--{name.replace('_', '-')}")


def engine_settings(
    *,
    backend: str | None,
    precision: str | None,
    dtype: str | None,
    device: str | None,
    load_format: str | None,
    threads: int | None,
    max_context: int | None,
    kv_memory: str | None,
) -> dict[str, Any]:
    """Those that were given, refused here if they can never work: before anything is fetched or loaded."""
    given: dict[str, Any] = {
        "backend": backend,
        "precision": precision,
        "dtype": dtype,
        "device": device,
        "load_format": load_format,
        "num_threads": threads,
        "max_context": max_context,
        "kv_bytes": None if kv_memory is None else parse_bytes("--kv-memory", kv_memory),
    }
    settings = {name: value for name, value in given.items() if value is not None}
    if settings:
        from quire.engine.composition import EngineConfig

        with options_named():
            EngineConfig(**settings)
    return settings


def parse_bytes(option: str, text: str) -> int:
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if found is None:
        raise InvalidRequest(f"{option} {text!r} is not a size like 2G or 512M")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


# Opening


def open_chat_model(
    model: str | None, settings: dict[str, Any], *, server: str | None, api_key: str | None, is_local: bool
) -> ChatModel:
    """A running server that has the model, or else the model itself. Settings of an engine mean one of our own."""
    address = choose_address(server, is_local=is_local, engine_options=[_option(name) for name in settings])
    if address is not None:
        remote = find_server(address, model, chosen_key(api_key))
        if remote is not None:
            return remote
    return LocalModel(open_llm(model, settings), model or DEFAULT_MODEL)


def open_llm(model: str | None, settings: dict[str, Any]) -> LLM:
    """Load a model, with a bar on a terminal. One that quire knows and that is not here is fetched first."""
    from quire.engine.llm import LLM

    path, name = locate(model), model or DEFAULT_MODEL
    with options_named(), _memory_named(name), loading_bar(name) as progress:
        return LLM(path, progress=progress, **settings)


def locate(name: str | None) -> Path:
    try:
        return resolve(name)
    except ModelNotFound:
        known = find_known(name or DEFAULT_MODEL)
        if known is None:
            raise
    typer.echo(f"{known.name} is not on this machine: fetching it, {known.size_bytes / 1e6:.0f} MB", err=True)
    with download_bar(known.name) as progress:
        return pull(known.name, progress)


@contextmanager
def _memory_named(name: str) -> Iterator[None]:
    """A model too large for the machine is no bug: say it in one line. PyTorch has no class for it on a CPU."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search(r"alloc|out of memory", str(error)):
            raise
        advice = "try a smaller --kv-memory or --max-context, or a smaller model"
        raise QuireError(f"{name}: does not fit into the memory of this machine; {advice}") from None


@contextmanager
def loading_bar(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr while the weights are read; nothing where nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"loading {name}", total=None)  # of unknown length while PyTorch itself loads
        yield lambda done, total: bar.update(task, completed=done, total=total)


# Writing

# On a terminal a model must not move the cursor or set colours: only line ends and tabs get through.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class AnswerWriter:
    """Writes to stdout at once, and knows whether a line is still open. Thoughts go beside it, where somebody looks."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._is_watched = sys.stderr.isatty()
        self._is_dumb = os.environ.get("TERM") == "dumb"  # it would show the codes for dim letters
        self._is_line_open = self._is_thought_open = False
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a character this terminal lacks must not end the answer

    def think(self, text: str) -> None:
        """Dimmed, on stderr, and only at a terminal: whoever reads a pipe wants the answer."""
        if text and self._is_watched:
            self._is_thought_open = True
            text = text.translate(_CONTROLS)
            typer.echo(text if self._is_dumb else typer.style(text, dim=True), nl=False, err=True)

    def say(self, text: str) -> None:
        if text:
            self._end_thought()
            self._is_line_open = not text.endswith("\n")  # first: a Ctrl-C may come right behind the flush
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
    """How fast tokens came."""

    started_s: float = field(default_factory=time.perf_counter)
    num_tokens: int = 0
    _num_first: int = 0
    _first_s: float | None = None
    _last_s: float = 0.0

    def take(self, piece: Piece) -> None:
        """Where nobody counts the tokens, text is one, until the bill says better."""
        self.count(int(bool(piece.text or piece.thought)) if piece.num_tokens is None else piece.num_tokens)

    def settle(self, bill: AnswerUsage | None) -> None:
        if bill is not None:
            self.num_tokens = bill.completion_tokens

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
        """After the first, which waited for the prompt. None: there was no second one."""
        if self._first_s is None or self._last_s <= self._first_s:
            return None
        return (self.num_tokens - self._num_first) / (self._last_s - self._first_s)

    def __str__(self) -> str:
        tokens = f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"
        return tokens if self.tokens_per_s is None else f"{tokens}, {self.tokens_per_s:.{self._digits()}f} tok/s"

    def _digits(self) -> int:
        return 0 if (self.tokens_per_s or 0) >= 10 else 1
