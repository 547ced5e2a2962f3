"""`quire batch`: a file of prompts or requests in, a file of answers out. An interrupted run continues."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

import typer

from quire.batch.runner import (
    BatchRequest,
    BatchRunner,
    ConnectionLost,
    GaveUp,
    LineParser,
    LineSettings,
    Reply,
    Result,
    ResultFile,
    ResultScan,
    RetryPolicy,
    num_completion_tokens,
    open_output,
    read_lines,
)
from quire.cli import options
from quire.cli.chat import find_server, locate
from quire.cli.http_stream import HttpStream, RefusedRequest, ServerError, Timeouts, TooLarge, printable, value_of
from quire.cli.server_client import PATIENT, ServerClient, check_installed, choose_address, chosen_key, note, serving
from quire.cli.terminal import echo, make_bar
from quire.errors import InvalidRequest, QuireError
from quire.weights.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.progress import Progress

PRIORITIES = ("high", "normal", "low")
PIPE = "-"
LINE_EVERY_S = 10.0  # a line of progress on a pipe
READ_LIMIT_S = 3600.0  # a request of low priority may wait long; a server sends nothing until it answers
TIMEOUTS = Timeouts(10.0, READ_LIMIT_S)
MAX_REPLY_BYTES = 256 << 20
RETRIED = (429, 502, 503, 504, 529)


class _Target(NamedTuple):
    server: ServerClient
    model: str  # the server's name for --model or for the default model


@options.takes(engine=options.engine)
def batch(
    source: Annotated[str, typer.Argument(metavar="IN", help="JSONL file of prompts or requests; -: standard input.")],
    output: Annotated[str, typer.Argument(metavar="OUT", help="JSONL file for the results; -: standard output.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Use this model for every line. By default a line may name its own."),
    ] = None,
    server: options.ServerOption = None,
    api_key: options.KeyOption = None,
    local: Annotated[
        bool, typer.Option("--local", help="Start a private server process, even if a server runs.")
    ] = False,
    priority: Annotated[str, typer.Option(help="Priority of all requests: high, normal or low.")] = "low",
    max_in_flight: Annotated[int, typer.Option(min=1, max=1024, help="Requests sent at once.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Longest answer to a plain prompt, in tokens.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature for plain prompts; by default the model's own.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt for plain prompts.")] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run the lines that failed in an earlier run again.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT instead of continuing it.")] = False,
    retries: Annotated[int, typer.Option(min=1, help="Times a request is sent before the run stops.")] = 20,
    *,
    engine: options.Settings,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")] = False,
) -> None:
    """Answer every line of a JSONL file: plain prompts, or requests in OpenAI's batch format.

    Run the same command again to continue after an interruption. Exits with 1 if a line failed.
    """
    _check(priority, source, output)
    defaults: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        defaults["temperature"] = temperature
    lines = LineSettings(model=model, priority=priority, system=system, defaults=defaults)
    from_file, to_file = (None if name == PIPE else Path(name) for name in (source, output))
    named = {options.option_name(name): str(value) for name, value in engine.items()}
    noted = {
        "--model": model,
        "--system": system,
        **{options.option_name(name): value for name, value in defaults.items()},
    }
    with ExitStack() as stack:
        results = ResultFile(sys.stdout.buffer, ResultScan())
        if to_file is not None:  # locked for this process
            results = open_output(to_file, from_file, noted, is_overwriting=overwrite, is_retrying=retry_failed)
            stack.callback(results.close)
        progress = _Progress(results.scan, from_file, to_file, is_quiet=quiet)
        if progress.total is not None and progress.scan.num_finished >= progress.total:
            progress.tell("every line has a result already; --retry-failed runs failed lines again")
        else:
            target = stack.enter_context(_serving(model, named, server=server, api_key=api_key, is_local=local))
            lines = lines if model is None else replace(lines, model=target.model)
            retry = RetryPolicy(max_tries=retries)
            _run(progress, results, target.server, lines, max_in_flight=max_in_flight, retry=retry)
    progress.tell(str(progress))
    if progress.scan.num_failed:
        raise typer.Exit(1)


def _check(priority: str, source: str, output: str) -> None:
    """Refuse invalid options before a model is loaded."""
    if priority not in PRIORITIES:
        raise InvalidRequest(f"--priority {priority!r} is not one of {', '.join(PRIORITIES)}")
    if source != PIPE and not Path(source).is_file():
        raise InvalidRequest(f"IN = {source!r} is not a file")
    if PIPE not in (source, output) and Path(output).exists() and Path(output).samefile(source):
        raise InvalidRequest(f"OUT = {output!r} is the input itself")


@contextmanager
def _serving(
    model: str | None, engine: dict[str, str], *, server: str | None, api_key: str | None, is_local: bool
) -> Iterator[_Target]:
    """A running server that has the model, or else a private one in a process of its own."""
    address = choose_address(server, is_local=is_local, engine_options=list(engine))
    key = chosen_key(api_key)
    if address is not None and (found := find_server(address, model, key)) is not None:
        yield _Target(ServerClient(address.url, key, TIMEOUTS), found.name)
        return
    check_installed("a private server")
    locate(model)  # downloads the model with a progress bar; the server's output is hidden
    note(f"loading {model or DEFAULT_MODEL}")
    own_key = secrets.token_urlsafe(24)
    given = [text for pair in engine.items() for text in pair]
    # --max-in-flight bounds the queue, so the server must not refuse a request because of its own limits.
    patience = ["--queue-timeout", "86400", "--max-queue", "4096", "--max-queued-tokens", str(1 << 30)]
    with serving(model or DEFAULT_MODEL, [*given, *patience], {"QUIRE_API_KEY": own_key}) as process:
        name, _ = ServerClient(process.url, own_key, PATIENT).find_model(None)
        yield _Target(ServerClient(process.url, own_key, TIMEOUTS), name)


def _run(
    progress: _Progress,
    results: ResultFile,
    server: ServerClient,
    lines: LineSettings,
    *,
    max_in_flight: int,
    retry: RetryPolicy,
) -> None:
    """Send the lines that have no result yet, and write the results."""

    def take(result: Result) -> None:
        results.write(result)
        progress.add(result)

    async def send(request: BatchRequest) -> Reply:
        stream = server.stream(request.url, request.body)
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, _exchange, stream)
        finally:
            stream.cut()  # ends the thread if the run was interrupted

    async def send_all(file: BinaryIO) -> None:
        parsed = LineParser(lines).parse_all(file)
        todo = (line for line in parsed if line.number not in progress.scan.finished)
        await BatchRunner(todo, send, take, max_in_flight=max_in_flight, retry=retry).run()

    try:
        with ThreadPoolExecutor(max_in_flight) as threads, progress, progress.opened_source() as file:
            asyncio.run(send_all(file))
    except GaveUp as error:
        raise QuireError(f"{error}. {progress.interrupted()}") from None
    except KeyboardInterrupt:
        echo(f"\ninterrupted. {progress.interrupted()}", err=True)
        raise typer.Exit(130) from None


class _Progress:
    """Shows the results of a run. `scan`: those of earlier runs, to which this one adds its own."""

    def __init__(self, scan: ResultScan, source: Path | None, output: Path | None, *, is_quiet: bool) -> None:
        self.scan = scan
        self.total: int | None = None  # lines of the input; None: not known
        self._num_before = scan.num_finished
        self.num_tokens = 0
        self._source = source
        self._can_continue = source is not None and output is not None
        self._is_quiet = is_quiet
        self._ended_s: float | None = None
        self._bar: Progress | None = None
        if source is not None and output is not None:
            with source.open("rb") as file:
                self.total = sum(1 for _ in read_lines(file))
        if scan.num_finished:
            self.tell(f"continuing {output}: {scan.num_finished:,} lines have a result already")

    def opened_source(self) -> AbstractContextManager[BinaryIO]:
        return nullcontext(sys.stdin.buffer) if self._source is None else self._source.open("rb")

    def tell(self, text: str) -> None:
        if not self._is_quiet:
            echo(text, err=True)

    @property
    def num_done(self) -> int:
        """Lines of this run."""
        return self.scan.num_finished - self._num_before

    @property
    def elapsed_s(self) -> float:
        return (time.monotonic() if self._ended_s is None else self._ended_s) - self._started_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(self.elapsed_s, 1e-9)

    def __enter__(self) -> None:
        self._started_s = self._shown_s = time.monotonic()
        if sys.stderr.isatty() and not self._is_quiet:
            self._bar = make_bar("count", "counts", "left", is_transient=False)
            self._task = self._bar.add_task("batch", total=self.total, completed=self.scan.num_finished, counts="")
            self._bar.start()

    def __exit__(self, *_error: object) -> None:
        self._ended_s = time.monotonic()
        if self._bar is not None:
            self._bar.stop()

    def add(self, result: Result) -> None:
        if result.reply is not None and result.is_good:
            self.num_tokens += num_completion_tokens(json.loads(result.reply.body))
        if self._bar is not None:
            counts = f"{self.scan.num_failed} failed, {self.tokens_per_s:.0f} tok/s"
            self._bar.update(self._task, completed=self.scan.num_finished, counts=counts)
        elif not self._is_quiet and time.monotonic() - self._shown_s >= LINE_EVERY_S:
            self._shown_s = time.monotonic()
            self.tell(str(self))

    def interrupted(self) -> str:
        how = "; run the same command again to continue" if self._can_continue else ""
        return f"{self.scan.num_finished:,} lines have a result{how}"

    def __str__(self) -> str:
        scan = self.scan
        text = f"{scan.num_finished:,} lines: {scan.num_good:,} answered, {scan.num_failed:,} failed"
        if self.num_done:
            rate = self.num_done / max(self.elapsed_s, 1e-9)
            text += (
                f"; this run: {self.num_done:,} in {self.elapsed_s:.1f} s,"
                f" {rate:.1f} lines/s, {self.tokens_per_s:.0f} tokens/s"
            )
        return text


def _exchange(stream: HttpStream) -> Reply:
    """Any status is a reply. A body that is not JSON, such as a proxy's error page, is wrapped in OpenAI's format."""
    status = 200
    headers: dict[str, str] = {}
    try:
        body = stream.read(MAX_REPLY_BYTES)
    except RefusedRequest as error:
        status, headers, body = error.status, error.headers, error.body
    except TooLarge as error:
        body = str(error).encode()
    except ServerError as error:
        raise ConnectionLost(str(error)) from None
    may_retry = status in RETRIED and headers.get("x-should-retry") != "false"
    if value_of(body) is None:
        text = printable(body[:200].decode("utf-8", "replace")) or "empty"
        found = {"message": f"not JSON: {text}", "type": "server_error", "param": None, "code": None}
        body = json.dumps({"error": found}).encode()
        status = status if status >= 400 else 502
    after = headers.get("retry-after", "")
    return Reply(
        status=status,
        request_id=printable(headers.get("x-request-id", "")),
        body=body,
        retry_after_s=min(float(after), READ_LIMIT_S) if after.isdecimal() else None,
        may_retry=may_retry,
    )
