"""R28: names of files outside, and model files that change while they are served."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from quire.errors import DownloadFailed, ModelFileError
from quire.weights import hub
from quire.weights.hub import KnownModel, resolve
from tests.gauntlet.figures import Figure, Gauntlet, Row, counted, exactly
from tests.gauntlet.file_mutants import open_and_read_all
from tests.gauntlet.flood import family, idle_base, left_over
from tests.gauntlet.secrets import audited
from tests.server import corpus
from tests.server.rig import FAKE, Server, serving
from tests.tiny import write_tiny_model
from tests.waiting import eventually
from tests.weights.makers import write_folder

CANARY = "outside-canary-c0ffee"


# Names in requests


def names(outside: Path) -> list[str]:
    """Names of a model or file outside the folders of the server."""
    up = os.path.relpath(outside, Path.cwd())
    return [
        str(outside), f"{outside}/", f"file://{outside}", up, f"./{up}", f"~/../..{outside}", f"//{outside}",
        "../outside", "../../outside", "..", ".", "/", "~", "../" * 30 + str(outside).lstrip("/"),
        "..%2foutside", "%2e%2e/outside", "..\\outside", "tiny/../../outside", "tiny/../../../outside/config.json",
        "tiny\0", f"tiny\0{outside}", f"{outside}\0.gguf", "x" * 5000, "../" * 1000, "\ud800", "tiny/..;/outside",
        "models--x--y/../../outside", "org/../outside", "org/..", "a/b/c/d", "C:\\outside", "-rf", "$(touch /tmp/x)",
        f"{outside}/canary.txt", "file-../../outside", "file-..%2f..%2foutside%2fcanary.txt", "batch_../../outside",
    ]  # fmt: skip


def name_requests(name: str) -> Iterator[tuple[str, str, object]]:
    """Every request that takes a name."""
    hi = [corpus.HI]
    for path in (corpus.CHAT, corpus.MESSAGES, corpus.OLLAMA_CHAT):
        yield "POST", path, {"model": name, "messages": hi, "max_tokens": 2}
    for path in (corpus.COMPLETIONS, corpus.OLLAMA_GENERATE, corpus.EXPLAIN, corpus.TOKENIZE):
        yield "POST", path, {"model": name, "prompt": "Hi"}
    for path in ("load", "unload", "pin", "unpin"):
        yield "POST", f"/v1/models/{path}", {"model": name}
    for path in ("/api/show", "/api/pull"):
        yield "POST", path, {"model": name, "stream": False}
    yield "POST", "/v1/batches", {"input_file_id": name, "endpoint": corpus.CHAT, "completion_window": "24h"}
    written = [quote(name, safe="", errors="surrogatepass")]
    if name.isascii() and name.isprintable() and not set(name) & set(" #?\\"):
        written.append(name)
    for one in written:
        for path in ("/v1/models", "/v1/files", "/v1/batches", "/page", "/v1/requests"):
            yield "GET", f"{path}/{one}", None
        yield "GET", f"/v1/files/{one}/content", None
        yield "DELETE", f"/v1/files/{one}", None
        yield "GET", f"/v1/cache/stats?model={quote(name, safe='', errors='surrogatepass')}", None


def ask_for_names(server: Server, outside: Path, step: int) -> tuple[int, list[str]]:
    """Send every name in every place. Returns the number of requests, and those that were not refused."""
    everything = [(*one, name) for name in names(outside) for one in name_requests(name)]
    wrong: list[str] = []
    for method, path, body, name in everything[::step]:
        try:
            answer = server.ask(method, path, body)
        except (UnicodeEncodeError, ValueError):  # the client cannot write this name
            continue
        is_static = path.startswith("/page/") and b"canary" not in answer.body and answer.status != 200
        is_listing = path.split("?")[0].rstrip("/") in ("/v1/models", "/v1/files", "/v1/batches", "/v1/requests")
        if CANARY in answer.body.decode(errors="replace") or answer.status >= 500:
            wrong.append(f"{method} {path[:80]} {name[:40]!r}: {answer.status}")
        elif answer.status == 200 and not is_static and not is_listing and not _is_default(name):
            wrong.append(f"{method} {path[:80]} {name[:40]!r}: 200")
    return len(everything[::step]), wrong


def _is_default(name: str) -> bool:
    return not name.strip("./")  # an empty path segment or a dot is another route, which a client normalises


# Names in files, and archives


LINKED = (
    *("config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json", "model.safetensors.index.json"),
)


def num_opened_links(folder: Path, outside: Path) -> int:
    """Open model folders in which one file is a link that leads outside. Returns how many opened."""
    num_opened = 0
    for number, name in enumerate(LINKED):
        home = write_folder(folder / f"links-{number}")
        (home / name).unlink(missing_ok=True)
        (home / name).symlink_to(outside / name if (outside / name).exists() else outside / "canary.txt")
        with contextlib.suppress(ModelFileError):
            open_and_read_all(home)
            num_opened += 1
    return num_opened


def escaping_archives(folder: Path) -> tuple[int, int]:
    """Unpack archives with hostile members. Returns how many there were, and the files that were written elsewhere."""
    home = folder / "unpacked"
    home.mkdir()
    before = {path for path in folder.rglob("*") if "archives" not in path.parts}
    hostile = ("../evil", "/tmp/quire-evil", "x/../../evil", "..\\evil", "model.gguf/../../evil", "evil\0name")
    (folder / "archives").mkdir()
    for number, name in enumerate(hostile):
        path = folder / "archives" / f"{number}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            link = zipfile.ZipInfo("model.gguf" if number % 2 else "other.gguf")
            link.external_attr = (stat.S_IFLNK | 0o777) << 16  # a link in place of the file
            archive.writestr(link, "/etc/passwd")
            archive.writestr(name, b"evil")
        for wanted in ("model.gguf", name):
            model = KnownModel("x", "x", wanted, "model.gguf", "0" * 64, 11, "", "")
            with contextlib.suppress(DownloadFailed):
                hub._unpack(model, path, home / f"{number}-{len(wanted)}", lambda *_: None)
    after = {path for path in folder.rglob("*") if "archives" not in path.parts and home not in path.parents}
    num_links = sum(path.is_symlink() for path in home.rglob("*"))
    return 2 * len(hostile), len(after - before) + Path("/tmp/quire-evil").exists() + num_links


# A model that changes while it is served


def _replace(path: Path) -> None:
    """As a download does: another file gets the name."""
    other = path.with_name("new")
    other.write_bytes(b"GGUF" + bytes(1000))
    os.replace(other, path)


def _overwrite(path: Path) -> None:
    """As `wget -O` or `cp` does: the same file, emptied and written again."""
    path.write_bytes(random.Random(0).randbytes(100_000))


CHANGES: tuple[Callable[[Path], object], ...] = (
    lambda path: os.truncate(path, 0),
    lambda path: os.truncate(path, path.stat().st_size // 2),
    _overwrite,
    _replace,
    Path.unlink,
)


def _answer(server: Server) -> object:
    reply = server.chat("What is the capital of Japan?", temperature=0, max_tokens=12)
    return reply.json["choices"][0]["message"]["content"] if reply.status == 200 else reply.status


def change_served(server: Server, good: Path, path: Path, found: Counter[str]) -> None:
    """Change the file in every way while the model is served, load it again, and restore it."""
    expected = _answer(server)
    for change in CHANGES:
        worker = server.worker_pid
        change(path)
        found["wrong answers"] += _answer(server) != expected
        found["workers that died"] += server.worker_pid != worker
        server.post("/v1/models/unload", {"model": "changing"})
        refused = server.post("/v1/models/load", {"model": "changing"})
        found["loads of a changed file that were not refused"] += refused.status == 200 or "error" not in refused.json
        restored = path.with_name("restored")
        shutil.copyfile(good, restored)
        os.replace(restored, path)
        found["restored files that did not load"] += server.post("/v1/models/load", {"model": "changing"}).status != 200
        found["wrong answers"] += _answer(server) != expected


def change_while_loading(server: Server, good: Path, path: Path, count: int, found: Counter[str]) -> None:
    """Truncate the file at random moments of a load. SIGBUS ends a process that reads the map of a truncated file."""
    rng = random.Random(28)
    server.post("/v1/models/unload", {"model": "changing"})
    begin = time.monotonic()
    server.post("/v1/models/load", {"model": "changing"})
    load_s = time.monotonic() - begin
    for _ in range(count):
        server.post("/v1/models/unload", {"model": "changing"})
        shutil.copyfile(good, path)
        server.post("/v1/models/load", {"model": "changing", "wait": False})
        time.sleep(rng.uniform(0, load_s))
        os.truncate(path, rng.choice((0, path.stat().st_size // 2)))
        eventually(lambda: "loading" not in str(server.get("/v1/models").json["data"]), "the load has ended")
    shutil.copyfile(good, path)
    found["restored files that did not load"] += server.post("/v1/models/load", {"model": "changing"}).status != 200


def mapped_files(server: Server, path: Path) -> int:
    """Processes of the server that still map the model's file."""
    found = 0
    for process in family(server):
        with contextlib.suppress(OSError):
            found += str(path) in Path(f"/proc/{process.pid}/maps").read_text()
    return found


# The row


def names_and_files(gauntlet: Gauntlet) -> Sequence[Figure]:
    outside = gauntlet.folder / "outside"
    write_tiny_model(outside)
    (outside / "canary.txt").write_text(CANARY)
    with audited(gauntlet.folder, outside) as (env, report), serving(str(gauntlet.tiny), *FAKE, env=env) as server:
        ask_for_names(server, outside, 97)
        base = idle_base(server)
        num_requests, wrong = ask_for_names(server, outside, gauntlet.size(1, 17))
        left = left_over(server, base, spare_files=8)
        opened = [line for line in report.read_text().splitlines() if line.startswith("open ")]
    num_opened = num_opened_links(gauntlet.folder, outside)
    num_archives, num_written = escaping_archives(gauntlet.folder)
    for found in (wrong, opened):
        gauntlet.say("\n".join(found[:10]))
    return [
        Figure("requests with hostile names", num_requests, at_least=gauntlet.size(800, 40)),
        exactly("requests with hostile names that were not refused", len(wrong)),
        exactly("files outside the server's folders that were opened", len(opened)),
        exactly(f"model folders, of {len(LINKED)}, with a link that leads outside and were opened", num_opened),
        Figure("archives with hostile members", num_archives, at_least=10),
        exactly("files that archives wrote outside or as links", num_written),
        *left,
        *changed_models(gauntlet),
    ]


def changed_models(gauntlet: Gauntlet) -> list[Figure]:
    """Change the file of a model while it is served. A full run uses the real model."""
    if gauntlet.is_quick:
        good = gauntlet.tiny / "model.safetensors"
        folder = gauntlet.folder / "changing"
        shutil.copytree(gauntlet.tiny, folder)
        path, model = folder / "model.safetensors", folder
    else:
        good = resolve(gauntlet.model)
        path = model = gauntlet.folder / "changing.gguf"
        shutil.copyfile(good, path)
    where, count, found = "changed model file: ", gauntlet.size(20, 1), Counter[str]()
    with serving(str(model), "--served-model-name", "changing", "--kv-memory", "64M") as server:
        _answer(server)
        found["processes that map it after the load"] += mapped_files(server, path)
        base = idle_base(server)
        change_served(server, good, path, found)
        change_while_loading(server, good, path, count, found)
        found["deaths of the server"] += server.process.poll() is not None
        left = left_over(server, base, prefix=where, spare_files=4)
    changes = Figure(f"{where}changes, {count} of them during a load", len(CHANGES) + count)
    return [changes, *counted(where, found), *left]


ROWS: tuple[Row, ...] = (
    Row(
        "R28",
        "No name leads outside its folder, and changed model files do not stop the server",
        names_and_files,
        400,
    ),
)
