"""Finds the service's URL and token if the caller passes none.

The sources and their order are those of the service's settings: argument, ROLLYARD_* environment, TOML file, default. A
running service writes its URL below its data folder, so its port is known. Only the keys that a client needs are read,
so that this module does not depend on `rollyard.service`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollyard.core.address import split_pin
from rollyard.core.failure import InvalidRequest, Unauthorized
from rollyard.core.paths import data_home
from rollyard.core.texts import url_problem

HOST = "127.0.0.1"
PORT = 8127
URL_REMEDY = "Give the URL that `rollyard serve` prints, with --url or ROLLYARD_URL."


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """A service's URL, the token for it, and the SHA-256 of its certificate if the URL pins one."""

    url: str
    token: str
    pin: bytes | None = None


def find(url: str | None, token: str | None, environ: Mapping[str, str] | None = None) -> ServiceAddress:
    """Finds URL and token. Raises `Unauthorized`, with the places that were searched, if there is no token."""
    environ = os.environ if environ is None else environ
    settings = _file_settings(environ)

    def setting(name: str, default: str) -> str:
        return environ.get(f"ROLLYARD_{name.upper()}") or str(settings.get(name, "")) or default

    data_dir = Path(setting("data_dir", str(data_home(environ)))).expanduser()
    if not url:
        configured_url = environ.get("ROLLYARD_URL") or _announced(data_dir / "url")
        url = configured_url or _address(setting("host", HOST), setting("port", str(PORT)))
    if not token:
        named = setting("token_file", "")
        path = Path(named).expanduser() if named else data_dir / "token"
        token = environ.get("ROLLYARD_TOKEN") or _read_token(path)
    try:
        plain, pin = split_pin(url)
    except ValueError as error:
        raise InvalidRequest(f"the service's URL cannot be used: {error}", remedy=URL_REMEDY) from error
    if (problem := url_problem(plain)) is not None:
        raise InvalidRequest(f"the service's URL: {problem[0]}", remedy=problem[1])
    return ServiceAddress(plain.rstrip("/"), token, pin)


def _address(host: str, port: str) -> str:
    if host in ("0.0.0.0", "::", ""):  # it listens on all addresses; loopback reaches it from here
        host = HOST
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _announced(path: Path) -> str:
    """The URL that the service with that data folder wrote; correct even if a flag set its port."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _read_token(path: Path) -> str:
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
        token = next((line for line in lines if line and not line.startswith("#")), "")
    except OSError as error:
        token, why = "", f" ({error.strerror})"
    else:
        why = " (it is empty)"
    if not token:
        raise Unauthorized(
            f"there is no token: --token was not given, ROLLYARD_TOKEN is not set, and there is none in {path}{why}",
            remedy="Start the service on this machine with `rollyard serve`, or give another one's with --token.",
        )
    return token


def _file_settings(environ: Mapping[str, str]) -> Mapping[str, object]:
    """The TOML file in force, or nothing. Errors in it are reported by the service and `rollyard config`."""
    named = environ.get("ROLLYARD_CONFIG")
    home = environ.get("XDG_CONFIG_HOME") or "~/.config"
    candidates = [named] if named else ["rollyard.toml", f"{home}/rollyard/config.toml"]
    for candidate in candidates:
        try:
            return tomllib.loads(Path(candidate).expanduser().read_text())
        except (OSError, ValueError):
            continue
    return {}
