"""The gates of a router, sent to the routers that follow it: which engines exist, and which of them take calls.

One router, the head's, pauses and resumes engines. The routers of nodes follow it, with calls of their own to the same
engines: they receive these gates, treat their calls as the head treats its own, and send engines no control requests.
Before the head pauses an engine, or sets its version, it waits until all nodes have applied the gates (`Followers`).

Invariants.
- Gates are complete: a node that missed some needs only the latest. Their number rises with every change, also across
  restarts of the head. So a node that has applied a number has applied all lower ones, also those of an earlier head.
- An engine is down at nodes until the head itself has admitted it: no node samples from weights without a version.
- `mode` decides what happens to calls in flight while a gate is closed, per engine: one may be cut while others drain.
- Gates contain no loads. Nodes report theirs to the head (`Router.used`), and choose engines by their own load only:
  loads of other nodes would be outdated when used, and all nodes would choose the same engine.
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
from rollyard.engines.pool.pool import EnginePool, Health, PoolMember

log = logging.getLogger("rollyard.engines")


@dataclass(frozen=True, slots=True)
class EngineGate:
    """The gate of one engine of a policy. Its version is valid while the gate is open."""

    id: str
    version: int
    is_joined: bool = True  # the head has admitted it; before that, no node may use it
    is_paused: bool = False
    is_leaving: bool = False  # while it is paused, its sessions move to other engines if they can
    mode: PauseMode | None = None  # while it is paused: what happens to calls in flight
    is_quarantined: bool = False
    error: str = ""  # why it is quarantined
    next_version: int | None = None  # the version it is about to get
    is_given: bool = False  # the engine itself accepted its version from the head
    started: str | None = None  # when the process started that has these weights


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
    """The routers that follow a router."""

    async def settled(self) -> None:
        """Returns when each of them has applied the current gates (its calls cut, drained or frozen by their modes), or
        is gone: results that a gone node sampled since then are rejected."""
        ...


class GatePublisher:
    """Composes the gates of a router, with a new number when they have changed."""

    def __init__(self, members: Mapping[str, PoolMember], pools: Mapping[str, EnginePool]) -> None:
        self._members = members
        self._pools = pools
        # larger than any number of an earlier process, which has not changed its gates a million times a second
        self._gates = WeightGates(time.time_ns() // 1000)
        self._notified_number = self._gates.number
        self._is_due = False
        self.listeners: list[Callable[[], None]] = []

    def gates(self) -> WeightGates:
        """The current gates. A caller that waits for them to be applied reads them first, so it misses no change."""
        specs = tuple(member.engine.spec for member in self._members.values())
        policies = tuple(_policy_gate(pool) for pool in self._pools.values() if _is_published(pool))
        if (specs, policies) != (self._gates.specs, self._gates.policies):
            self._gates = WeightGates(self._gates.number + 1, specs, policies)
            self.moved()
        return self._gates

    def moved(self) -> None:
        """Schedules the listeners. Several changes in one loop iteration notify them once."""
        if self.listeners and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        self._is_due = False
        if self.gates().number == self._notified_number:
            return
        self._notified_number = self._gates.number
        for listener in tuple(self.listeners):
            try:
                listener()
            except Exception:  # the gates have changed, whether or not a listener fails
                log.exception("a listener for gates failed")


def _is_published(pool: EnginePool) -> bool:
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
        member.is_version_accepted,
        member.started,
    )
