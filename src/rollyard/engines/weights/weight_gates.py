"""The gates of a router, told to those that follow it: which engines there are, and which of them take calls.

One router, the head's, tells engines to pause and to go on. Others follow it, each at a node, with calls of their own
to the same engines: they are told these gates, do to their calls what the head does to its own, and tell engines
nothing. Before the head tells an engine to pause, or to take a version, it waits until all of them have (`Followers`).

Invariants.
- Gates are whole: who missed some needs only the last. Their number rises with every change, through all lives of a
  head, so who has applied a number has applied all before it, also those of a head that is dead.
- An engine is down to nodes until the head itself has taken it in: nobody samples from weights that nobody has named.
- `mode` says what becomes of calls in flight while a gate is shut, engine by engine: one may be cut while others drain.
- Loads are no part of them. They are told the other way (`Router.used`); a node counts its own, since what it was told
  of others' sessions would be old by the time it chose by it, and all nodes would choose the same engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rollyard.core.engine import EngineSpec
from rollyard.core.policy import PauseMode
from rollyard.engines.routing.pool import EnginePool, Health, PoolMember

log = logging.getLogger("rollyard.engines")


@dataclass(frozen=True, slots=True)
class EngineGate:
    """One engine of a policy. Its version counts where the gate is open."""

    id: str
    version: int
    is_joined: bool = True  # the head has taken it in; before, nobody may have it
    is_paused: bool = False
    is_leaving: bool = False  # while it is paused, its sessions go elsewhere if they can
    mode: PauseMode | None = None  # while it is paused: what becomes of calls in flight
    is_quarantined: bool = False
    error: str = ""  # why
    next_version: int | None = None  # that it is about to get
    is_given: bool = False  # it has taken its version from the head
    started: str | None = None  # when the process began that has these weights


@dataclass(frozen=True, slots=True)
class PolicyGate:
    name: str
    version: int
    is_named: bool
    is_paused: bool  # as a whole
    engines: tuple[EngineGate, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightGates:
    number: int
    specs: tuple[EngineSpec, ...] = ()  # judges included, which have no gates
    policies: tuple[PolicyGate, ...] = ()


class Followers(Protocol):
    """All that follow a router, as it sees them."""

    async def settled(self) -> None:
        """Returns when each of them has applied the gates as they stand now (its calls cut, drained or frozen as the
        modes say), or is gone: then nothing that it sampled since will be believed."""
        ...


class GatePublisher:
    """Writes down the gates of a router, under a new number when they have changed."""

    def __init__(self, members: Mapping[str, PoolMember], pools: Mapping[str, EnginePool]) -> None:
        self._members = members
        self._pools = pools
        # an earlier life began earlier, and has not changed its gates a million times a second
        self._gates = WeightGates(time.time_ns() // 1000)
        self._told = self._gates.number
        self._is_due = False
        self.listeners: list[Callable[[], None]] = []

    def gates(self) -> WeightGates:
        """As they stand. Whoever waits for them to be applied asks first, and is never a change behind."""
        specs = tuple(member.engine.spec for member in self._members.values())
        policies = tuple(_policy_gate(pool) for pool in self._pools.values() if _is_told_of(pool))
        if (specs, policies) != (self._gates.specs, self._gates.policies):
            self._gates = WeightGates(self._gates.number + 1, specs, policies)
            self.moved()
        return self._gates

    def moved(self) -> None:
        """Something changed, perhaps more is to come: listeners are told when that is done."""
        if self.listeners and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._is_due = False
        if self.gates().number == self._told:
            return
        self._told = self._gates.number
        for listener in tuple(self.listeners):
            try:
                listener()
            except Exception:  # the gates have moved, whatever a listener makes of it
                log.exception("a listener for gates failed")


def _is_told_of(pool: EnginePool) -> bool:
    return bool(pool.members) or pool.is_named or pool.is_paused


def _policy_gate(pool: EnginePool) -> PolicyGate:
    engines = tuple(_engine_gate(member) for member in pool.members.values())
    return PolicyGate(pool.name, pool.version, pool.is_named, pool.is_paused, engines)


def _engine_gate(member: PoolMember) -> EngineGate:
    is_quarantined = member.health is Health.QUARANTINED
    return EngineGate(
        member.id,
        member.version,
        member.is_joined,
        member.is_paused,
        member.is_leaving,
        member.mode,
        is_quarantined,
        member.stats.last_error if is_quarantined else "",
        member.next_version,
        member.is_given,
        member.started,
    )
