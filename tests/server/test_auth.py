"""API keys from flags and files: lookup, and refusals that do not show a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.core.values import Priority
from quire.errors import InvalidRequest
from quire.server.limits import LOCAL, KeyRing, make_keyring, presented

FILE = """
keys:
  - {key: sk-alice-0001, name: alice, tier: high, max_requests: 8}
  - {key: sk-batch-0001, name: batch, tier: low, requests_per_minute: 60, tokens_per_minute: 10000}
  - {key: sk-admin-0001, name: root, admin: true}
"""


def test_without_keys_every_request_has_the_local_key() -> None:
    assert KeyRing().find(None) is LOCAL
    assert not KeyRing()


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    ring = make_keyring(["sk-plain-0001"], ["sk-admin-0002"], path)
    assert len(ring) == 5
    alice, batch = ring.find("sk-alice-0001"), ring.find("sk-batch-0001")
    assert alice is not None
    assert batch is not None
    assert (alice.name, alice.tier, alice.limits.max_requests, alice.is_admin) == ("alice", Priority.HIGH, 8, False)
    assert (batch.tier, batch.limits.tokens_per_minute) == (Priority.LOW, 10000)
    assert alice.namespace != batch.namespace
    plain, admin = ring.find("sk-plain-0001"), ring.find("sk-admin-0002")
    assert plain is not None
    assert admin is not None
    assert (plain.tier, plain.is_admin, admin.is_admin) == (Priority.NORMAL, False, True)
    for wrong in (None, "", "sk-alice-000", "sk-alice-00011", "SK-ALICE-0001", "sk-\xe9"):
        assert ring.find(wrong) is None


def test_a_shared_cache_has_one_namespace(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    ring = make_keyring([], [], path, is_shared=True)
    found = [ring.find(key) for key in ("sk-alice-0001", "sk-batch-0001")]
    assert [key.namespace for key in found if key is not None] == ["", ""]


def test_a_key_without_a_name_keeps_its_namespace_when_others_change() -> None:
    """Content on disk outlives the server: another key must not find it because it has the same number now."""
    before = make_keyring(["sk-alice-0001", "sk-bob-000002"], ["sk-admin-0003"], None)
    after = make_keyring(["sk-bob-000002"], ["sk-new-000004", "sk-admin-0003"], None)
    keys = [ring.find(secret) for ring in (before, after) for secret in ("sk-bob-000002", "sk-admin-0003")]
    namespaces = [key.namespace for key in keys if key is not None]
    assert namespaces[:2] == namespaces[2:]
    assert len({*namespaces}) == 2
    first, new = before.find("sk-alice-0001"), after.find("sk-new-000004")
    assert first is not None
    assert new is not None
    assert len({first.namespace, new.namespace, *namespaces}) == 4
    shared = make_keyring(["sk-alice-0001"], [], None, is_shared=True).find("sk-alice-0001")
    assert shared is not None
    assert shared.namespace == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: [{key: sk-secret-1, name: a, tier: urgent}]", "tier = 'urgent' is not one of high, normal, low"),
        ("keys: [{key: sk-secret-1}]", "missing required field `name`"),
        ("keys: [{key: sk-secret-1, name: a, teir: low}]", "unknown field `teir`"),
        ("keys: [{key: sk-secret-1, name: a}, {key: sk-secret-2, name: a}]", "'a' is used twice"),
        ("keys: [{key: sk-secret-1, name: a}, {key: sk-secret-1, name: b}]", "same key"),
        ("keys: [{key: secret, name: a}]", "the key 'a' has 6 characters; a key has 8 to 512"),
        ("keys: [{key: sk-secret-1, name: a, max_requests: 0}]", "max_requests = 0 is less than 1"),
        ("keys: [{key: sk-secret-1", "is not YAML"),
        ("[1]", "Expected `object`"),
        ("keys: []", "the file has no keys"),
    ],
)
def test_a_bad_file_is_refused_and_no_key_is_shown(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as refused:
        make_keyring([], [], path)
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nowhere"):
        make_keyring([], [], tmp_path / "nowhere.yaml")


def test_the_key_of_a_request() -> None:
    assert presented([(b"authorization", b"Bearer abc")]) == ["abc"]
    assert presented([(b"authorization", b"bearer  abc ")]) == ["abc"]
    assert presented([(b"x-api-key", b"abc")]) == ["abc"]
    assert presented([(b"authorization", b"Bearer stale"), (b"x-api-key", b"abc")]) == ["stale", "abc"]
    assert presented([(b"authorization", b"Basic abc")]) == []
    assert presented([]) == []
