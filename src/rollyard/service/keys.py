"""The keys of sessions: `rys-ID-MAC`, made from the id and one secret of this service, and kept nowhere.

A key opens the gateway for its one session and nothing else. The same id has the same key, before and after a restart;
who has the file `session-secret` below data_dir can make all of them, so it is ours alone (mode 0600).
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from rollyard.service.auth import own_token

SECRET = "session-secret"  # below data_dir

_PREFIX = "rys-"
_MAC_HEX = 48  # 192 bits


class SessionKeys:
    """See the module."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def key_of(self, session_id: str) -> str:
        return f"{_PREFIX}{session_id}-{self._mac(session_id)}"

    def session_of(self, key: str) -> str | None:
        """Whose key this is; None: nobody's. The time it takes tells nothing of the right one."""
        session_id, _, mac = key.removeprefix(_PREFIX).rpartition("-")
        known = self._mac(session_id)
        is_ours = hmac.compare_digest(known.encode(), mac.encode("utf-8", "surrogateescape"))
        return session_id if is_ours and key.startswith(_PREFIX) and session_id else None

    def _mac(self, session_id: str) -> str:
        text = session_id.encode("utf-8", "surrogateescape")
        return hmac.new(self._secret, b"session\0" + text, hashlib.sha256).hexdigest()[:_MAC_HEX]


def load_keys(data_dir: Path) -> SessionKeys:
    """Made, with its secret, at the first start."""
    return SessionKeys(own_token(data_dir / SECRET))
