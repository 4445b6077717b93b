"""The stored record of a policy: the weights of its engines, and a weight change in progress.

Plain data for the store. A restarted service restores a pause from it and resumes nothing by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PauseMode(StrEnum):
    """What happens to calls in flight when the weights change."""

    DRAIN = "drain"  # they finish with the old weights
    ABORT = "abort"  # they are aborted, keep their tokens, and continue with the new weights
    KEEP = "keep"  # the engine freezes calls that report their versions; the others are aborted as above


@dataclass(frozen=True, slots=True)
class PolicyEngine:
    """The state of one engine's weights."""

    id: str
    version: int
    is_paused: bool = False
    error: str | None = None  # why it is quarantined
    started: str | None = None  # when the process with these weights started, as it reported


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """The state of one policy. `holder` is None while no weight change is in progress."""

    name: str
    version: int = 0
    is_named: bool = False  # a trainer has set a version; before that, the version is 0
    is_paused: bool = False  # the policy as a whole; a part of its engines may be running
    mode: PauseMode | None = None
    lease_s: float | None = None
    holder: str | None = None
    engines: tuple[PolicyEngine, ...] = ()
