"""The session cap of an engine: it follows the KV cache use that the engine reports (AIMD).

The method is TCP's. While the cache has room and rollouts wait for a seat, the cap grows: quickly at first, then by
small steps. When the engine preempts, or is about to, the cap falls to a fraction of the live sessions. How much KV a
session will need is not known in advance, so the cap is found by trial, and adjusted as contexts grow.

Invariants. floor ≤ cap ≤ ceiling, once there is a cap. It grows only if it was the limit: the engine's sessions were at
the cap and a rollout waited. It falls at most once per settling time, and never while there are more sessions than it
allows: those leave by themselves, and until then a lower cap would admit just as many, namely 0. An engine that has
never reported its load has no cap. A fixed cap is always the ceiling.

Pure rules: no I/O, and no clock except the one passed to `observe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rollyard.core.engine import Admission, EngineSpec, Role
from rollyard.engines.base import EngineLoad


@dataclass(frozen=True, slots=True)
class CapRules:
    """The constants of the rules, each with its reason."""

    start: int = 16
    """The initial cap: a small GPU has room for 128k tokens beside its weights, which is 16 contexts of 8k."""
    floor: int = 1
    """One session is always allowed: alone in the cache, it causes no preemption."""
    high: float = 0.92
    """KV use that counts as overload before there is a preemption. 64 sessions that sample 50 tokens a second fill
    1.3 % of a cache of 500k tokens in the 2 s between two checks: this leaves several checks."""
    target: float = 0.85
    """Growth ends here, and never aims beyond it: the distance to `high` is room for contexts to grow."""
    low: float = 0.5
    """Below it the cap may double: twice as many sessions of the current size still fit."""
    step: float = 1 / 32
    """Growth per check as a fraction of the cap, at least one session: with checks every 2 s, a loss of 25 % is
    recovered in about 20 s, and one step adds less KV than the distance between `target` and `high`."""
    backoff: float = 0.75
    """The fraction of the sessions that is left after overload. TCP halves, since its queues drain in milliseconds;
    sessions leave over minutes, and a cap that fell too far leaves the GPU idle until it has grown again."""
    settle_s: float = 10.0
    """The time until a change takes effect: new sessions are prefilled and sampling, and old ones could leave."""


class SessionCap:
    """The session cap of one engine. `current` is None while the engine has not reported its load: no cap."""

    def __init__(self, ceiling: int, rules: CapRules | None = None, *, is_fixed: bool = False) -> None:
        self.rules = rules or CapRules()
        self.ceiling = max(1, ceiling)
        self.floor = min(self.rules.floor, self.ceiling)
        self.is_fixed = is_fixed
        self.current: int | None = self.ceiling if is_fixed else None
        self._is_starting = True  # until the first overload
        self._preemptions = 0  # as last reported
        self._settling_until_s = 0.0  # after an overload or a pause: the cap does not change until then
        self._doubled_s = 0.0

    @classmethod
    def of(cls, spec: EngineSpec, rules: CapRules | None = None) -> Self | None:
        """The cap of an engine; None for a judge, which has no sessions."""
        if spec.role is not Role.POLICY:
            return None
        return cls(spec.capacity, rules, is_fixed=spec.admission is Admission.FIXED)

    def observe(self, load: EngineLoad, sessions: int, wanting: int, now_s: float) -> None:
        """One check: the reported load, the live sessions, and the number of rollouts that wait for a seat."""
        preempted = load.preemptions > self._preemptions
        self._preemptions = load.preemptions  # fewer than before: the engine was restarted and counts from 0
        if self.is_fixed:
            return
        if self.current is None:
            self.current = self._clamped(max(self.rules.start, sessions))
            self._doubled_s = now_s
            return
        if now_s < self._settling_until_s or not load.running:  # if nothing runs, KV use does not reflect sessions
            return
        if preempted or load.kv_use >= self.rules.high:
            if 0 < sessions <= self.current:
                self._fall(sessions, now_s)
        elif wanting > 0 and sessions >= self.current and load.kv_use < self.rules.target:
            self._grow(load.kv_use, sessions, now_s)

    def settle(self, now_s: float) -> None:
        """The engine is paused for a weight update: the load that it reports now, and just after, is ignored."""
        self._settling_until_s = now_s + self.rules.settle_s

    def restart(self) -> None:
        """Resets the cap of an engine that came back: it may report no load, or hold a different number of sessions."""
        if not self.is_fixed:
            self.current = None
            self._is_starting = True
            self._preemptions = 0
            self._settling_until_s = 0.0

    def _fall(self, sessions: int, now_s: float) -> None:
        self.current = self._clamped(int(sessions * self.rules.backoff))
        self._is_starting = False
        self._settling_until_s = now_s + self.rules.settle_s

    def _grow(self, kv_use: float, sessions: int, now_s: float) -> None:
        assert self.current is not None
        if self._is_starting and kv_use < self.rules.low:
            if now_s < self._doubled_s + self.rules.settle_s:
                return
            self._doubled_s = now_s
            grown = 2 * self.current
        else:
            grown = self.current + max(1, int(self.current * self.rules.step))
        if kv_use > 0:  # at most as many as reach the target, if they are as large as the current ones
            grown = int(min(grown, sessions * self.rules.target / kv_use))
        self.current = self._clamped(max(self.current, grown))

    def _clamped(self, cap: int) -> int:
        return min(self.ceiling, max(self.floor, cap))
