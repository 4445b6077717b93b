"""A policy as it is remembered: which weights its engines have, and the change of weights that is under way.

Plain data, so that the store can keep it. A service that starts again finds a pause here and resumes nothing by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PauseMode(StrEnum):
    """What becomes of the calls in flight when weights are to change."""

    DRAIN = "drain"  # they end by themselves, from the old weights
    ABORT = "abort"  # they are aborted, keep their tokens, and go on from the new weights
    KEEP = "keep"  # the engine freezes those that name their versions; the others are aborted as above


@dataclass(frozen=True, slots=True)
class PolicyEngine:
    """What is known of one engine's weights."""

    id: str
    version: int
    is_paused: bool = False
    error: str | None = None  # why it is quarantined
    started: str | None = None  # when the process began that has these weights, as it said


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """See the module. While nothing is under way, `holder` is None."""

    name: str
    version: int = 0
    is_named: bool = False  # somebody has told a version; before, all is version 0
    is_paused: bool = False  # the policy as a whole; a part of its engines may be without it
    mode: PauseMode | None = None
    lease_s: float | None = None
    holder: str | None = None
    engines: tuple[PolicyEngine, ...] = ()
