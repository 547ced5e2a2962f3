"""Files and batches, by the official `openai` client and by hand: states, isolation, hostile uploads, restarts."""

from __future__ import annotations

import asyncio
import errno
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai import OpenAI

import quire.server.batches.service as service_module
from quire.batch.runner import Reply
from quire.server.batches.endpoints import get_batch
from quire.server.batches.service import BatchService, CreateBatchRequest, StateDir, StoredBatch, new_file, storing
from quire.server.errors import ApiError, Kind
from quire.server.limits import LOCAL, Key, KeyRing
from tests.server.rig import FAKE, Answer, Server, serving
from tests.waiting import HANG_S, eventually, paused

ALICE, BOB, ADMIN = "sk-alice-00000001", "sk-bob-000000002", "sk-admin-0000003"
KEYS = ("--api-key", ALICE, "--api-key", BOB, "--admin-api-key", ADMIN)
CHAT = "/v1/chat/completions"
BOUNDARY = "quire-test-boundary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def line(custom_id: str, text: str = "Hi", url: str = CHAT, **fields: Any) -> str:
    prompt = {"input": text} if url == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}
    body = {**prompt, "max_tokens": 3, "ignore_eos": True, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def client_of(server: Server, key: str = ALICE) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=HANG_S)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    options = (*FAKE, *KEYS, "--max-file-size", "64K", "--max-file-storage", "160K")
    with serving(str(tiny_model), *options, key=ALICE) as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    """Every test begins without files."""
    with client_of(server) as found:
        for file in found.files.list():
            found.files.delete(file.id)
        yield found


def upload(client: OpenAI, *lines: str, name: str = "requests.jsonl") -> str:
    return str(client.files.create(file=(name, "\n".join(lines).encode()), purpose="batch").id)


def submit(client: OpenAI, *lines: str, **fields: Any) -> Any:
    settings: Any = {"endpoint": CHAT, "completion_window": "24h", **fields}
    return client.batches.create(input_file_id=upload(client, *lines), **settings)


def finished(client: OpenAI, batch_id: str) -> Any:
    def ended() -> Any:
        found = client.batches.retrieve(batch_id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    return eventually(ended, "the batch has ended")


def results(client: OpenAI, file_id: str | None) -> dict[str | None, Any]:
    assert file_id is not None
    found = [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
    assert len({one["id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


# The life of a batch


def test_a_batch_from_upload_to_results(client: OpenAI) -> None:
    batch = submit(client, *(line(f"q-{number}", f"Question {number}") for number in range(12)), metadata={"a": "b"})
    assert batch.status == "validating"
    assert batch.object == "batch"
    assert batch.expires_at == batch.created_at + 86_400
    batch = finished(client, batch.id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (12, 12, 0)
    assert batch.metadata == {"a": "b"}
    assert batch.error_file_id is None
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    found = results(client, batch.output_file_id)
    assert set(found) == {f"q-{number}" for number in range(12)}
    for one in found.values():
        assert one["error"] is None
        assert one["response"]["status_code"] == 200
        assert one["response"]["body"]["usage"]["completion_tokens"] == 3
        assert one["response"]["body"]["service_tier"] == "flex"  # the tier low
        assert one["response"]["request_id"].startswith("batch_req_")
    facts = client.files.retrieve(batch.output_file_id)
    assert facts.purpose == "batch_output"
    assert facts.bytes == len(client.files.content(batch.output_file_id).content)
    assert batch.id in [one.id for one in client.batches.list()]


def test_a_body_means_what_it_means_over_http(client: OpenAI, server: Server) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "The same?"}], "temperature": 0, "max_tokens": 8}
    direct = server.post(CHAT, body).json
    batch = finished(client, submit(client, line("a", "The same?", temperature=0, max_tokens=8, ignore_eos=False)).id)
    answer = results(client, batch.output_file_id)["a"]["response"]["body"]
    assert answer["choices"] == direct["choices"]
    assert answer["model"] == direct["model"]


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/responses"])
def test_other_endpoints(client: OpenAI, url: str) -> None:
    fields: dict[str, Any] = {"prompt": "Hi", "messages": None} if url == "/v1/completions" else {}
    batch = finished(client, submit(client, line("a", url=url, **fields), endpoint=url).id)
    assert batch.status == "completed", batch
    assert batch.output_file_id is not None, client.files.content(batch.error_file_id).text
    assert results(client, batch.output_file_id)["a"]["response"]["status_code"] == 200


def test_errors_are_per_line_and_the_others_run(client: OpenAI) -> None:
    wrong = [
        "{",
        "[]",
        line("good-1"),  # the first of two
        line("bad-url", url="/v1/completions"),
        line("bad-model", model="gpt-5"),
        line("bad-field", temperature="hot"),
        line("stream", stream=True),
        json.dumps({"method": "POST", "url": CHAT, "body": {}}),
        line("good-2"),
    ]
    batch = finished(client, submit(client, *wrong).id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (9, 2, 7)
    assert set(results(client, batch.output_file_id)) == {"good-1", "good-2"}
    errors = [json.loads(one) for one in client.files.content(batch.error_file_id).text.splitlines()]
    assert len(errors) == 7
    by_id = {one["custom_id"]: one for one in errors}
    assert by_id["bad-model"]["response"]["status_code"] == 404
    assert by_id["bad-field"]["response"]["body"]["error"]["param"] == "temperature"
    assert by_id["bad-url"]["error"]["code"] == "mismatched_endpoint"
    assert by_id["stream"]["error"]["line"] == 7
    assert {(one.line, one.code) for one in batch.errors.data} >= {(1, "invalid_json_line"), (4, "mismatched_endpoint")}


@pytest.mark.parametrize(("lines", "code"), [([""], "empty_file"), (["hello", "{"], "invalid_json_line")])
def test_a_file_without_a_single_request_fails(client: OpenAI, lines: list[str], code: str) -> None:
    batch = finished(client, submit(client, *lines).id)
    assert batch.status == "failed"
    assert batch.errors.data[0].code == code
    assert batch.failed_at is not None
    assert batch.output_file_id is None


def test_a_batch_can_be_cancelled_while_it_runs_and_while_it_waits(server: Server, client: OpenAI) -> None:
    with paused(server.worker_pid):  # nothing ends by itself
        first = submit(client, *(line(f"a-{number}") for number in range(50)))
        second = submit(client, line("b"))  # waits: one batch of a key runs at a time
        eventually(lambda: client.batches.retrieve(first.id).status == "in_progress", "it runs")
        client.batches.cancel(second.id)
        assert finished(client, second.id).status == "cancelled"
        assert client.batches.cancel(first.id).status in ("cancelling", "cancelled")
        batch = finished(client, first.id)
        assert batch.status == "cancelled"
        assert batch.cancelled_at >= batch.cancelling_at
        assert client.batches.cancel(first.id).status == "cancelled"  # once more changes nothing
    server.wait_free()


def test_a_batch_may_be_cancelled_at_any_moment(server: Server, client: OpenAI) -> None:
    """A state that is being written when the batch is cancelled is followed by the next one, not mixed with it."""
    with paused(server.worker_pid):
        for _ in range(20):
            batch = submit(client, line("a"))
            client.batches.cancel(batch.id)
            assert finished(client, batch.id).status == "cancelled"
            stored = json.loads((Path(server.state_dir) / "batches" / f"{batch.id}.json").read_text())
            assert stored["batch"]["status"] in ("cancelling", "cancelled")


# What clients may send


def test_files_are_listed_by_pages_and_deleted(client: OpenAI) -> None:
    ids = [upload(client, line("a"), name=f"{number}.jsonl") for number in range(5)]
    listed = [one.id for one in client.files.list(limit=2)]  # follows the pages
    assert sorted(listed) == sorted(ids)
    assert [one.id for one in client.files.list(order="asc")] == listed[::-1]
    assert client.files.list(purpose="batch_output").data == []
    facts = client.files.retrieve(ids[0])
    assert (facts.filename, facts.purpose, facts.bytes) == ("0.jsonl", "batch", len(line("a")))
    assert client.files.delete(ids[0]).deleted
    for act in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            act(ids[0])
    with pytest.raises(openai.BadRequestError, match="after"):
        client.files.list(after="file-none")


def test_a_file_may_expire_earlier(client: OpenAI) -> None:
    content = ("a.jsonl", line("a").encode())
    after: Any = {"anchor": "created_at", "seconds": 3600}
    facts = client.files.create(file=content, purpose="batch", expires_after=after)
    assert facts.expires_at == facts.created_at + 3600


@pytest.mark.parametrize(
    "seconds",
    [
        "360000000000000000", "0000000003600x", "000000360000" + "0" * 100, "3600\x00", " 3600", "3_600", "+3600",
        "\u0663\u0666\u0660\u0660", "3600.0", "1e5", "", "-3600", "9" * 4000, "0", "1000000000", "x",
    ],
)  # fmt: skip
def test_an_expiry_is_read_as_a_whole(server: Server, client: OpenAI, seconds: str) -> None:
    """Twelve digits of a longer number are another number."""
    form = part("purpose", b"batch") + part("expires_after[seconds]", seconds.encode())
    form += part("file", line("a").encode(), '; filename="a.jsonl"') + f"--{BOUNDARY}--\r\n".encode()
    answer = server.post("/v1/files", data=form, headers={**FORM, "authorization": f"Bearer {ALICE}"})
    assert (answer.status, answer.json["error"]["param"]) == (400, "expires_after")
    message = answer.json["error"]["message"]
    assert message.startswith(f"expires_after.seconds = {seconds[:80]!r}")
    assert message.endswith("is not a whole number from 3600 to 2592000")
    assert len(seconds) <= 80 or f"({len(seconds)} characters)" in message
    assert client.files.list().data == []


def test_the_anchor_of_an_expiry_is_named(server: Server) -> None:
    form = part("purpose", b"batch") + part("expires_after[seconds]", b"3600") + part("expires_after[anchor]", b"last")
    form += part("file", line("a").encode(), '; filename="a.jsonl"') + f"--{BOUNDARY}--\r\n".encode()
    answer = server.post("/v1/files", data=form, headers={**FORM, "authorization": f"Bearer {ALICE}"})
    assert (answer.status, answer.json["error"]["message"]) == (400, "expires_after.anchor = 'last' is not created_at")


def test_an_input_in_use_is_not_deleted(server: Server, client: OpenAI) -> None:
    with paused(server.worker_pid):
        batch = submit(client, line("a"))
        with pytest.raises(openai.BadRequestError, match=batch.id):
            client.files.delete(batch.input_file_id)
        client.batches.cancel(batch.id)
        finished(client, batch.id)
    assert client.files.delete(batch.input_file_id).deleted


BAD_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"endpoint": "/v1/embeddings"}, "endpoint"),
    ({"completion_window": "1h"}, "completion_window"),
    ({"input_file_id": "file-none"}, "there is no file"),
    ({"input_file_id": "../../../etc/passwd"}, "there is no file"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"metadata": {str(number): "b" for number in range(17)}}, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
]


@pytest.mark.parametrize(("fields", "text"), BAD_BATCHES)
def test_a_batch_that_cannot_work_is_refused(client: OpenAI, fields: dict[str, Any], text: str) -> None:
    given = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": upload(client, line("a")), **fields}
    with pytest.raises(openai.APIStatusError, match=text) as error:
        client.batches.create(**given)
    assert error.value.status_code in (400, 404)


def part(name: str, data: bytes, more: str = "") -> bytes:
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode("latin-1") + data + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
PURPOSE = part("purpose", b"batch")
FILE = part("file", b"{}", '; filename="a.jsonl"')
BAD_FORMS: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 400),
    "no parts": (END, 400),
    "no file": (PURPOSE + END, 400),
    "a file without a name": (PURPOSE + part("file", b"{}") + END, 400),
    "no purpose": (FILE + END, 400),
    "another purpose": (part("purpose", b"fine-tune") + FILE + END, 400),
    "purpose of bytes": (part("purpose", b"\xff\x00") + FILE + END, 400),
    "no end": (PURPOSE + FILE, 400),
    "two files": (PURPOSE + FILE + FILE + END, 400),
    "many parts": (PURPOSE + FILE + part("x", b"y") * 30 + END, 400),
    "a huge field": (part("purpose", b"x" * 10_000) + FILE + END, 400),
    "huge headers": (part("purpose", b"batch", "; x=" + "y" * 50_000) + FILE + END, 400),
    "another boundary": (FILE.replace(BOUNDARY.encode(), b"other") + END, 400),
    "not a form": (b"\x00\x01\x02" * 100, 400),
    "a huge file": (PURPOSE + part("file", b"x" * 100_000, '; filename="a"') + END, 413),
}


@pytest.mark.parametrize("name", BAD_FORMS)
def test_hostile_uploads_are_refused_and_leave_nothing(server: Server, client: OpenAI, name: str) -> None:
    data, status = BAD_FORMS[name]
    answer = server.ask("POST", "/v1/files", data=data, headers=FORM)
    assert answer.status == status, answer
    assert answer.json["error"]["message"]
    assert client.files.list().data == []
    assert stored(server) == []


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "multipart/form-data; boundary=", ""])
def test_a_body_that_is_no_form_is_refused(server: Server, kind: str) -> None:
    answer = server.ask("POST", "/v1/files", data=PURPOSE + FILE + END, headers={"content-type": kind})
    assert answer.status == 400
    assert "multipart/form-data" in answer.json["error"]["message"]


NAMES = ["../../evil.jsonl", "/etc/passwd", "..\\..\\evil", "a\x00b", "", ".", "..", "x" * 5000, "\u00e9\u4e16.jsonl"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_name_is_never_a_path(server: Server, client: OpenAI, name: str) -> None:
    data = PURPOSE + part("file", b'"x"', f'; filename="{name}"'.encode().decode("latin-1")) + END
    answer: Answer = server.ask("POST", "/v1/files", data=data, headers=FORM)
    if answer.status == 400:  # the headers of a part are bounded
        assert len(name) > 1000
        return
    found = answer.json
    assert not set("/\\\x00") & set(found["filename"])
    assert len(found["filename"]) <= 255
    assert len(stored(server)) == 2  # the content and its facts, named by an id
    assert all(path.name.startswith("file-") for path in stored(server))
    assert client.files.content(found["id"]).content == b'"x"'
    # The folders above hold files of other tests too, so only the name itself is looked for.
    assert not [path for path in Path(server.state_dir).parent.iterdir() if "evil" in path.name]


def stored(server: Server) -> list[Path]:
    folder = Path(server.state_dir) / "files"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def test_ids_are_never_paths(server: Server, client: OpenAI) -> None:
    upload(client, line("a"))
    for trick in ("..%2f..%2flock", "%2e%2e", "file-1%00", "../lock", "*", "file-" + "a" * 5000):
        for path in (f"/v1/files/{trick}", f"/v1/files/{trick}/content", f"/v1/batches/{trick}"):
            assert server.get(path).status in (400, 404), path


def test_the_files_of_a_key_are_bounded(server: Server, client: OpenAI) -> None:
    whole = b"x" * (60 << 10)
    for _ in range(2):
        client.files.create(file=("a", whole), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="163840 bytes, its limit") as error:
        client.files.create(file=("a", whole), purpose="batch")
    assert error.value.status_code == 413
    with client_of(server, BOB) as other:  # each key has its own
        file = other.files.create(file=("a", whole), purpose="batch")
        other.files.delete(file.id)


# Who sees what


def test_a_key_sees_its_own_and_an_admin_sees_all(server: Server, client: OpenAI) -> None:
    batch = finished(client, submit(client, line("a")).id)
    with client_of(server, BOB) as bob, client_of(server, ADMIN) as admin:
        assert bob.files.list().data == []
        assert bob.batches.list().data == []
        asked: list[Any] = [
            lambda: bob.files.retrieve(batch.input_file_id),
            lambda: bob.files.content(batch.output_file_id),
            lambda: bob.files.delete(batch.output_file_id),
            lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
            lambda: bob.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            ),
        ]
        for ask in asked:
            with pytest.raises(openai.NotFoundError):
                ask()
        assert {batch.input_file_id, batch.output_file_id} <= {one.id for one in admin.files.list()}
        assert batch.id in [one.id for one in admin.batches.list()]
        assert "a" in results(admin, batch.output_file_id)


def test_what_is_stored_is_for_its_owner_only(server: Server, client: OpenAI) -> None:
    finished(client, submit(client, line("a")).id)
    root = Path(server.state_dir)
    for path in [root, *root.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert ALICE not in "".join(path.read_text() for path in root.rglob("*.json"))


# Servers that end


def test_a_batch_goes_on_after_the_server_was_killed(tiny_model: Path, tmp_path: Path) -> None:
    env = {"QUIRE_STATE_DIR": str(tmp_path / "state")}
    lines = [line(f"q-{number}", max_tokens=100) for number in range(200)]
    with serving(str(tiny_model), *FAKE, *KEYS, env=env) as server, client_of(server) as client:
        batch = submit(client, *lines)
        waiting = submit(client, line("next"))
        eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5, "some lines are done")
        server.process.kill()
        server.process.wait(HANG_S)
    part = tmp_path / "state" / "batches" / f"{batch.id}.out.jsonl"
    if part.exists():
        with part.open("ab") as file:
            file.write(b'{"id": "batch_req_torn')
    (tmp_path / "state" / "files" / "half.upload").write_bytes(b"half")
    with serving(str(tiny_model), *FAKE, *KEYS[2:4], *KEYS[:2], *KEYS[4:], env=env) as server:  # in another order
        with client_of(server) as client:
            found = finished(client, batch.id)
            assert found.status == "completed"
            assert found.request_counts.completed == 200
            assert set(results(client, found.output_file_id)) == {f"q-{number}" for number in range(200)}
            assert finished(client, waiting.id).status == "completed"
        with client_of(server, BOB) as bob:
            assert bob.batches.list().data == []
        assert not (tmp_path / "state" / "files" / "half.upload").exists()
        assert server.stop() == 0


def test_a_server_that_ends_leaves_its_batch_to_the_next(tiny_model: Path, tmp_path: Path) -> None:
    env = {"QUIRE_STATE_DIR": str(tmp_path / "state")}
    with serving(str(tiny_model), *FAKE, env=env) as server, client_of(server) as client:
        with paused(server.worker_pid):
            batch = submit(client, *(line(f"q-{number}") for number in range(20)))
            eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress", "it runs")
            server.process.terminate()
            eventually(lambda: not (tmp_path / "state" / "lock").exists() or lock_is_free(tmp_path), "it let go")
        assert server.process.wait(HANG_S) == 0
    with serving(str(tiny_model), *FAKE, env=env) as server, client_of(server) as client:
        assert finished(client, batch.id).request_counts.completed == 20


def lock_is_free(tmp_path: Path) -> bool:
    import fcntl

    with (tmp_path / "state" / "lock").open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def test_a_batch_that_is_too_late_expires(tiny_model: Path, tmp_path: Path) -> None:
    env = {"QUIRE_STATE_DIR": str(tmp_path / "state")}
    with serving(str(tiny_model), *FAKE, env=env) as server, client_of(server) as client, paused(server.worker_pid):
        batch = submit(client, line("a"), line("b"))
        eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress", "it runs")
        server.process.kill()
        server.process.wait(HANG_S)
    facts = tmp_path / "state" / "batches" / f"{batch.id}.json"
    text = facts.read_text()
    assert f'"expires_at":{batch.expires_at}' in text
    facts.write_text(text.replace(f'"expires_at":{batch.expires_at}', '"expires_at":1000000000'))
    with serving(str(tiny_model), *FAKE, env=env) as server, client_of(server) as client:
        found = finished(client, batch.id)
        assert found.status == "expired"
        assert found.expired_at is not None
        assert found.request_counts.failed == 2
        errors = results(client, found.error_file_id)
        assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}
        assert set(errors) == {"a", "b"}


# Exceptions that nobody expects


class Failing:
    """Answers the first request of a batch, then fails, a number of times, in a way that no handler does."""

    max_num_seqs = 1

    def __init__(self, error: BaseException, num_failures: int = 1 << 30) -> None:
        self._error = error
        self._num_sent = 0
        self._num_failures = num_failures

    async def send(self, key: Key, url: str, body: bytes, request_id: str) -> Reply:
        del key, url, body
        self._num_sent += 1
        if 1 < self._num_sent <= self._num_failures + 1:
            raise self._error
        return Reply(status=200, request_id=request_id, body=b'{"answer":1}')


async def ended(service: BatchService, batch_id: str) -> StoredBatch:
    stored = service.store.find_batch(batch_id, LOCAL)
    async with asyncio.timeout(HANG_S):
        while not stored.is_finished:
            await asyncio.sleep(0.01)
    return stored


async def submit_to(service: BatchService, *lines: str) -> str:
    await service.open()
    upload = service.store.begin_upload(LOCAL, 0)
    upload.write("\n".join(lines).encode())
    upload.finish()
    facts = await service.store.add_file(LOCAL.owner, upload.path, new_file("a.jsonl", upload.num_bytes, "batch", 3600))
    upload.close()
    request = CreateBatchRequest(input_file_id=facts.id, endpoint=CHAT, completion_window="24h")
    return (await service.create(request, LOCAL)).id


def service_of(folder: Path, sender: Failing, keys: KeyRing | None = None) -> BatchService:
    return BatchService(StateDir(folder, 1 << 20, 1 << 20), sender, KeyRing() if keys is None else keys)


async def completed(folder: Path) -> StoredBatch:
    """A batch of one request that a server has answered before it ended."""
    service = service_of(folder, Failing(RuntimeError("a bug")))
    stored = await ended(service, await submit_to(service, line("a")))
    await service.stop()
    assert stored.batch.status == "completed"
    return stored


async def continued(folder: Path, batch_id: str, keys: KeyRing | None = None) -> StoredBatch:
    """The batch as another server ends it."""
    service = service_of(folder, Failing(RuntimeError("a bug")), keys)
    await service.open()
    stored = await ended(service, batch_id)
    await service.stop()
    return stored


def rewrite(file: Path, *changes: tuple[str, str]) -> None:
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


@pytest.mark.anyio
async def test_results_that_have_moved_are_kept(tmp_path: Path) -> None:
    """The server that moved them did not store the end: it was killed."""

    batch = (await completed(tmp_path)).batch
    output = tmp_path / "files" / f"{batch.output_file_id}.jsonl"
    before = output.read_text()
    assert json.loads(before)["custom_id"] == "a"
    facts = tmp_path / "batches" / f"{batch.id}.json"
    rewrite(facts, ('"status":"completed"', '"status":"in_progress"'))
    found = (await continued(tmp_path, batch.id)).batch
    assert (found.status, found.output_file_id, output.read_text()) == ("completed", batch.output_file_id, before)


@pytest.mark.anyio
async def test_results_that_cannot_be_moved_fail_the_batch(tmp_path: Path) -> None:
    """A folder is where they belong."""

    batch = (await completed(tmp_path)).batch
    rewrite(tmp_path / "batches" / f"{batch.id}.json", ('"status":"completed"', '"status":"finalizing"'))
    output = tmp_path / "files" / f"{batch.output_file_id}.jsonl"
    output.replace(tmp_path / "batches" / f"{batch.id}.out.jsonl")
    output.mkdir()
    for _ in range(2):  # also after a restart
        found = (await continued(tmp_path, batch.id)).batch
        assert (found.status, found.output_file_id) == ("failed", None)
        assert found.errors is not None
        assert [one.message for one in found.errors.data] == ["the server failed; its log has the reason"]


@pytest.mark.anyio
async def test_a_batch_whose_key_is_gone_fails(tmp_path: Path) -> None:
    batch = (await completed(tmp_path)).batch
    changes = ('"status":"completed"', '"status":"in_progress"'), ('"ending":"completed"', '"ending":null')
    output = f'"output_file_id":"{batch.output_file_id}"', '"output_file_id":null'
    rewrite(tmp_path / "batches" / f"{batch.id}.json", *changes, output)
    found = (await continued(tmp_path, batch.id, KeyRing([(ALICE, Key("alice"))]))).batch
    assert found.status == "failed"
    assert found.errors is not None
    assert "no longer in use" in found.errors.data[0].message


@pytest.mark.anyio
async def test_a_batch_waits_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on where it was, and the reason is logged once."""
    monkeypatch.setattr(service_module, "STORAGE_RETRY_S", 0.01)

    service = service_of(tmp_path, Failing(OSError(errno.ENOSPC, "No space left on device"), num_failures=3))
    stored = await ended(service, await submit_to(service, line("a"), line("b")))
    await service.stop()
    assert (stored.batch.status, stored.batch.request_counts.completed) == ("completed", 2)
    (said,) = [one.message for one in caplog.records if one.levelname == "ERROR"]
    assert said.endswith("cannot be stored: No space left on device; it goes on when that has ended")


@pytest.mark.anyio
async def test_a_batch_that_cannot_be_stored_is_refused_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = service_of(tmp_path, Failing(RuntimeError("a bug")))
    await service.open()
    save = service.store.save_batch

    async def refuse(_: StoredBatch) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(service.store, "save_batch", refuse)
    with pytest.raises(ApiError, match="the batch could not be stored: File too large"), storing("the batch"):
        await submit_to(service, line("a"))
    assert service.store.list_batches(LOCAL) == []
    monkeypatch.setattr(service.store, "save_batch", save)
    assert (await ended(service, await submit_to(service, line("a")))).batch.status == "completed"
    await service.stop()
    assert [one.message for one in caplog.records] == ["the batch could not be stored in --state-dir: File too large"]


def test_without_a_state_directory_nothing_is_stored() -> None:
    context: Any = SimpleNamespace(served=SimpleNamespace(batches=None))
    with pytest.raises(ApiError, match="it was started with --state-dir none") as refused:
        asyncio.run(get_batch(context))
    assert refused.value.kind == Kind.NOT_FOUND


@pytest.mark.anyio
@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), TimeoutError("of a lock"), OSError(errno.EBADF, "bad"), asyncio.CancelledError()]
)
async def test_a_batch_that_ends_by_an_unexpected_exception_fails(tmp_path: Path, error: BaseException) -> None:
    async def reopened(batch_id: str) -> StoredBatch:
        """The batch as the next server finds it."""
        service = service_of(tmp_path, Failing(error))
        await service.open()
        found = service.store.find_batch(batch_id, LOCAL)
        assert service.store.unfinished() == []
        await service.stop()
        return found

    service = service_of(tmp_path, Failing(error))
    batch_id = await submit_to(service, line("a"), line("b"), line("c"))
    stored = await ended(service, batch_id)
    await service.stop()
    for again in (stored, await reopened(batch_id)):
        batch = again.batch
        assert (batch.status, batch.request_counts.completed) == ("failed", 1)
        assert batch.failed_at is not None
        assert batch.errors is not None
        assert [one.code for one in batch.errors.data] == ["server_error"]
        content = (tmp_path / "files" / f"{batch.output_file_id}.jsonl").read_text().splitlines()
        assert [json.loads(one)["custom_id"] for one in content] == ["a"]


@pytest.mark.anyio
async def test_a_state_that_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a reason that is not one of a full disk: a folder has the name of the draft."""
    monkeypatch.setattr(service_module, "STORAGE_RETRY_S", 0.01)

    service = service_of(tmp_path, Failing(RuntimeError("a bug")))
    await service.open()
    add_batch = service.store.add_batch

    async def add(stored: StoredBatch) -> None:
        await add_batch(stored)
        (tmp_path / "batches" / f"{stored.batch.id}.draft").mkdir()

    monkeypatch.setattr(service.store, "add_batch", add)
    batch_id = await submit_to(service, line("a"), line("b"))
    draft = tmp_path / "batches" / f"{batch_id}.draft"
    while service.store.find_batch(batch_id, LOCAL).ending is None:
        await asyncio.sleep(0.01)
    draft.rmdir()
    assert (await ended(service, batch_id)).batch.status == "failed"
    await service.stop()
    assert '"status":"failed"' in draft.with_suffix(".json").read_text()


def test_two_servers_do_not_share_a_state_directory(tiny_model: Path, tmp_path: Path) -> None:
    env = {"QUIRE_STATE_DIR": str(tmp_path / "state")}
    with serving(str(tiny_model), *FAKE, env=env) as one, serving(str(tiny_model), *FAKE, env=env) as other:
        assert not (tmp_path / "state").exists()  # nothing is made before it is needed
        assert one.get("/v1/files").status == 200
        answer = other.get("/v1/files")
        assert answer.status == 503
        assert str(tmp_path) not in answer.body.decode()
        other.wait_for("another server uses it")
        assert other.chat().status == 200


@pytest.mark.anyio
async def test_an_upload_that_is_closed_while_a_thread_writes_reserves_nothing(tmp_path: Path) -> None:
    """A write after the end, as of a thread that outlives a cancelled request, is refused and not counted."""

    store = StateDir(tmp_path / "state", max_file_bytes=1 << 20, max_key_bytes=100)
    await store.open()
    upload = store.begin_upload(Key("alice"), 0)
    upload.write(b"x" * 60)
    upload.close()
    with pytest.raises(ValueError, match="the upload was closed"):
        upload.write(b"x" * 60)
    other = store.begin_upload(Key("alice"), 0)
    other.write(b"x" * 100)  # the whole quota is free again
    other.close()
    await store.close()


def test_uploads_of_one_key_that_do_not_end_leave_room_for_other_keys(server: Server, client: OpenAI) -> None:
    head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {BOB}\r\ncontent-length: 1000\r\n"
    head += f"content-type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n"
    slow = [server.raw() for _ in range(20)]
    for sock in slow:
        sock.sendall(head.encode())
    refused = [sock.recv(100) for sock in slow[8:]]  # eight of the key may run at once
    assert all(data.startswith(b"HTTP/1.1 429 ") for data in refused), refused
    assert upload(client, line("a"))
    for sock in slow:
        sock.close()
