"""The settings of a router: time limits and session caps."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollyard.core import Sampling
from rollyard.engines.pool.admission import CapRules
from rollyard.engines.routing.calls import SessionSettings


@dataclass(frozen=True, slots=True)
class RouterSettings(SessionSettings):
    """The settings of a router, in addition to those of its sessions."""

    watch_s: float = 2.0
    """The time between two health checks of an engine."""
    probe_s: float = 60.0
    """How long an engine may take to answer its probe, or to sample the token that brings it up again."""
    control_s: float = 60.0
    """How long an engine may take for the steps of a pause, and for those of a resume."""
    judge_s: float = 120.0
    """How long a judge may take for one reply."""
    judge_tries: int = 3
    cap_rules: CapRules = field(default_factory=CapRules)
    """How the session caps follow the reported load."""
    judge_sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0, max_tokens=2048))
