"""The state of a policy's weights: the current update, and the policy as it is shown and saved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rollyard.core.failure import NotFound, PolicyConflict
from rollyard.core.policy import PauseMode, PolicyEngine, PolicyRecord
from rollyard.engines.pool.pool import EnginePool, Health, PoolMember

LEASE_S = 600.0

OnVersion = list[Callable[[str, int], None]]

ABANDONED = "its weight update was abandoned: a resume that names a version brings it up"

REMOVED_WHILE_PAUSED = "it left while it was paused: a resume that names a version brings it up"


class PolicyState(StrEnum):
    RUNNING = "running"
    PAUSING = "pausing"  # no new call starts; some in flight have not ended
    PAUSED = "paused"  # the trainer may write
    ABANDONED = "abandoned"  # the lease expired
    RESUMING = "resuming"


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """The current state of a policy."""

    name: str
    version: int
    state: PolicyState
    mode: PauseMode | None
    lease_s: float | None
    lease_left_s: float | None
    holder: str | None
    engines: tuple[EngineWeights, ...]


@dataclass(frozen=True, slots=True)
class EngineWeights:
    id: str
    version: int
    health: Health
    is_paused: bool
    error: str | None


@dataclass(frozen=True, slots=True)
class PolicySettings:
    control_s: float = 60.0
    """How long an engine may take for the steps of a pause, and for those of a resume."""
    abort_grace_s: float = 10.0
    """How long a paused engine may take to return the calls that it aborted."""


@dataclass(eq=False, slots=True)
class Update:
    """A weight update in progress."""

    holder: str
    mode: PauseMode
    ids: set[str] | None  # None: all engines, including those added later
    lease_s: float = LEASE_S
    ends_at: float = 0.0  # in the event loop's time
    timer: asyncio.TimerHandle | None = None
    tasks: dict[PoolMember, asyncio.Task[None]] = field(default_factory=dict["PoolMember", "asyncio.Task[None]"])
    resuming: asyncio.Task[None] | None = None
    is_started: bool = True  # False while a pause is being saved, before its engines are paused
    is_abandoned: bool = False
    turned: set[PoolMember] = field(default_factory=set["PoolMember"])  # quarantined only because the lease expired

    @property
    def state(self) -> PolicyState:
        if self.resuming is not None:
            return PolicyState.RESUMING
        if self.is_abandoned:
            return PolicyState.ABANDONED
        is_done = self.is_started and all(task.done() for task in self.tasks.values())
        return PolicyState.PAUSED if is_done else PolicyState.PAUSING

    def covers(self, engine_id: str) -> bool:
        return self.ids is None or engine_id in self.ids


def check_holder(pool: EnginePool, update: Update | None, holder: str) -> None:
    """Raises PolicyConflict while another holder has the pause and its lease runs."""
    if update is not None and not update.is_abandoned and update.holder != holder:
        raise holder_conflict(pool, update)


def holder_conflict(pool: EnginePool, update: Update) -> PolicyConflict:
    remaining_s = _lease_remaining_s(update)
    return PolicyConflict(
        f"policy {pool.name!r} is {update.state}, held by {update.holder or 'a resume'}"
        + ("" if remaining_s is None else f" for another {remaining_s:.0f} s unless it renews"),
        holder=update.holder or None,
        state=str(update.state),
        lease_left_s=remaining_s,
    )


def check_version(pool: EnginePool, after: int | None) -> None:
    """Raises PolicyConflict if another caller has set a version meanwhile."""
    if after is not None and pool.version != after:
        raise PolicyConflict(
            f"policy {pool.name!r} is at version {pool.version}, not at {after}: another caller updated its weights",
            version=pool.version,
        )


def _lease_remaining_s(update: Update | None) -> float | None:
    if update is None or update.timer is None:
        return None
    return max(0.0, update.ends_at - asyncio.get_running_loop().time())


def status_of(pool: EnginePool, update: Update | None) -> PolicyStatus:
    return PolicyStatus(
        name=pool.name,
        version=pool.version,
        state=PolicyState.RUNNING if update is None else update.state,
        mode=update.mode if update else None,
        lease_s=update.lease_s if update else None,
        lease_left_s=_lease_remaining_s(update),
        holder=(update.holder or None) if update else None,
        engines=tuple(
            EngineWeights(
                member.id,
                member.version,
                member.health,
                member.is_paused,
                (member.stats.last_error or None) if member.health is not Health.UP else None,
            )
            for member in pool.members.values()
        ),
    )


def record_of(
    pool: EnginePool, update: Update | None, absent: Iterable[PolicyEngine], fresh: Sequence[PoolMember] = ()
) -> PolicyRecord:
    """`fresh` engines are no longer paused once this is saved; `absent` ones were saved before and are not back yet."""
    engines = [
        PolicyEngine(
            member.id,
            member.version,
            member.is_paused and member not in fresh,
            member.stats.last_error if member not in fresh and _is_at_fault(member, update) else None,
            member.started,
        )
        for member in pool.members.values()
        if member.is_joined
    ]
    return PolicyRecord(
        name=pool.name,
        version=pool.version,
        is_named=pool.is_named,
        is_paused=update is not None and update.ids is None,
        mode=update.mode if update else None,
        lease_s=update.lease_s if update else None,
        holder=update.holder if update else None,
        engines=(*engines, *absent),
    )


def _is_at_fault(member: PoolMember, update: Update | None) -> bool:
    """Whether the engine is quarantined, and not only because a lease expired."""
    return member.health is Health.QUARANTINED and (update is None or member not in update.turned)


def chosen(pool: EnginePool, engines: Sequence[str] | None) -> list[PoolMember]:
    """The engines with these ids, or all. Raises NotFound."""
    if engines is None:
        return list(pool.members.values())
    for engine_id in engines:
        if engine_id not in pool.members:
            raise NotFound(f"policy {pool.name!r} has no engine {engine_id!r}")
    return [pool.members[engine_id] for engine_id in dict.fromkeys(engines)]


def still_paused(pool: EnginePool, update: Update, resumed: Sequence[PoolMember]) -> set[str]:
    """The ids of engines that stay paused for this update when those in `resumed` continue."""
    return {m.id for m in pool.members.values() if update.covers(m.id) and m not in resumed and m.is_paused}
