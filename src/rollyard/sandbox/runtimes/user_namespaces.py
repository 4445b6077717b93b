"""Why this user may not create user namespaces, which all runtimes but `local` need, and what allows it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple

UNKNOWN = (
    "user namespaces are forbidden here. Ubuntu 24.04: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an"
    " AppArmor profile for this runtime and this Python (`rollyard doctor` prints it); elsewhere: sysctl -w"
    " user.max_user_namespaces=15000; in Docker: --security-opt seccomp=unconfined --security-opt"
    " systempaths=unconfined"
)


class Restriction(NamedTuple):
    """A restriction that a sysctl reports. `command` lifts it."""

    by: Literal["limit", "sysctl", "apparmor"]
    what: str
    command: str


def restriction() -> Restriction | None:
    if sysctl("user/max_user_namespaces") == 0:
        return Restriction("limit", "they are disabled", "sysctl -w user.max_user_namespaces=15000")
    if os.geteuid() == 0:
        return None
    if sysctl("kernel/unprivileged_userns_clone") == 0:
        return Restriction("sysctl", "only root may create them", "sysctl -w kernel.unprivileged_userns_clone=1")
    if sysctl("kernel/apparmor_restrict_unprivileged_userns") == 1:
        command = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        return Restriction("apparmor", "AppArmor restricts them to programs with a profile", command)
    return None


def explained() -> str:
    """A sentence for the error of a sandbox that could not create a namespace."""
    known = restriction()
    if known is None:
        return UNKNOWN
    profile = " (or add an AppArmor profile, which `rollyard doctor` prints)" if known.by == "apparmor" else ""
    return f"user namespaces are forbidden here: {known.what}; allow them: {known.command}{profile}"


def sysctl(name: str) -> int | None:
    try:
        return int(Path("/proc/sys", name).read_text())
    except (OSError, ValueError):
        return None
