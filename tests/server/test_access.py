"""Access control of every route: keys, hosts, origins, tenants, tiers and limits. Routes deny by default."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from quire.server.app import ENDPOINTS
from quire.server.routes import Access, Endpoint
from tests.cli.runs import quire
from tests.server.corpus import CHAT, EXPLAIN, GOOD, MESSAGES
from tests.server.rig import FAKE, Answer, Server, put_away, serving, spawn
from tests.waiting import HANG_S, eventually

ALICE, BOB, ADMIN = "sk-alice-00000001", "sk-bob-000000002", "sk-admin-0000003"
CAROL, DAVE, ERIN = "sk-carol-00000004", "sk-dave-00000005", "sk-erin-0000006"  # have nothing cached at first
LONG = "The quick brown fox jumps over the lazy dog, again and again. " * 8  # some 200 tokens, several blocks
TRICKS = (
    *(
        "//v1/models",
        "/v1/../health",
        "/health/../v1/models",
        "/v1/%2e%2e/health",
        "/health/",
        "/health%00",
        "//health",
    ),
    *("/Health", "/health;/../v1/models", "/nothing", "/v1", "/metrics/", "/%2fhealth", "/health%2f..%2fmetrics"),
)


OPEN = {"/health", "/", "/page/app.js", "/docs"}  # the pages are static files, which ask for a key themselves


def path_of(endpoint: Endpoint) -> str:
    names = {"{model:path}": "tiny", "{name}": "app.js", "{request_id}": "req_1"}
    names |= {"{file_id}": "file-1", "{batch_id}": "batch_1"}
    return re.sub(r"\{[^}]+\}", lambda found: names[found[0]], endpoint.path)


@pytest.fixture(scope="module")
def locked(tiny_model: Path) -> Iterator[Server]:
    """With keys."""
    users = [option for key in (ALICE, BOB, CAROL, DAVE, ERIN) for option in ("--api-key", key)]
    with serving(str(tiny_model), *FAKE, *users, "--admin-api-key", ADMIN, key=ALICE) as server:
        yield server


def refused(answer: Answer, status: int) -> bool:
    if answer.status != status:
        return False
    if answer.body == b"":
        return True
    error = answer.json["error"]
    return bool(error) if isinstance(error, str) else "message" in error  # Ollama's is a string


NO_KEYS: dict[str, dict[str, str]] = {
    "none": {"authorization": ""},
    "unknown": {"authorization": "Bearer sk-mallory-000009"},
    "empty": {"authorization": "Bearer "},
    "basic": {"authorization": f"Basic {ALICE}"},
    "bare": {"authorization": ALICE},
    "in capitals": {"authorization": f"Bearer {ALICE.upper()}"},
    "cut short": {"authorization": f"Bearer {ALICE[:-1]}"},
    "too long": {"authorization": f"Bearer {ALICE}x"},
    "two in one": {"authorization": f"Bearer {ALICE},{BOB}"},
    "not ASCII": {"authorization": "Bearer \xff\xfe" + ALICE},
    "huge": {"authorization": "Bearer " + "k" * 30_000},
    "x-api-key unknown": {"x-api-key": "sk-mallory-000009"},
    "x-api-key empty": {"x-api-key": ""},
    "two wrong ones": {"authorization": "Bearer sk-mallory-000009", "x-api-key": "sk-mallory-000010"},
    "cookie": {"authorization": "", "cookie": f"key={ALICE}; authorization=Bearer {ALICE}"},
    "another header": {"authorization": "", "x-forwarded-authorization": f"Bearer {ALICE}", "api-key": ALICE},
    "host of the machine": {"authorization": "", "host": "localhost"},
    "host tricks": {"authorization": "", "host": "localhost/health?"},
    "forwarded for": {"authorization": "", "x-forwarded-for": "127.0.0.1", "x-real-ip": "127.0.0.1"},
    "rewritten": {"authorization": "", "x-original-url": "/health", "x-rewrite-url": "/health"},
    "override": {"authorization": "", "x-http-method-override": "GET"},
}


@pytest.mark.parametrize("name", NO_KEYS)
def test_every_route_but_health_and_pages_needs_a_key(locked: Server, name: str) -> None:
    for endpoint in ENDPOINTS:
        body = GOOD.get(endpoint.path)
        answer = locked.ask(endpoint.method, path_of(endpoint), body, headers=NO_KEYS[name])
        if endpoint.access is Access.PUBLIC:
            assert path_of(endpoint) in OPEN
            assert answer.status == 200
            assert b"tiny" not in answer.body  # the name of the model
        else:
            assert refused(answer, 401), (endpoint.path, answer)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert ALICE not in answer.body.decode()


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "POST"])
def test_no_method_bypasses_the_key(locked: Server, method: str) -> None:
    for path in {path_of(endpoint) for endpoint in ENDPOINTS}:
        answer = locked.ask(method, path, headers=NO_KEYS["none"])
        if path in OPEN and method in ("GET", "HEAD"):
            assert answer.status == 200
        else:
            assert refused(answer, 401), (method, path, answer)


@pytest.mark.parametrize("path", TRICKS)
def test_no_path_bypasses_the_key(locked: Server, path: str) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS"):
        assert refused(locked.ask(method, path, headers=NO_KEYS["none"]), 401), (method, path)
    assert locked.get(path).status in (404, 405)


def test_a_body_without_a_key_is_not_read(locked: Server) -> None:
    with locked.raw() as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 16000000\r\n\r\n{")
        assert sock.recv(100).startswith(b"HTTP/1.1 401 ")


def test_both_headers_carry_a_key(locked: Server) -> None:
    for headers in ({"authorization": f"Bearer {BOB}"}, {"authorization": f"bearer  {BOB} "}, {"x-api-key": BOB}):
        assert locked.get("/v1/models", headers=headers).status == 200
    left_over = {"authorization": "Bearer sk-of-another-server", "x-api-key": BOB}  # one valid key of two is enough
    assert locked.get("/v1/models", headers=left_over).status == 200


def test_only_an_admin_key_may_change_the_cache_or_load_models(locked: Server) -> None:
    admin = sorted((one for one in ENDPOINTS if one.access is Access.ADMIN), key=lambda one: "models" in one.path)
    assert {endpoint.path for endpoint in admin} == {
        "/v1/cache/clear",
        *("/v1/models/load", "/v1/models/unload", "/v1/models/pin", "/v1/models/unpin", "/api/pull"),
    }
    for endpoint in admin:
        has_model = "/models/" in endpoint.path or endpoint.path == "/api/pull"
        body = GOOD.get(endpoint.path) or ({"model": "tiny"} if has_model else None)
        for key, status in ((ALICE, 403), (BOB, 403), ("sk-nobody-0000000", 401), (ADMIN, 200)):
            answer = locked.ask(endpoint.method, endpoint.path, body, headers={"authorization": f"Bearer {key}"})
            assert answer.status == status, (endpoint.path, answer)
    assert locked.post(CHAT, GOOD[CHAT], headers={"authorization": f"Bearer {ADMIN}"}).status == 200


def test_an_explanation_quotes_the_prompt_of_its_caller_only(locked: Server) -> None:
    """Alice's secret is cached; her next prompt diverges from it. What is quoted is what she has just sent."""
    mine = {"authorization": f"Bearer {ALICE}"}
    body = {"messages": [{"role": "user", "content": "The password is SESAME, " * 8}], "max_tokens": 1}
    assert locked.post(CHAT, body, headers=mine).status == 200
    asked = {"messages": [{"role": "user", "content": "The password is a secret"}]}
    found = locked.post("/v1/cache/explain", asked, headers=mine).json
    assert found["reason"] == "diverged"
    assert found["stopped_text"]["before"].endswith("The password is ")
    assert found["stopped_text"]["after"].startswith("a secret")
    assert 'The password is " and "a secret' in found["message"]
    assert "SESAME" not in str(found)
    answer = locked.post(CHAT, {**asked, "max_tokens": 1, "cache": True}, headers=mine).json
    assert answer["cache"]["stopped_text"] == found["stopped_text"]
    other = locked.post("/v1/cache/explain", asked, headers={"authorization": f"Bearer {BOB}"}).json
    assert (other["reason"], other["stopped_at"]) != ("diverged", found["stopped_at"])


# Browsers

FOREIGN_HOSTS = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "169.254.169.254"),
    *("0.0.0.0", "[::]:80", "user@evil.example", "localhost@evil.example", "[evil", "10.0.0.1", "2130706433"),
)


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_a_foreign_host_is_refused_without_keys(plain_server: Server, host: str) -> None:
    """DNS rebinding: a foreign host name that resolves to this machine lets a web page reach a local server."""
    for endpoint in ENDPOINTS:
        answer = plain_server.ask(endpoint.method, path_of(endpoint), GOOD.get(endpoint.path), headers={"host": host})
        assert refused(answer, 403), (endpoint.path, answer)


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "127.0.0.1", "127.0.0.9:80", "[::1]:8000", "a.localhost"])
def test_loopback_names_are_accepted(plain_server: Server, host: str) -> None:
    assert plain_server.get("/v1/models", headers={"host": host}).status == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "file://", "http://[", ""])
def test_a_foreign_page_is_refused(plain_server: Server, locked: Server, origin: str) -> None:
    for server in (plain_server, locked):
        for endpoint in ENDPOINTS:
            body = GOOD.get(endpoint.path)
            answer = server.ask(endpoint.method, path_of(endpoint), body, headers={"origin": origin})
            assert refused(answer, 403), (endpoint.path, answer)
            assert not any(name.startswith("access-control") for name in answer.headers)


def test_the_servers_own_page_is_accepted(plain_server: Server) -> None:
    host = "{}:{}".format(*plain_server.address)
    assert plain_server.get("/docs", headers={"origin": f"http://{host}", "host": host}).status == 200


def test_no_answer_has_cors_headers_unless_asked_for(plain_server: Server, tiny_model: Path) -> None:
    ask = {"origin": "https://page.example", "access-control-request-method": "POST"}
    for method in ("OPTIONS", "POST"):
        answer = plain_server.ask(method, CHAT, headers=ask)
        assert answer.status == 403
        assert not any(name.startswith("access-control") for name in answer.headers)
    with serving(str(tiny_model), *FAKE, "--allowed-origins", "https://page.example", "--api-key", ALICE) as server:
        preflight = server.ask("OPTIONS", CHAT, headers=ask)
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        server.key = ALICE
        answer = server.post(CHAT, GOOD[CHAT], headers={"origin": "https://page.example"})
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "access-control-allow-credentials" not in answer.headers
        other = server.post(CHAT, GOOD[CHAT], headers={"origin": "https://evil.example"})
        assert other.status == 403
        assert "access-control-allow-origin" not in other.headers
        assert server.ask("OPTIONS", CHAT, headers=ask | {"origin": "https://evil.example"}).status in (400, 403)


# Settings that are refused at the start


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("--host", "0.0.0.0"), "API key"),
    (("--host", "::"), "API key"),
    (("--host", "192.0.2.1"), "API key"),
    (("--host", "0.0.0.0", "--api-key", "short"), "8"),
    (("--api-key", ALICE, "--api-key", ALICE), "same key"),
    (("--port", "70000"), "--port"),
    (("--max-queue", "0"), "--max-queue"),
    (("--drain", "-1"), "--drain"),
    (("--api-keys-file", "no/such/file.yaml"), "no/such/file.yaml"),
    (("--ssl-certfile", "no/such.pem"), "ssl"),
    (("--config", "no/such.yaml"), "no/such.yaml"),
]


def test_it_refuses_to_start(tiny_model: Path, tmp_path: Path) -> None:
    for options, says in REFUSED:
        outcome = quire("serve", str(tiny_model), *FAKE, "--port", "0", *options, folder=tmp_path)
        assert outcome.returncode not in (0, -15), options
        assert says in outcome.stderr
        assert "Traceback" not in outcome.stderr
        assert ALICE not in outcome.stderr


def test_all_addresses_with_a_key_are_fine(tiny_model: Path) -> None:
    with serving(str(tiny_model), *FAKE, "--host", "0.0.0.0", "--api-key", ALICE) as server:
        assert server.get("/health").status == 200
        assert server.get("/v1/models").status == 401
        assert server.get("/v1/models", headers={"x-api-key": ALICE, "host": "box.example"}).status == 200


def test_all_addresses_without_a_key_answer_to_addresses_and_private_names(tiny_model: Path) -> None:
    options = ("--host", "0.0.0.0", "--insecure", "--allowed-hosts", "Box.example")
    name = socket.gethostname()
    with serving(str(tiny_model), *FAKE, *options) as server:
        good = (
            "127.0.0.1",
            "192.168.1.7:8000",
            "[fe80::1]:8000",
            name,
            f"{name}:80",
            "box",
            "box.local",
            "BOX.example:1",
        )
        for host in good:
            for path in ("/docs", "/openapi.json", "/", "/v1/models"):
                assert server.get(path, headers={"host": host}).status == 200, (host, path)
        for host in ("evil.example", "192.168.1.7.evil.example", "box.local.evil.example", "localhost.evil.example"):
            answer = server.get("/v1/models", headers={"host": host})
            assert refused(answer, 403), host
            hint = f"start the server with --allowed-hosts {host}, or with --api-key"
            assert hint in answer.json["error"]["message"]
        assert server.get("/v1/models", headers={"host": "box", "origin": "http://evil.example"}).status == 403


# Tenants


def cached(server: Server, key: str, text: str = LONG, **more: Any) -> int:
    body = {**GOOD[CHAT], "messages": [{"role": "user", "content": text}], **more}
    answer = server.post(CHAT, body, headers={"authorization": f"Bearer {key}"})
    assert answer.status == 200, answer
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def explained(server: Server, key: str, text: str = LONG, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], **more}
    return server.post(EXPLAIN, body, headers={"authorization": f"Bearer {key}"}).json


def test_tenants_share_no_cached_prefix(locked: Server) -> None:
    assert cached(locked, CAROL) == 0
    assert cached(locked, CAROL) >= 128
    nothing = explained(locked, DAVE)
    assert nothing["matched_tokens"] == 0
    fresh = explained(locked, DAVE, "x" + LONG)
    assert (nothing["reason"], nothing["stopped_at"]) == (fresh["reason"], fresh["stopped_at"])
    assert cached(locked, DAVE) == 0
    assert cached(locked, DAVE) >= 128
    messages = {**GOOD[MESSAGES], "messages": [{"role": "user", "content": LONG}]}
    usage = locked.post(MESSAGES, messages, headers={"x-api-key": DAVE}).json["usage"]
    assert usage["cache_read_input_tokens"] >= 128  # the same tenant, another protocol


def test_salts_separate_the_cache_of_one_key(locked: Server) -> None:
    text = "salted: " + LONG
    assert cached(locked, ERIN, text, cache_salt="one") == 0
    assert cached(locked, ERIN, text, cache_salt="two") == 0
    assert cached(locked, ERIN, text) == 0
    assert cached(locked, ERIN, text, cache_salt="one") >= 128
    assert cached(locked, ALICE, text, cache_salt="one") == 0
    assert explained(locked, ERIN, text, cache_salt="three")["matched_tokens"] == 0
    assert explained(locked, ERIN, text, cache_salt="two")["matched_tokens"] >= 128


def test_tenants_share_the_cache_with_share_prefix_cache(tiny_model: Path) -> None:
    keys = ("--api-key", ALICE, "--api-key", BOB, "--share-prefix-cache")
    with serving(str(tiny_model), *FAKE, *keys, key=ALICE) as server:
        assert cached(server, ALICE) == 0
        assert cached(server, BOB) >= 128
        assert explained(server, BOB)["matched_tokens"] >= 128
        assert cached(server, BOB, cache_salt="mine") == 0


# Tiers and limits

KEYS = """
keys:
  - {key: sk-fast-00000001, name: fast, tier: high}
  - {key: sk-plain-0000001, name: plain}
  - {key: sk-batch-0000001, name: batch, tier: low}
  - {key: sk-rate-00000001, name: rate, requests_per_minute: 2}
  - {key: sk-tokens-000001, name: tokens, tokens_per_minute: 40}
  - {key: sk-one-000000001, name: one, max_requests: 1}
  - {key: sk-boss-00000001, name: boss, admin: true}
"""


@pytest.fixture(scope="module")
def tiers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(KEYS)
    options = ("--api-keys-file", str(path), "--device", "10ms", "--log-format", "json")
    with serving(str(tiny_model), *FAKE, *options, key="sk-plain-0000001") as server:
        yield server


@pytest.mark.parametrize(
    ("key", "wish", "tier"),
    [
        ("sk-fast-00000001", {}, "high"),
        ("sk-fast-00000001", {"priority": "low"}, "low"),
        ("sk-fast-00000001", {"priority": 0}, "normal"),
        ("sk-fast-00000001", {"service_tier": "flex"}, "low"),
        ("sk-plain-0000001", {}, "normal"),
        ("sk-plain-0000001", {"priority": "high"}, "normal"),
        ("sk-plain-0000001", {"priority": -100}, "normal"),
        ("sk-plain-0000001", {"service_tier": "priority"}, "normal"),
        ("sk-plain-0000001", {"service_tier": "flex"}, "low"),
        ("sk-batch-0000001", {"priority": "high"}, "low"),
        ("sk-batch-0000001", {"service_tier": "priority", "priority": "normal"}, "low"),
    ],
)
def test_a_request_may_only_lower_the_tier_of_its_key(tiers: Server, key: str, wish: dict[str, Any], tier: str) -> None:
    answer = tiers.post(CHAT, GOOD[CHAT] | wish, headers={"authorization": f"Bearer {key}"})
    assert answer.status == 200
    line = json.loads(tiers.wait_for(answer.headers["x-request-id"]))
    assert line["tier"] == tier
    assert line["key"] == {"sk-f": "fast", "sk-p": "plain", "sk-b": "batch"}[key[:4]]
    assert key not in tiers.log


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_key_has_limits_of_its_own(tiers: Server, path: str) -> None:
    for key, name in (("sk-rate-00000001", "requests_per_minute"), ("sk-tokens-000001", "tokens_per_minute")):
        while (last := tiers.post(path, GOOD[path], headers={"x-api-key": key})).status == 200:
            pass  # a slow machine may take so long that the limit allows another request
        assert last.status == 429, name
        assert name in last.json["error"]["message"]
        assert last.json["error"]["type"] == "rate_limit_error"
        assert 1 <= int(last.headers["retry-after"]) <= 60
        assert last.headers["x-should-retry"] == "true"
    assert tiers.post(path, GOOD[path]).status == 200  # other keys are not limited


def test_a_key_has_a_limit_of_open_requests(tiers: Server) -> None:
    tiers.key = "sk-one-000000001"
    try:
        body = {**GOOD[CHAT], "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with tiers.begin(body):
            second = tiers.post(CHAT, GOOD[CHAT])
            assert second.status == 429
            assert "max_requests" in second.json["error"]["message"]
            assert int(second.headers["retry-after"]) >= 1
        eventually(lambda: tiers.post(CHAT, GOOD[CHAT]).status == 200, "who leaves gives its place back")
    finally:
        tiers.key = "sk-plain-0000001"


def test_a_keys_file_can_define_an_admin_key(tiers: Server) -> None:
    assert tiers.post("/v1/cache/clear", headers={"x-api-key": "sk-boss-00000001"}).status == 200
    assert tiers.post("/v1/cache/clear").status == 403


# Settings


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
def test_tls(tiny_model: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    server = spawn(str(tiny_model), *FAKE, "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    try:
        found = re.search(r"https://127\.0\.0\.1:(\d+)", server.wait_for(r" at https://"))
        assert found is not None
        context = ssl.create_default_context(cafile=str(certificate))
        connection = HTTPSConnection("127.0.0.1", int(found[1]), context=context, timeout=HANG_S)
        body = {**GOOD[CHAT], "stream": True}
        connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        assert server.stop() == 0
    finally:
        put_away(server)
