"""R24, R25: a disk that is full or read-only, and a wall clock that jumps."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import resource
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from openai import OpenAI, OpenAIError

from tests.gauntlet.figures import Figure, Gauntlet, Row, counted, exactly
from tests.gauntlet.flood import Flood, chat_body, family, health_watched, num_violations, text_of
from tests.gauntlet.hooks import CLOCK, LOG, ROOT, faulty
from tests.server.rig import Server, serving
from tests.server.test_batches import client_of, finished, line, results, submit
from tests.waiting import HANG_S, eventually

FAKE = ("--backend", "fake", "--num-blocks", "400", "--device", "3ms")
DISK_BYTES = 4 << 20
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
NUM_PROMPTS = 8


class Disk:
    """A folder that can be full or read-only: a small tmpfs or, if it cannot be mounted, a limit of file sizes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.is_mounted = _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))

    def break_(self, how: str, server: Server) -> None:
        if how == "full" and self.is_mounted:
            with contextlib.suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        elif how == "read-only" and self.is_mounted:
            # Refused while a file is open for writing.
            eventually(lambda: _mount("-o", "remount,ro", str(self.folder)), "the disk is read-only", 30.0)
        else:  # every write fails
            for process in family(server):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def mend(self, server: Server) -> None:
        for process in family(server):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, NO_LIMIT)
        if self.is_mounted:
            _mount("-o", "remount,rw", str(self.folder))
        (self.folder / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False, capture_output=True)


def _mount(*options: str) -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(["mount", *options], check=False, capture_output=True).returncode == 0
    return False


@contextlib.contextmanager
def small_disk(gauntlet: Gauntlet, name: str) -> Iterator[Disk]:
    disk = Disk(gauntlet.folder / name)
    try:
        yield disk
    finally:
        disk.close()


def prompt(number: int) -> str:
    return f"Chapter {number}. " + "The quick brown fox jumps over the lazy dog. " * 12


def answers(server: Server, numbers: Sequence[int], num_tokens: int = 8) -> list[str]:
    """The texts of the answers. The text of an error is empty; that of an answer never is."""
    replies = Flood(server, [chat_body(prompt(number), num_tokens, stream=False) for number in numbers]).wait()
    return [text_of(reply) if reply.ending == "done" else "" for reply in replies]


def num_lines(server: Server, pattern: str) -> int:
    return sum(bool(re.search(pattern, line)) for line in list(server.stderr))


# KV files


def break_cache(disk: Disk, how: str, options: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
    """Break the disk of a running server, then kill the server and start it again with a good disk."""
    options = (*options, "--disk-cache", "3M", "--cache-dir", str(disk.folder / "kv"))
    old, new = range(NUM_PROMPTS // 2), range(NUM_PROMPTS // 2, NUM_PROMPTS)
    with serving(*options) as server:
        found = answers(server, old)
        eventually(lambda: server.stats()["tiers"][-1]["num_pieces"] > 0, "something is saved")
        disk.break_(how, server)
        found += answers(server, new)
        wanted = r"cached content cannot be saved|cannot be (?:written|used)"
        eventually(lambda: num_lines(server, wanted), "the log says that nothing is saved")
        found += answers(server, range(NUM_PROMPTS))
        num_said = num_lines(server, wanted)
        problems = num_lines(server, "Traceback")
        disk.mend(server)
        server.process.kill()
        server.process.wait(HANG_S)
    with serving(*options) as server:
        later = answers(server, range(NUM_PROMPTS))
        is_loaded = server.stats()["tiers"][-1]["num_loads"] > 0
        return {
            "answers lost or changed": sum(map(str.__ne__, found, (*expected, *expected))),
            "difference from one log line about the disk": abs(num_said - 1),
            "tracebacks in the log": problems,
            "answers lost or changed after a restart": sum(map(str.__ne__, later, expected)),
            "restarts after which nothing is loaded from disk": int(not is_loaded),
            "broken invariants reported by workers": num_violations(server),
        }


def cache_figures(gauntlet: Gauntlet) -> Iterator[Figure]:
    # A step takes so long that a load from disk always pays.
    options = (str(gauntlet.tiny), "--backend", "fake", "--num-blocks", "400", "--device", "50ms")
    with serving(*options) as server:
        expected = answers(server, range(NUM_PROMPTS))
    for how in ("full",) if gauntlet.is_quick else ("full", "read-only", "limit of file sizes"):
        with small_disk(gauntlet, f"disk {how}") as disk:
            what = how if disk.is_mounted else "limit of file sizes"
            found = break_cache(disk, how, options, expected)
            yield from counted(f"cache files (disk: {what}): ", found)


# Batch files


def break_batches(gauntlet: Gauntlet, how: str) -> list[Figure]:
    """Upload and run a batch on a broken disk, then restart the server with the mended disk."""
    lines = [line(f"q-{number}", max_tokens=60) for number in range(gauntlet.size(60, 20))]
    with small_disk(gauntlet, f"batches {how}") as disk:
        env = {"QUIRE_STATE_DIR": str(disk.folder / "state")}
        what = f"batch files (disk: {how if disk.is_mounted else 'limit of file sizes'}): "
        with serving(str(gauntlet.tiny), *FAKE, env=env) as server, client_of(server) as client:
            batch = submit(client, *lines)
            disk.break_(how, server)
            is_refused = _is_refused(client, lines)
            num_chats = sum(server.chat().status == 200 for _ in range(5))
            disk.mend(server)
            listed = len(client.files.list().data)
            assert server.stop() == 0
            num_traces = num_lines(server, "Traceback")
        with serving(str(gauntlet.tiny), *FAKE, env=env) as server, client_of(server) as client:
            found = finished(client, batch.id)
            answered = results(client, found.output_file_id) if found.output_file_id else {}
            files = [client.files.content(file.id).text for file in client.files.list().data]
    faults = {
        "uploads that were accepted": not is_refused,
        "chats that failed": 5 - num_chats,
        "incomplete files in /v1/files": max(0, listed - 2),  # the input, and possibly the output
        "tracebacks in the log": num_traces,
        "lines of the batch without a result": len(lines) - len(answered),
        "files with an incomplete line": sum(map(_is_torn, files)),
    }
    return counted(what, faults)


def _is_refused(client: OpenAI, lines: Sequence[str]) -> bool:
    try:
        client.files.create(file=("later.jsonl", "\n".join([*lines] * 5).encode()), purpose="batch")
    except OpenAIError as error:
        return getattr(error, "status_code", 0) >= 500
    return False


def _is_torn(text: str) -> bool:
    try:
        return not all(json.loads(one) for one in text.splitlines())
    except ValueError:
        return True


# Logs


def break_logs(gauntlet: Gauntlet) -> list[Figure]:
    """Start a server whose standard error is a full device, and send requests."""
    count, found = gauntlet.size(200, 10), Counter[str]()
    env = faulty(gauntlet.folder / "log", **{LOG: "/dev/full"})
    with serving(str(gauntlet.tiny), *FAKE, env=env) as server:
        found["failed requests"] += sum(server.chat(f"{i}", max_tokens=2).status != 200 for i in range(count))
        found["servers that exited with another status than 0"] += server.stop() != 0
    return counted("log on a full device: ", found)


def run_disks(gauntlet: Gauntlet) -> Iterator[Figure]:
    yield from cache_figures(gauntlet)
    # Not read-only: the server keeps a file of its state open, and the kernel refuses to make such a disk read-only.
    for how in ("full",) if gauntlet.is_quick else ("full", "limit of file sizes"):
        yield from break_batches(gauntlet, how)
    yield from break_logs(gauntlet)


# R25: a wall clock that jumps

JUMPS_S = (3600.0, -3600.0, 864_000.0, -864_000.0, 315_360_000.0, -315_360_000.0, 0.5, -0.5)
# Modules that need the time of day: fields of answers, logs and files, ages of files, and the 24 hours of a batch.
WALL_CLOCK = {
    "quire/batch", "quire/cli/bench.py", "quire/cli/cache.py", "quire/engine/composition.py", "quire/engine/levels/",
    "quire/server/catalog.py", "quire/server/models.py",
    "quire/engine/worker/event_publisher.py", "quire/server/batches/", "quire/server/http.py",
    "quire/server/metrics.py",
    "quire/server/watch.py", "quire/server/protocols/", "quire/text/template_worker.py",
    "quire/weights/hub.py",
}  # fmt: skip
READINGS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}


def wall_clock_readings() -> list[str]:
    """Places in the package that read the wall clock, outside of the modules that need the time of day."""
    found = []
    for path in sorted((ROOT / "quire").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if any(name.startswith(known) for known in WALL_CLOCK):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found += [f"{name}:{node.lineno}"] * ((node.value.id, node.attr) in READINGS)
    return found


def num_negative(server: Server) -> int:
    """Number of negative values in /metrics, in the log, and in the data of the web page."""
    text = server.get("/metrics").body.decode()
    samples = [line.rpartition(" ")[2] for line in text.splitlines() if line and not line.startswith("#")]
    fields = re.findall(r" \w+=(-\d[\d.]*)", "".join(one for one in server.stderr if "quire.request" in one))
    shown = json.dumps([server.stats(), server.get("/v1/requests").json])
    return sum(float(one) < 0 for one in samples) + len(fields) + len(re.findall(r'_s(?:econds)?": -\d', shown))


def jump(gauntlet: Gauntlet, server: Server, clock: Path, num_jumps: int, num_tokens: int) -> Counter[str]:
    """Move the clock while requests run. Returns the faults."""
    found: Counter[str] = Counter()
    worker = server.worker_pid
    with health_watched(server) as health:
        for number in range(num_jumps):
            flood = Flood(server, [chat_body(f"{i}", num_tokens, stream=i % 2 == 0) for i in range(6)])
            flood.wait_flowing(1)
            new = gauntlet.folder / "clock.new"
            new.write_text(str(JUMPS_S[number % len(JUMPS_S)]))
            new.rename(clock)
            found["requests without a complete answer"] += sum(reply.ending != "done" for reply in flood.wait())
    found["restarts of the worker"] += server.worker_pid != worker
    found["times /health was not 200"] += sum(status != 200 for _, status in health.changes)
    found["negative values in metrics, logs and reports"] += num_negative(server)
    found["clocks that did not jump"] += not _saw(server)
    return found


def _saw(server: Server) -> bool:
    """Whether the log has lines of several years: the clock of the server did jump."""
    return len({one[:4] for one in server.stderr if re.match(r"\d{4}-", one)}) > 1


def run_clock(gauntlet: Gauntlet) -> Iterator[Figure]:
    readings = wall_clock_readings()
    gauntlet.say(", ".join(readings))
    yield exactly("readings of the wall clock in modules that do not need the time of day", len(readings))
    limits = ("queue-timeout", "hang-limit", "header-timeout", "body-timeout", "slow-client-timeout")
    options = ("--num-blocks", "400", *(f"--{name}=60" for name in limits))
    clock = gauntlet.folder / "clock"
    env = faulty(gauntlet.folder / "hooks", **{CLOCK: str(clock)})
    for prefix, model in gauntlet.models(*options, "--device", "3ms", "--max-num-seqs", "4", real=options):
        num_jumps, num_tokens = (8, 30) if prefix else (gauntlet.size(40, 8), gauntlet.size(150, 60))
        clock.write_text("0")
        with serving(*model, env=env) as server:
            found = jump(gauntlet, server, clock, num_jumps, num_tokens)
        yield from (Figure(f"{prefix}jumps of the wall clock", num_jumps), *counted(prefix, found))


ROWS = (
    Row("R24", "A full or read-only disk stops no chat and damages no stored file", run_disks, 480),
    Row("R25", "Jumps of the wall clock fail no request", run_clock, 240),
)
