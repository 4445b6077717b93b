"""Session keys: `rys-SESSION-NONCE-MAC`, derived from one secret of this service and not stored.

A key is valid at the gateway for its one session and for nothing else. The nonce is the number of the session's row in
the store, which is never reused: a later session of the same run and id has another key. A session keeps its key across
restarts. The file `session-secret` below data_dir suffices to derive all keys, so only this user can read it (mode
0600).
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from rollyard.service.security.tokens import own_token

SECRET = "session-secret"  # below data_dir

_PREFIX = "rys-"
_MAC_HEX = 48  # 192 bits


class SessionKeys:
    """Creates and checks session keys."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def make(self, session: str, nonce: int) -> str:
        return f"{_PREFIX}{session}-{nonce}-{self._mac(f'{session}-{nonce}')}"

    def session_of(self, key: str) -> tuple[str, int] | None:
        """The session of the key and its nonce, or None if the key is not valid. Compares in constant time."""
        text, _, mac = key.removeprefix(_PREFIX).rpartition("-")
        is_genuine = hmac.compare_digest(self._mac(text).encode(), mac.encode("utf-8", "surrogateescape"))
        session, _, nonce = text.rpartition("-")
        return (session, int(nonce)) if is_genuine and key.startswith(_PREFIX) and session else None

    def _mac(self, text: str) -> str:
        raw = text.encode("utf-8", "surrogateescape")
        return hmac.new(self._secret, b"session\0" + raw, hashlib.sha256).hexdigest()[:_MAC_HEX]


def load_keys(data_dir: Path) -> SessionKeys:
    """Loads the secret, and creates it at the first start."""
    return SessionKeys(own_token(data_dir / SECRET))
