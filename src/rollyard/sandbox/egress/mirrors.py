"""The environment variables and files by which commands in a sandbox find the proxy and the operator's package mirrors.

pip, uv and npm read variables. apt reads the file that APT_CONFIG names. It is in the control folder, which is
read-only in the sandbox; its list of sources is made for the release in the image's os-release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rollyard.core.egress import HostRule, host_of
from rollyard.sandbox.egress.base import EGRESS_PORT

PROXY = f"http://127.0.0.1:{EGRESS_PORT}"
AT_HOME = "localhost,127.0.0.1"
"""Servers in the sandbox itself, and the doorway. Without ::1, which older httpx versions parse as an invalid port."""

APT_CONF, APT_LIST = "apt.conf", "apt.list"
OS_RELEASE = "/etc/os-release"
OS_RELEASE_BYTES = 64 << 10

_COMPONENTS = {"debian": "main", "ubuntu": "main universe"}


def mirror_rule(url: str) -> HostRule:
    """Returns the rule that allows a mirror's host. Raises ValueError if the URL is not valid for a mirror."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an http:// or https:// URL was expected")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a password in the URL would be visible to every task")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return HostRule(host_of(host), (parts.port or (443 if parts.scheme == "https" else 80),))


def egress_env(mirrors: Mapping[str, str], control_path: str) -> dict[str, str]:
    """Returns the variables for a sandbox. `control_path` is the control folder's path inside it."""
    env = {
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), PROXY),
        **dict.fromkeys(("no_proxy", "NO_PROXY"), AT_HOME),
        "NODE_USE_ENV_PROXY": "1",  # Node's built-in fetch ignores the other variables without it
    }
    if pip := mirrors.get("pip"):
        env |= {"PIP_INDEX_URL": pip, "UV_DEFAULT_INDEX": pip}
        if urlsplit(pip).scheme == "http":
            env["PIP_TRUSTED_HOST"] = urlsplit(pip).netloc
    if npm := mirrors.get("npm"):
        env["NPM_CONFIG_REGISTRY"] = npm
    env["APT_CONFIG"] = f"{control_path}/{APT_CONF}"
    return env


def write_apt_files(control_dir: Path, control_path: str, mirrors: Mapping[str, str], os_release: str) -> None:
    """Writes apt's configuration. `control_dir` is the host's path of `control_path`."""
    lines = [
        f'Acquire::http::Proxy "{PROXY}";',
        f'Acquire::https::Proxy "{PROXY}";',
        'Acquire::http::Pipeline-Depth "0";',
        'APT::Sandbox::User "root";',  # no other user exists for downloads
    ]
    source = apt_source(mirrors.get("apt", ""), os_release)
    if source:
        (control_dir / APT_LIST).write_text(source)
        lines += [f'Dir::Etc::sourcelist "{control_path}/{APT_LIST}";', 'Dir::Etc::sourceparts "-";']
    (control_dir / APT_CONF).write_text("\n".join(lines) + "\n")


def apt_source(url: str, os_release: str) -> str:
    """Returns the source line for this image's release; "" if it is not Debian or Ubuntu, which then has no mirror."""
    fields = dict(re.findall(r'^(ID|VERSION_CODENAME)="?([a-z0-9.-]{1,40})"?$', os_release, re.MULTILINE))
    components = _COMPONENTS.get(fields.get("ID", ""))
    if not url or components is None or "VERSION_CODENAME" not in fields:
        return ""
    return f"deb {url} {fields['VERSION_CODENAME']} {components}\n"
