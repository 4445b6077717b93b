"""Tokens and administrative actions as they are remembered.

Plain data, so that the store can keep it. A token itself is never stored: only its SHA-256 digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollyard.core.json import Json


class Access(StrEnum):
    """What a token is for."""

    ADMIN = "admin"  # everything
    TRAINER = "trainer"  # its own runs with all that is in them, and the weights of its policies
    SUBMITTER = "submitter"  # rollouts, groups, evaluations and sessions in its runs
    READER = "reader"  # reads, and changes nothing
    NODE = "node"  # what a node of the fleet says to its head


@dataclass(frozen=True, slots=True)
class Quota:
    """What one owner may use at once. None: as much as there is."""

    queued: int | None = None  # rollouts that wait
    live: int | None = None  # rollouts that run
    sessions: int | None = None  # open at once
    stored_bytes: int | None = None  # of trajectories; acknowledge or delete to make room
    requests_per_s: float | None = None
    priority: int | None = None  # the highest that it may ask for


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token that an administrator created. `id` names its owner and stays the same when the token is rotated."""

    id: str
    access: Access
    digest: str  # SHA-256, hexadecimal
    name: str = ""  # for people
    runs: tuple[str, ...] = ()  # patterns of the runs that it is bound to; empty: its own, whatever their names
    policies: tuple[str, ...] = ()  # the same for policies
    created_at: float = 0.0
    created_by: str = ""
    expires_at: float | None = None
    quota: Quota = field(default_factory=Quota)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One administrative action. `actor` is a token's id; `seq` is its place in the log, given by the store."""

    at: float
    actor: str
    action: str
    target: str
    detail: Mapping[str, Json] = field(default_factory=dict[str, Json])
    seq: int = 0
