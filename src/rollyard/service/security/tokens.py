"""The valid tokens: those of the settings, and those that administrators create while the service runs.

On loopback, the first start creates an admin token and writes it, mode 0600, where the client and the CLI read it; with
a fleet, it also creates a node token.

Invariants. A token is compared by its digest, in constant time, with all tokens. A token file is complete or absent,
and is refused if other users can read it. A created token is returned once, when it is created; the store holds its
digest. A revoked or expired token is refused from the next call on, whatever else changes it at the same time.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import SecretStr

from rollyard.core.access import Access, Quota, TokenRecord
from rollyard.core.failure import NotFound, Unauthorized
from rollyard.service.security.access import Caller
from rollyard.service.settings import Settings, SettingsError

PREFIX = "ryt_"  # of created tokens, so that scanners for leaked secrets find them

_TOKEN = re.compile(r"[\x21-\x7e]{16,512}")


@dataclass(frozen=True, slots=True)
class KnownToken:
    """A token of the settings or a created one."""

    digest: bytes
    caller: Caller
    expires_at: float | None = None

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time.time()


class Tokens:
    """All valid tokens, and the caller of each."""

    def __init__(self, admin: Iterable[str], trainer: Iterable[str] = (), node: Iterable[str] = ()) -> None:
        self._configured = [
            KnownToken(digest, Caller(access, digest.hex()[:16]))
            for access, tokens in ((Access.NODE, node), (Access.TRAINER, trainer), (Access.ADMIN, admin))
            for digest in map(_digest, tokens)
        ]
        self._created: dict[str, TokenRecord] = {}
        self.changing = asyncio.Lock()  # held from reading a record to storing its successor
        self._known = list(self._configured)

    @property
    def created(self) -> list[TokenRecord]:
        return list(self._created.values())

    @property
    def callers(self) -> list[Caller]:
        return [one.caller for one in self._known]

    def get(self, token_id: str) -> TokenRecord:
        if token_id not in self._created:
            raise NotFound(f"there is no token {token_id!r}")
        return self._created[token_id]

    def quota_of(self, owner: str) -> Quota:
        """The quota of a run's owner."""
        record = self._created.get(owner)
        return record.quota if record is not None else Quota()

    def named(self, name: str) -> KnownToken | None:
        """The token of that caller, if it is still valid."""
        return next((one for one in self._known if one.caller.name == name and not one.is_expired), None)

    def put(self, record: TokenRecord) -> None:
        """Makes a token valid, and replaces an earlier one of that id."""
        self._created[record.id] = record
        self._renew()

    def remove(self, token_id: str) -> None:
        del self._created[token_id]
        self._renew()

    def _renew(self) -> None:
        self._known = [*self._configured, *map(_known, self._created.values())]

    def caller(self, authorization: str | None) -> Caller:
        """The caller of this Authorization header. Raises `Unauthorized` for an unknown or expired token."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorized("this call needs a bearer token")
        digest = _digest(token.strip())
        match: KnownToken | None = None
        for one in self._known:  # no early exit: constant time
            if hmac.compare_digest(one.digest, digest):
                match = one
        if match is None:
            raise Unauthorized("this token is unknown")
        if match.is_expired:
            raise Unauthorized("this token has expired: ask an admin for a new one")
        return match.caller


def _known(record: TokenRecord) -> KnownToken:
    caller = Caller(record.access, record.id, record.runs, record.policies, record.quota)
    return KnownToken(bytes.fromhex(record.digest), caller, record.expires_at)


def new_token(record: TokenRecord) -> tuple[TokenRecord, str]:
    """The record with a new token's digest, and the token itself."""
    token = PREFIX + secrets.token_urlsafe(32)
    return replace(record, digest=_digest(token).hex()), token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


# --- those of the settings ----------------------------------------------------------------------------


def load_tokens(settings: Settings) -> Tokens:
    """The configured tokens. On loopback without an admin token, the one in the token file, created if needed."""
    admin = _configured_tokens("admin_tokens", settings.admin_tokens)
    trainer = _configured_tokens("trainer_tokens", settings.trainer_tokens)
    if not admin and settings.is_loopback:
        admin = [own_token(settings.token_path)]
    if not admin and not trainer:
        raise SettingsError(
            f"host {settings.host} is reachable from other machines: set admin_tokens or trainer_tokens first, "
            "or listen on 127.0.0.1"
        )
    node = _configured_tokens("node_tokens", settings.node_tokens)
    if settings.fleet is not None and not node:
        node = [node_token(settings)]
    return Tokens(admin, trainer, node)


def node_token(settings: Settings) -> str:
    """The token for nodes that the service itself starts."""
    tokens = _configured_tokens("node_tokens", settings.node_tokens)
    return tokens[0] if tokens else own_token(settings.node_token_path)


def own_token(path: Path) -> str:
    """The token in that file. Creates the file atomically, mode 0600, if it does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)  # unlike rename, never replaces a token that another process has just created
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return _read(path)[0]


def _configured_tokens(name: str, values: Sequence[SecretStr]) -> list[str]:
    tokens: list[str] = []
    for secret in values:
        value = secret.get_secret_value()
        tokens += _read(Path(value[1:]).expanduser()) if value.startswith("@") else [value]
    if not all(_TOKEN.fullmatch(token) for token in tokens):
        raise SettingsError(f"{name}: a token is 16 to 512 printable ASCII characters without spaces")
    return tokens


def _read(path: Path) -> list[str]:
    """One token per line; empty lines and lines that start with # are ignored."""
    try:
        with path.open() as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise SettingsError(f"the token file {path} can be read by other users: chmod 600 {path}")
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the token file {path} cannot be read: {error}") from error
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens or not all(_TOKEN.fullmatch(token) for token in tokens):
        raise SettingsError(f"the token file {path} contains no valid token; delete it to have a new one created")
    return tokens
