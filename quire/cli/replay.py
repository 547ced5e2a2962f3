"""`quire replay`: send a recorded trace to a server and compare with the simulation of the same trace."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import options
from quire.cli.replay_report import Replayed, described, document, print_report
from quire.cli.server_client import ServerClient, ServerError, note, reach_server
from quire.cli.terminal import echo
from quire.errors import InvalidRequest, QuireError
from quire.sim.replay import Ending, Fit, Probe, fit, measured, predicted, prepare, probe_work
from quire.sim.server_log import read_log
from quire.sim.simulator import SimConfig, StepTime, simulate
from quire.sim.traces import TraceRequest, read_trace

if TYPE_CHECKING:
    from quire.cli.replay_client import ReplayClient

PROBE_ROUNDS = 2
LONG_PROBE = 512  # tokens


def replay(
    trace: Annotated[
        str | None, typer.Argument(help="A recorded trace, JSON lines (docs/simulator.md); - is standard input.")
    ] = None,
    from_log: Annotated[
        str | None, typer.Option(metavar="LOG", help="Log of a server with --log-format json, instead of a trace.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model of the server; by default the first.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Speed of the trace: 2.0 sends it in half the time.")] = 1.0,
    max_requests: Annotated[int | None, typer.Option(help="Maximum number of requests to send.")] = None,
    base_ms: Annotated[float | None, typer.Option(help="Fixed time of a step, in place of the measured one.")] = None,
    token_us: Annotated[
        float | None, typer.Option(help="Time per computed token, in place of the measured one.")
    ] = None,
    context_us: Annotated[
        float | None, typer.Option(help="Time per KV token that is read, in place of the measured one.")
    ] = None,
    server: options.ServerOption = None,
    api_key: options.KeyOption = None,
    save_trace: Annotated[Path | None, typer.Option(help="Write the trace that is sent to this file.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and write the trace without sending it.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write all figures to this JSON file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")] = False,
) -> None:
    """Send a recorded trace to a server and compare its figures with those of the simulator."""
    _check_outputs(trace or from_log, {"--save": save, "--save-trace": save_trace})
    todo = _trace(trace, from_log, speed, max_requests)
    if save_trace is not None:
        save_trace.write_text("".join(f"{request.as_line()}\n" for request in todo), encoding="utf-8")
        echo(f"Wrote {save_trace}", err=True)
    if dry_run:
        echo(described(todo))
        return
    given = {"base_ms": base_ms, "token_us": token_us, "context_us": context_us}
    result = _run(reach_server(server, api_key), model, todo, given)
    figures = document(trace or from_log or "", speed, result)
    if save is not None:
        save.write_text(json.dumps({**figures, "served": [asdict(one) for one in result.served]}, indent=2) + "\n")
        echo(f"Wrote {save}", err=True)
    if as_json:
        echo(json.dumps(figures, indent=2))
    else:
        print_report(result)


# Options


def _check_outputs(trace: str | None, outputs: dict[str, Path | None]) -> None:
    """Refuse outputs that could not be written, before the run."""
    for option, path in outputs.items():
        if path is None:
            continue
        if path.is_dir() or not path.parent.is_dir():
            problem = "is a folder" if path.is_dir() else "is in a folder that does not exist"
            raise InvalidRequest(f"{option} {path} {problem}")
        if trace is not None and path.exists() and Path(trace).exists() and path.samefile(trace):
            raise InvalidRequest(f"{option} {path} is the trace itself")


def _trace(path: str | None, log: str | None, speed: float, max_requests: int | None) -> list[TraceRequest]:
    if (path is None) == (log is None):
        raise InvalidRequest("give one trace, as an argument or with --from-log")
    if log is not None:
        recorded = read_log(log)
        found = recorded.requests
        echo(
            f"{log}: {len(found):,} requests, {recorded.num_left_out:,} that were not served are left out."
            " A log does not contain prompts: in this trace no prompts share a prefix",
            err=True,
        )
    else:
        found = read_trace(path or "")
    try:
        return prepare(found, speed=speed, max_requests=max_requests)
    except InvalidRequest as error:
        field, rest = str(error).split(" ", 1)
        raise InvalidRequest(f"--{field.replace('_', '-')} {rest}") from None


# Running


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters since the start of the server. None: not reported."""

    num_preemptions: int | None
    num_steps: int | None


def _run(
    server: ServerClient, wanted: str | None, trace: Sequence[TraceRequest], given: dict[str, float | None]
) -> Replayed:
    from quire.cli.replay_client import ReplayClient, Texts, find_vocab_size

    model, _ = server.find_model(wanted)
    texts = Texts(find_vocab_size(server, model))
    client = ReplayClient(server, model, texts, f"replay-{secrets.token_hex(8)}")
    config = server_config(server, model)
    found = _step_times(client, config, given)
    before = _counts(server, model)
    with _progress(len(trace), "replaying") as show:
        served = client.play(trace, show)
    after = _counts(server, model)
    with _progress(len(trace), "simulating") as show:
        report = simulate(trace, config, found.step_time, show)
    return Replayed(
        url=server.url,
        model=model,
        trace=trace,
        served=served,
        num_made_up=texts.num_made_up,
        live=measured(
            served,
            num_preemptions=_difference(before.num_preemptions, after.num_preemptions),
            num_steps=_difference(before.num_steps, after.num_steps),
        ),
        report=report,
        fit=found,
        simulated=predicted(report, found.overhead_s),
    )


def server_config(server: ServerClient, model: str) -> SimConfig:
    """The settings of the server's scheduler."""
    from urllib.parse import quote

    found = server.get(f"/version?model={quote(model)}")
    try:
        return SimConfig(**found["scheduling"])
    except (KeyError, TypeError):
        raise server.malformed("no scheduling settings", found) from None


def _step_times(client: ReplayClient, config: SimConfig, given: dict[str, float | None]) -> Fit:
    """Step times: those that were given, the others measured."""
    known = {name: value for name, value in given.items() if value is not None}
    try:
        if len(known) == len(given):
            return Fit(StepTime(**known), 0.0, 0.0)
        note("measuring how long steps take")
        found = fit(_probes(client, config))
        return replace(found, step_time=replace(found.step_time, **known))
    except InvalidRequest as error:
        field, rest = str(error).split(" ", 1)
        if field not in given:
            raise
        raise InvalidRequest(f"--{field.replace('_', '-')} {rest}") from None


def _probes(client: ReplayClient, config: SimConfig) -> list[Probe]:
    """Measurements with short and long prompts, with and without answers, alone and batched, to fit step times."""
    room = min(config.max_model_len or 1 << 30, (config.num_blocks - 1) * config.block_size)
    long, answer, batched = min(LONG_PROBE, room // 2), min(33, room // 4), min(8, config.max_num_seqs)
    short = min(8, room // 4)
    shapes = [(short, 1, 1), (short, answer, 1), (long, 1, 1), (long, answer, 1), (short, answer, batched)]
    probes: list[Probe] = []
    for number in range(PROBE_ROUNDS + 1):
        for prompt, outputs, num_requests in shapes if number else shapes[:1]:  # the first round is a warm-up
            name = f"probe {number} {prompt} {outputs} {num_requests}"
            todo = [
                TraceRequest(0.0, prompt, outputs, shared=((f"{name} {index}", prompt),))
                for index in range(num_requests)
            ]
            served = client.play(todo)
            for one in served:
                if one.ending is not Ending.FINISHED or one.num_outputs != outputs:
                    raise ServerError(
                        f"a probe of {outputs} tokens got {one.num_outputs} and {one.ending}: {one.problem}"
                    )
            took_s = max(one.end_s for one in served) - min(one.sent_s for one in served)
            probes.append(Probe(*probe_work(prompt, outputs, num_requests, config), took_s))
    return probes[1:]


def _counts(server: ServerClient, model: str) -> _Counts:
    from quire.cli.prometheus_text import read_exposition, total

    try:
        text = server.get_text("/metrics")
    except QuireError:  # the key may not be allowed to read metrics
        return _Counts(None, None)
    samples = list(read_exposition(text))
    preemptions = total(samples, "quire:num_preemptions_total", model_name=model)
    steps = total(samples, "quire:iteration_tokens_total_count", model_name=model)
    return _Counts(None if preemptions is None else int(preemptions), None if steps is None else int(steps))


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


@contextmanager
def _progress(total: int, what: str) -> Iterator[Any]:
    from quire.cli.sim import progress_bar

    with progress_bar(total) as show:
        yield lambda done: show(done, what)
