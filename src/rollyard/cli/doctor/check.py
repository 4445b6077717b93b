"""The result of one check of `rollyard doctor`, and definitions that its parts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]

DELEGATE = (
    "systemd-run --user --scope -p Delegate=yes rollyard serve; in a unit: [Service] Delegate=yes; without systemd:"
    " run it as root where cgroups can be written to"
)
"""Gives the service a part of the cgroup tree, so that the kernel enforces its limits."""


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """`remedy` is empty if there is nothing to do."""

    name: str
    state: State
    detail: str
    remedy: str = ""
