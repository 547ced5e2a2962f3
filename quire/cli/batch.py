"""`quire batch`: a file of prompts or requests in, a file of answers out. An interrupted run continues."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from quire.batch.lines import LineParser, LineSettings, read_lines
from quire.batch.results import Result, ResultFile, ResultScan, num_completion_tokens, open_output
from quire.batch.runner import BatchRunner, GaveUp, RetryPolicy
from quire.cli import options
from quire.cli.batch_client import BatchClient
from quire.cli.batch_progress import BatchProgress
from quire.cli.remote_model import find_server
from quire.cli.server_client import PATIENT, ServerClient, choose_address, chosen_key
from quire.cli.terminal import echo
from quire.errors import InvalidRequest, QuireError
from quire.weights.hub import DEFAULT_MODEL

PRIORITIES = ("high", "normal", "low")
PIPE = "-"


@dataclass(frozen=True, slots=True)
class _Target:
    """The server that the requests are sent to."""

    url: str
    api_key: str | None
    model: str  # the server's name for --model or for the default model


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
    max_in_flight: Annotated[int, typer.Option(help="Requests sent at once, 1 to 1024.")] = 64,
    ordered: Annotated[bool, typer.Option("--ordered", help="Write results in the order of the input.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Longest answer to a plain prompt, in tokens.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature for plain prompts; by default the model's own.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt for plain prompts.")] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run the lines that failed in an earlier run again.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT instead of continuing it.")] = False,
    retries: Annotated[int, typer.Option(help="Times a request is sent before the run stops.")] = 20,
    backend: options.BackendOption = None,
    precision: options.PrecisionOption = None,
    quantize: options.QuantizeOption = None,
    kv_cache_dtype: options.KvCacheDtypeOption = None,
    dtype: options.DtypeOption = None,
    device: options.DeviceOption = None,
    load_format: options.LoadFormatOption = None,
    threads: options.ThreadsOption = None,
    max_model_len: options.ContextOption = None,
    kv_memory: options.MemoryOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")] = False,
) -> None:
    """Answer every line of a JSONL file: plain prompts, or requests in OpenAI's batch format.

    Run the same command again to continue after an interruption. Exits with 1 if a line failed.
    """
    _check(priority, max_in_flight, retries, source, output)
    engine: dict[str, Any] = {
        "backend": backend, "precision": precision, "quantize": quantize, "kv_cache_dtype": kv_cache_dtype,
        "dtype": dtype, "device": device,
        "load_format": load_format, "threads": threads, "max_model_len": max_model_len, "kv_memory": kv_memory,
    }  # fmt: skip
    options.engine_settings(**engine)  # refuses invalid values
    defaults: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        defaults["temperature"] = temperature
    lines = LineSettings(model=model, priority=priority, system=system, defaults=defaults)
    run = _Run(source, output, lines, max_in_flight, ordered, RetryPolicy(max_tries=retries), quiet)
    named = {options.option_name(name): str(value) for name, value in engine.items() if value is not None}
    with run.opened(is_overwriting=overwrite, is_retrying=retry_failed):
        if run.is_finished:
            run.tell("every line has a result already; --retry-failed runs failed lines again")
        else:
            with _serving(model, named, server=server, api_key=api_key, is_local=local) as target:
                run.run(target)
    run.summarize()
    if run.num_failed:
        raise typer.Exit(1)


def _check(priority: str, max_in_flight: int, retries: int, source: str, output: str) -> None:
    """Refuse invalid options before a model is loaded."""
    if priority not in PRIORITIES:
        raise InvalidRequest(f"--priority {priority!r} is not one of {', '.join(PRIORITIES)}")
    for name, value, high in (("--max-in-flight", max_in_flight, 1024), ("--retries", retries, 1_000_000)):
        if not 1 <= value <= high:
            raise InvalidRequest(f"{name} {value} is not 1 to {high}")
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
    if address is not None:
        key = chosen_key(api_key)
        if (found := find_server(address, model, key)) is not None:
            yield _Target(address.url, key, found.name)
            return
    from quire.cli.bench_server import check_installed, serving
    from quire.cli.model_loading import locate

    check_installed("a private server")
    locate(model)  # downloads the model with a progress bar; the server's output is hidden
    if sys.stderr.isatty():
        echo(f"[loading {model or DEFAULT_MODEL}]", err=True)
    own_key = secrets.token_urlsafe(24)
    given = [text for pair in engine.items() for text in pair]
    # --max-in-flight bounds the queue, so the server must not refuse a request because of its own limits.
    patience = ["--queue-timeout", "86400", "--max-queue", "4096", "--max-queued-tokens", str(1 << 30)]
    with serving(model or DEFAULT_MODEL, [*given, *patience], {"QUIRE_API_KEY": own_key}) as process:
        name, _ = ServerClient(process.url, own_key, PATIENT).find_model(None)
        yield _Target(process.url, own_key, name)


class _Run:
    """One run of the command."""

    def __init__(
        self,
        source: str,
        output: str,
        lines: LineSettings,
        max_in_flight: int,
        is_ordered: bool,
        retry: RetryPolicy,
        is_quiet: bool,
    ) -> None:
        self._source = None if source == PIPE else Path(source)
        self._output = None if output == PIPE else Path(output)
        self._lines = lines
        self._max_in_flight = max_in_flight
        self._is_ordered = is_ordered
        self._retry = retry
        self._is_quiet = is_quiet
        self._scan = ResultScan()
        self._file: ResultFile  # set while the output is open
        self._progress = BatchProgress(None, 0)
        self._total: int | None = None

    @contextmanager
    def opened(self, *, is_overwriting: bool, is_retrying: bool) -> Iterator[None]:
        """Open the output file and lock it for this process."""
        if self._output is None:
            self._file = ResultFile(sys.stdout.buffer)
            yield
            return
        settings = {
            "--model": self._lines.model,
            "--ordered": self._is_ordered,
            "--system": self._lines.system,
            **{options.option_name(name): value for name, value in self._lines.defaults.items()},
        }
        with ExitStack() as stack:
            held = open_output(
                self._output, self._source, settings, is_overwriting=is_overwriting, is_retrying=is_retrying
            )
            stack.callback(held.close)
            self._scan, self._file = held.scan, held.file
            if self._source is not None:
                with self._source.open("rb") as file:
                    self._total = sum(1 for _ in read_lines(file))
            if held.scan.num_finished:
                self.tell(f"continuing {self._output}: {held.scan.num_finished:,} lines have a result already")
            yield

    @property
    def is_finished(self) -> bool:
        return self._total is not None and self._scan.num_finished >= self._total

    @property
    def num_failed(self) -> int:
        return self._scan.num_failed + self._progress.num_failed

    def tell(self, text: str) -> None:
        if not self._is_quiet:
            echo(text, err=True)

    def run(self, target: _Target) -> None:
        client = BatchClient(target.url, target.api_key, self._max_in_flight)
        self._progress = BatchProgress(self._total, self._scan.num_finished, is_quiet=self._is_quiet)
        try:
            with _input(self._source) as file, self._progress:
                asyncio.run(self._run(file, client, target.model))
        except GaveUp as error:
            raise QuireError(f"{error}. {self._interrupted()}") from None
        except KeyboardInterrupt:
            echo(f"\ninterrupted. {self._interrupted()}", err=True)
            raise typer.Exit(130) from None
        finally:
            client.close()

    async def _run(self, file: BinaryIO, client: BatchClient, model: str) -> None:
        settings = self._lines if self._lines.model is None else replace(self._lines, model=model)
        parsed = LineParser(settings).parse_all(file)
        todo = (line for line in parsed if line.number not in self._scan.finished)
        runner = BatchRunner(
            todo,
            client.send,
            self._take,
            max_in_flight=self._max_in_flight,
            is_ordered=self._is_ordered,
            retry=self._retry,
        )
        try:
            await runner.run()
        finally:
            client.abort()

    def _take(self, result: Result) -> None:
        self._file.write(result)
        num_tokens = 0
        if result.reply is not None and result.is_good:
            num_tokens = num_completion_tokens(json.loads(result.reply.body))
        self._progress.add(is_good=result.is_good, num_tokens=num_tokens)

    def _interrupted(self) -> str:
        done = self._scan.num_finished + self._progress.num_done
        if self._output is None or self._source is None:
            return f"{done:,} lines have a result"
        return f"{done:,} lines have a result; run the same command again to continue"

    def summarize(self) -> None:
        progress, before = self._progress, self._scan
        num_good = before.num_good + progress.num_good
        text = f"{num_good + self.num_failed:,} lines: {num_good:,} answered, {self.num_failed:,} failed"
        if progress.num_done:
            rate = progress.num_done / max(progress.elapsed_s, 1e-9)
            text += f"; this run: {progress.num_done:,} in {progress.elapsed_s:.1f} s,"
            text += f" {rate:.1f} lines/s, {progress.tokens_per_s:.0f} tokens/s"
        self.tell(text)


def _input(source: Path | None) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdin.buffer) if source is None else source.open("rb")
