"""Records of tokens, sign-ins and administrative actions.

Plain data for the store. Only the SHA-256 digest of a token or cookie is stored, never the secret itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollyard.core.json import Json


class Access(StrEnum):
    """The scope of a token."""

    ADMIN = "admin"  # everything
    TRAINER = "trainer"  # its own runs with everything in them, and the weights of its policies
    SUBMITTER = "submitter"  # rollouts, groups, evaluations and sessions in its runs
    READER = "reader"  # reads only
    NODE = "node"  # the calls of a fleet's node to its head


@dataclass(frozen=True, slots=True)
class Quota:
    """What one owner may use at the same time. None means no limit."""

    queued: int | None = None  # waiting rollouts
    live: int | None = None  # running rollouts
    sessions: int | None = None  # open sessions
    stored_bytes: int | None = None  # of trajectories; acknowledge or delete rollouts to free space
    requests_per_s: float | None = None
    priority: int | None = None  # the highest that it may request


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token that an administrator created. `id` names its owner and stays the same when the token is rotated."""

    id: str
    access: Access
    digest: str  # SHA-256, hexadecimal
    name: str = ""  # for display
    runs: tuple[str, ...] = ()  # patterns of the run names that it is limited to; empty: its own runs, of any name
    policies: tuple[str, ...] = ()  # the same for policies
    created_at: float = 0.0
    created_by: str = ""
    expires_at: float | None = None
    quota: Quota = field(default_factory=Quota)


@dataclass(frozen=True, slots=True)
class LoginRecord:
    """A browser that is signed in to the dashboard. It acts as the token `owner`."""

    digest: str  # SHA-256 of the cookie's value and the page's key, hexadecimal
    owner: str
    token: str  # the digest of the owner's token: the sign-in ends when that token is rotated
    created_at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One administrative action. `actor` is a token's id; `seq` is its position in the log, set by the store."""

    at: float
    actor: str
    action: str
    target: str
    detail: Mapping[str, Json] = field(default_factory=dict[str, Json])
    seq: int = 0
