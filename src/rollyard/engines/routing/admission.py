"""How many sessions an engine gets: a cap that follows what the engine says of its KV cache (AIMD).

The idea is TCP's. While the cache has room and rollouts wait for a seat, the cap grows: quickly at first, then by
small steps. When the engine preempts, or is about to, the cap falls to a part of the sessions that there were. How
much KV a session will need nobody knows beforehand, so the cap is found out, and found out again as contexts grow.

Invariants. floor ≤ cap ≤ ceiling, once there is one. It grows only where it was the bound: its sessions were at the
cap and somebody waited. It falls at most once per settling time, and never while more sessions live than it allows:
those leave by themselves, and until then a lower number would admit exactly as many, none. An engine that never told
its load has no cap. Fixed: the ceiling, whatever is told.

Pure rules: no I/O, and no clock but the one that `observe` is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rollyard.core.engine import Admission, EngineSpec, Role
from rollyard.engines.clients.load import EngineLoad


@dataclass(frozen=True, slots=True)
class CapRules:
    """The constants of the rules, each with its reason."""

    start: int = 16
    """Where it begins: the 128k tokens that a small GPU has left beside its weights hold 16 contexts of 8k."""
    floor: int = 1
    """One session always may: alone in the cache, it preempts nobody."""
    high: float = 0.92
    """KV use that counts as trouble before there is a preemption. 64 sessions that sample 50 tokens a second fill 1.3 %
    of a cache of 500k tokens between two looks of 2 s: this leaves several looks."""
    target: float = 0.85
    """Growth ends here, and never aims beyond it: the distance to `high` is room for contexts to grow."""
    low: float = 0.5
    """Below it the cap may double: what twice as many sessions of today's size need still fits."""
    step: float = 1 / 32
    """Of the cap, at least one session, per look: with looks every 2 s, 25 % lost are won back in about 20 s, and one
    step adds less KV than lies between `target` and `high`."""
    backoff: float = 0.75
    """What is left after trouble. TCP halves, since its queues drain in milliseconds; sessions leave over minutes, and
    a cap that fell too far is an idle GPU for as long as it takes to climb back."""
    settle_s: float = 10.0
    """Until a change shows: new sessions have been prefilled and sample, old ones had a chance to leave."""


class SessionCap:
    """See the module. `current` None: no cap, the engine has not told its load."""

    def __init__(self, ceiling: int, rules: CapRules | None = None, *, is_fixed: bool = False) -> None:
        self.rules = rules or CapRules()
        self.ceiling = max(1, ceiling)
        self.floor = min(self.rules.floor, self.ceiling)
        self.is_fixed = is_fixed
        self.current: int | None = self.ceiling if is_fixed else None
        self._is_starting = True  # until the first trouble
        self._preemptions = 0  # when it was last told
        self._settling_until_s = 0.0  # of trouble or rest: nothing changes
        self._doubled_s = 0.0

    @classmethod
    def of(cls, spec: EngineSpec, rules: CapRules | None = None) -> Self | None:
        """A judge has no sessions, and no cap."""
        if spec.role is not Role.POLICY:
            return None
        return cls(spec.capacity, rules, is_fixed=spec.admission is Admission.FIXED)

    def observe(self, load: EngineLoad, sessions: int, wanting: int, now_s: float) -> None:
        """One look: what the engine told, its live sessions, and how many rollouts wait for a seat at its policy."""
        preempted = load.preemptions > self._preemptions
        self._preemptions = load.preemptions  # fewer than before: it was restarted, and counts anew
        if self.is_fixed:
            return
        if self.current is None:
            self.current = self._clamped(max(self.rules.start, sessions))
            self._doubled_s = now_s
            return
        if now_s < self._settling_until_s or not load.running:  # when nothing runs, KV use says nothing of sessions
            return
        if preempted or load.kv_use >= self.rules.high:
            if 0 < sessions <= self.current:
                self._fall(sessions, now_s)
        elif wanting > 0 and sessions >= self.current and load.kv_use < self.rules.target:
            self._grow(load.kv_use, sessions, now_s)

    def rest(self, now_s: float) -> None:
        """The engine is kept from sampling (its weights change): what it tells now, and just after, means nothing."""
        self._settling_until_s = now_s + self.rules.settle_s

    def restart(self) -> None:
        """The engine went away and came back: whether it tells its load, and how much it holds, is to be seen."""
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
        if kv_use > 0:  # as many as would use the target, if they were as large as these
            grown = int(min(grown, sessions * self.rules.target / kv_use))
        self.current = self._clamped(max(self.current, grown))

    def _clamped(self, cap: int) -> int:
        return min(self.ceiling, max(self.floor, cap))
