"""Registry logins: reads the files that `docker login` and `podman login` write, and parses a registry's challenge.

Credential helpers (`credsStore`, `credHelpers`) are not supported. If one is configured and a registry refuses access,
the error mentions it.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollyard.sandbox.images.errors import ImageError
from rollyard.sandbox.images.reference import HUB

HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", HUB)


@dataclass(frozen=True, slots=True)
class Login:
    user: str
    secret: str

    def __repr__(self) -> str:
        return f"Login({self.user!r})"

    @property
    def header(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


def auth_files(environ: Mapping[str, str]) -> list[Path]:
    """Returns the files that may contain logins. The first with an entry for the registry is used."""
    home = Path(environ.get("HOME") or "~").expanduser()
    named = environ.get("REGISTRY_AUTH_FILE")
    places = [Path(named)] if named else []
    if environ.get("XDG_RUNTIME_DIR"):
        places.append(Path(environ["XDG_RUNTIME_DIR"], "containers", "auth.json"))
    places.append(Path(environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json")
    return places


def find_login(host: str, environ: Mapping[str, str] | None = None) -> Login | None:
    """Returns the login for a registry, or None. Raises `ImageError` for a file that cannot be read."""
    for file in auth_files(os.environ if environ is None else environ):
        for key in HUB_KEYS if host == HUB else (host, f"https://{host}", f"https://{host}/v2/"):
            entry = _auths(file).get(key)
            if isinstance(entry, dict) and entry.get("auth"):
                return _decode(str(entry["auth"]), file)
    return None


def has_helper(environ: Mapping[str, str] | None = None) -> bool:
    """Whether logins may be in a credential helper, which is not queried."""
    return any(
        "credsStore" in _read(file) or "credHelpers" in _read(file)
        for file in auth_files(os.environ if environ is None else environ)
    )


def parse_challenge(header: str) -> tuple[str, dict[str, str]]:
    """Returns the scheme of a WWW-Authenticate header, in lower case, and its parameters."""
    scheme, _, parameters = header.strip().partition(" ")
    matches = re.findall(r'([A-Za-z_]+)\s*=\s*(?:"([^"]*)"|([^\s,]+))', parameters)
    return scheme.lower(), {name.lower(): quoted or plain for name, quoted, plain in matches}


def _auths(file: Path) -> dict[str, object]:
    auths = _read(file).get("auths")
    return auths if isinstance(auths, dict) else {}


def _read(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ImageError(f"{file} cannot be read: {error}", "fix it, or log in again") from error
    return content if isinstance(content, dict) else {}


def _decode(text: str, file: Path) -> Login:
    try:
        user, colon, secret = base64.b64decode(text, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ImageError(f"{file} has an `auth` that is not base64", "log in again") from error
    if not colon:
        raise ImageError(f"{file} has an `auth` without a user and a password", "log in again")
    return Login(user, secret)
