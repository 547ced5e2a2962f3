"""API keys: the priority tier and limits of each. A lookup compares digests with every key, in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from quire.core.values import Priority
from quire.errors import InvalidRequest

MIN_KEY_CHARS = 8
MAX_KEY_CHARS = 512
MAX_KEYS = 10_000
MAX_PRESENTED = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one key. None: no limit."""

    max_requests: int | None = None  # at once
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and completion together

    def __post_init__(self) -> None:
        for name in ("max_requests", "requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} = {value!r} is less than 1")


@dataclass(frozen=True, slots=True)
class Key:
    """One API key. Requests have the key's tier unless they ask for a lower one."""

    name: str
    tier: Priority = Priority.NORMAL
    ceiling: Priority = Priority.NORMAL  # the highest priority that a request may ask for
    is_admin: bool = False
    limits: Limits = field(default_factory=Limits)
    namespace: str = ""  # part of every chain key, also of content on disk: two namespaces share no cache
    identity: str = ""  # owner name of keys without a name: the number in `name` may be another key's after a restart

    def priority(self, wish: Priority | None) -> Priority:
        return self.tier if wish is None else max(self.ceiling, wish)

    @property
    def owner(self) -> str:
        """The owner name in stored files and batches."""
        return self.identity or self.name


# The key of every request to a server without keys: an admin key. Such a server listens on this machine only, unless
# --insecure is set.
LOCAL = Key("local", ceiling=Priority.HIGH, is_admin=True)


class KeyRing:
    def __init__(self, keys: Iterable[tuple[str, Key]] = ()) -> None:
        self._keys: list[tuple[bytes, Key]] = []
        names: set[str] = set()
        for secret, key in keys:
            _check_secret(secret, key.name)
            if key.name in names:
                raise InvalidRequest(f"keys: the name {key.name!r} is used twice")
            names.add(key.name)
            self._keys.append((_digest(secret), key))
        if len(self._keys) > MAX_KEYS:
            raise InvalidRequest(f"keys: {len(self._keys)} keys are more than the limit of {MAX_KEYS}")
        if len({digest for digest, _ in self._keys}) < len(self._keys):
            raise InvalidRequest("keys: two names have the same key")

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str | None) -> Key | None:
        """Return the key with this secret, in constant time. Without configured keys, return LOCAL."""
        if not self._keys:
            return LOCAL
        given = _digest(secret or "")
        found = None
        for digest, key in self._keys:
            if hmac.compare_digest(digest, given):
                found = key
        return found

    def find_owner(self, owner: str) -> Key | None:
        """The key with this owner name; None if it is no longer in use."""
        keys = [key for _, key in self._keys] if self._keys else [LOCAL]
        return next((key for key in keys if key.owner == owner), None)


def presented(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Return the keys in the headers: `Authorization: Bearer KEY` (OpenAI) and `x-api-key: KEY` (Anthropic).

    A client may send both, and one of them may belong to another server.
    """
    found: list[str] = []
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            found.append(value[7:].strip().decode("latin-1"))
        elif name == b"x-api-key":
            found.append(value.strip().decode("latin-1"))
    return found[:MAX_PRESENTED]


class _KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    name: str
    tier: str = "normal"
    admin: bool = False
    max_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class _KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_KeyEntry]


def make_keyring(
    api_keys: Iterable[str], admin_keys: Iterable[str], path: Path | None, *, is_shared: bool = False
) -> KeyRing:
    """Make the key ring of `--api-key`, `--admin-api-key` and a keys file. `is_shared`: all share one prefix cache."""
    keys: list[tuple[str, Key]] = []
    for prefix, secrets, is_admin in (("key", api_keys, False), ("admin", admin_keys, True)):
        for number, secret in enumerate(secrets, 1):
            key = _key(f"{prefix}-{number}", Priority.NORMAL, is_admin, Limits(), is_shared)
            identity = f"{prefix}:{_digest(secret).hex()[:16]}"
            keys.append((secret, replace(key, identity=identity, namespace="" if is_shared else identity)))
    for entry in _read(path).keys if path is not None else ():
        if entry.tier.upper() not in Priority.__members__:
            tiers = ", ".join(name.lower() for name in Priority.__members__)
            raise InvalidRequest(f"{path}: {entry.name!r}: tier = {entry.tier!r} is not one of {tiers}")
        try:
            limits = Limits(entry.max_requests, entry.requests_per_minute, entry.tokens_per_minute)
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}: {entry.name!r}: {error}") from None
        keys.append((entry.key, _key(entry.name, Priority[entry.tier.upper()], entry.admin, limits, is_shared)))
    if path is not None and not keys:
        raise InvalidRequest(f"--api-keys-file {str(path)!r}: the file has no keys")
    return KeyRing(keys)


def _key(name: str, tier: Priority, is_admin: bool, limits: Limits, is_shared: bool) -> Key:
    if not name or len(name) > 64 or not name.isprintable():
        raise InvalidRequest(f"keys: name = {name!r:.80} is not 1 to 64 printable characters")
    return Key(name, tier, tier, is_admin, limits, "" if is_shared else name)


def _read(path: Path) -> _KeysFile:
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=_KeysFile)
    except OSError as error:
        raise InvalidRequest(f"--api-keys-file {str(path)!r}: {error.strerror or error}") from None
    except (msgspec.DecodeError, ValueError) as error:  # the file's text is not quoted: it holds keys
        where = str(error) if isinstance(error, msgspec.ValidationError) else "is not YAML"
        raise InvalidRequest(f"--api-keys-file {str(path)!r}: {where}") from None


def _check_secret(secret: str, name: str) -> None:
    if not MIN_KEY_CHARS <= len(secret) <= MAX_KEY_CHARS or not secret.isascii() or not secret.isprintable():
        size = f"{MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable ASCII characters"
        raise InvalidRequest(f"API keys: the key {name!r} has {len(secret)} characters; a key has {size}")
    if secret.strip() != secret:
        raise InvalidRequest(f"API keys: the key {name!r} begins or ends with a space")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
