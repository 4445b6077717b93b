"""Updates the weights of a policy while rollouts are in flight.

    running → pausing → paused → resuming → running
                           └─▶ abandoned ─┘           its lease expired: its holder may be dead

The order of an update: every engine is paused → the trainer writes → `resume` names a version → for each engine: set
the version, clear its caches, resume. The mode decides what happens to calls in flight (`core.policy.PauseMode`).

Invariants.
- Between the pause and the resume no call starts, no clock runs, and the only limit on waiting is `pause_wait_s`.
- No token gets a guessed version: a call that cannot report its versions has ended before the weights change, here and
  at every node that follows these gates.
- An engine that fails a step is quarantined. Only a resume that names a version and succeeds brings it up, not the
  watch, and not the end of a lease. If all engines fail, the policy stays paused.
- A lease that expires resumes nothing. Its engines are quarantined until its holder renews, or a caller resumes.
- While its lease runs, only the holder can end a pause, or a resume with `take_over` (no `holder` here).
- A pause or a version is saved before it takes effect: before the engines are paused, or calls continue.
- An engine that comes back and reports another version than the one resumed is quarantined: it was restarted.

With `engines`, an update covers only those: their sessions wait, or (abort) continue on other engines with the old
weights. The file is long because pausing, leases and resuming share the state of one update.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from rollyard.core.failure import NotFound, PolicyConflict, PolicyStuck
from rollyard.core.policy import PauseMode, PolicyEngine, PolicyRecord
from rollyard.engines.base import Role
from rollyard.engines.pool.pool import EnginePool, Health, PoolMember
from rollyard.engines.weights.state import (
    ABANDONED,
    LEASE_S,
    REMOVED_WHILE_PAUSED,
    OnVersion,
    PolicySettings,
    PolicyStatus,
    Update,
    check_holder,
    check_version,
    chosen,
    holder_conflict,
    record_of,
    status_of,
    still_paused,
)
from rollyard.engines.weights.steps import all_of, pause_engine, prepare_engine, renew_engine
from rollyard.engines.weights.version_pins import VersionPins

log = logging.getLogger("rollyard.engines")


class Policies:
    """Pauses and resumes policies. Created by the router; it uses the router's pools and engines."""

    def __init__(
        self,
        pools: Mapping[str, EnginePool],
        pool_of: Callable[[str], EnginePool],
        revive: Callable[[PoolMember], Awaitable[None]],
        settings: PolicySettings,
        followed: Callable[[], Awaitable[None]],
    ) -> None:
        """`revive` checks that an engine that was not up can sample; `followed` waits until all following routers have
        applied the current gates."""
        self._pools = pools
        self._pool_of = pool_of
        self._revive = revive
        self._settings = settings
        self._followed = followed
        self._updates: dict[str, Update] = {}
        self._known: dict[tuple[str, str], PolicyEngine] = {}  # by policy and id: saved before, and not back yet
        self.pins = VersionPins(pool_of)
        self.on_version: OnVersion = []
        self.save: Callable[[PolicyRecord], Awaitable[None]] | None = None

    def restore(self, records: Iterable[PolicyRecord]) -> None:
        """Restores saved policies. A saved pause is abandoned until its holder renews or a caller resumes."""
        for record in records:
            pool = self._pool_of(record.name)
            pool.version, pool.is_named, pool.is_paused = record.version, record.is_named, record.is_paused
            pool.rebound()
            self._known |= {(record.name, engine.id): engine for engine in record.engines}
            if record.holder is not None:
                paused = {engine.id for engine in record.engines if engine.is_paused and engine.error is None}
                ids = None if record.is_paused else paused
                update = Update(record.holder, record.mode or PauseMode.ABORT, ids, record.lease_s or LEASE_S)
                update.is_abandoned = True
                self._updates[record.name] = update
                log.warning("a policy is still paused from before the restart", extra={"policy": record.name})

    async def close(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        for update in self._updates.values():
            tasks |= {*update.tasks.values(), *([update.resuming] if update.resuming else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for update in self._updates.values():
            self._disarm(update)

    # --- status

    def all(self) -> list[PolicyStatus]:
        return [self.status(name) for name in self._pools if self.has(name)]

    def status(self, name: str) -> PolicyStatus:
        return status_of(self._known_pool(name), self._updates.get(name))

    def settled_version(self, name: str) -> int | None:
        """The version of its weights, or None while they are being updated, even if only of some engines."""
        pool = self._pool_of(name)
        is_mixed = any(one.health is Health.UP and one.version != pool.version for one in pool.members.values())
        return None if name in self._updates or is_mixed else pool.version

    def has(self, name: str) -> bool:
        pool = self._pools.get(name)
        return pool is not None and (bool(pool.members) or pool.is_named or name in self._updates)

    def _known_pool(self, name: str) -> EnginePool:
        if not self.has(name):
            raise NotFound(
                f"there is no policy {name!r}: no engine serves it",
                remedy="`rollyard policies list` shows the policies that engines serve.",
            )
        return self._pools[name]

    # --- pause

    async def pause(
        self,
        name: str,
        *,
        holder: str,
        mode: PauseMode = PauseMode.ABORT,
        lease_s: float = LEASE_S,
        engines: Sequence[str] | None = None,
        wait_s: float | None = None,
        after: int | None = None,
    ) -> PolicyStatus:
        """Returns when the engines are paused, or after `wait_s`; the state is then still pausing, and repeating the
        call continues to wait. Raises PolicyConflict while another holder has the pause, if another caller resumed the
        policy meanwhile, or if its version is not `after`; PolicyPinned while an evaluation needs the current weights
        and an engine may serve them. The lease does not run during this call, since its holder is waiting."""
        pool = self._known_pool(name)
        update = await self._settled(name)
        while update is None and self.pins.blocking(name):
            wait_s = await self.pins.free(name, wait_s)
            update = await self._settled(name)
        members = chosen(pool, engines)
        check_holder(pool, update, holder)
        check_version(pool, after)
        if update is None:
            update = self._updates[name] = Update(holder, mode, None if engines is None else set(engines))
        elif update.ids is not None:
            update.ids = None if engines is None else update.ids | set(engines)
        update.holder, update.mode, update.is_started = holder, mode, False
        pool.is_paused = update.ids is None
        pool.rebound()
        pool.moved()
        for member in members:
            member.pause(mode, is_leaving=mode is PauseMode.ABORT and update.ids is not None)
            going = update.tasks.get(member)
            if going is not None and not going.done() and mode is not PauseMode.DRAIN:
                member.cut(is_sparing=mode is PauseMode.KEEP)  # the earlier pause drains and takes too long
        self._arm(pool, update, lease_s)
        await self._save(self._record(pool, update))
        if self._holds(name, update):
            for member in members:
                if member not in update.tasks and member.health is not Health.GONE:
                    work = pause_engine(member, mode, self._settings, self._followed)
                    update.tasks[member] = asyncio.create_task(work, name=f"pause {member.id}")
            update.is_started = True
            if tasks := [task for task in update.tasks.values() if not task.done()]:
                self._disarm(update)
                try:
                    await asyncio.wait(tasks, timeout=wait_s)
                finally:
                    if self._holds(name, update):
                        self._arm(pool, update, lease_s)
        is_same_update = await self._settled(name) is update and update.holder == holder
        if not is_same_update or not all(member.is_paused for member in members):
            raise PolicyConflict(f"policy {name!r} was resumed by another caller while it was being paused")
        return self.status(name)

    def _holds(self, name: str, update: Update) -> bool:
        return self._updates.get(name) is update and update.resuming is None

    # --- lease

    async def renew(self, name: str, *, holder: str, lease_s: float) -> PolicyStatus:
        """Renews the lease, also of an abandoned pause. Raises PolicyConflict if `holder` does not hold it."""
        pool = self._known_pool(name)
        update = self._updates.get(name)
        if update is None:
            raise PolicyConflict(f"policy {name!r} is running: there is no pause to renew")
        if update.holder != holder:
            raise holder_conflict(pool, update)
        if update.resuming is None:
            self._arm(pool, update, lease_s)
            await self._save(self._record(pool, update))
        return self.status(name)

    def _arm(self, pool: EnginePool, update: Update, lease_s: float) -> None:
        self._disarm(update)
        loop = asyncio.get_running_loop()
        update.lease_s, update.ends_at = lease_s, loop.time() + lease_s
        update.timer = loop.call_later(lease_s, self._expire, pool, update)
        update.is_abandoned = False
        for member in update.turned:
            if member.health is Health.QUARANTINED and member.is_probed:
                member.stats.set_error("")
                member.set_health(Health.UP)
        update.turned.clear()

    def _disarm(self, update: Update) -> None:
        if update.timer is not None:
            update.timer.cancel()
            update.timer = None

    def _expire(self, pool: EnginePool, update: Update) -> None:
        update.timer = None
        update.is_abandoned = True
        for member in pool.members.values():
            if update.covers(member.id) and member.health is Health.UP:
                update.turned.add(member)
                member.quarantine(ABANDONED)
                if update.ids is not None:
                    member.cut(is_sparing=False)  # the other engines run, so its kept calls can continue there
        log.error(
            "a weight update was abandoned: its engines stay paused until a resume names a version",
            extra={"policy": pool.name, "holder": update.holder, "lease_s": update.lease_s},
        )

    # --- resume

    async def resume(
        self,
        name: str,
        version: int,
        *,
        holder: str | None = None,
        engines: Sequence[str] | None = None,
        after: int | None = None,
    ) -> PolicyStatus:
        """Resumes the paused and quarantined engines, or those given, with weights of this version. Raises PolicyStuck
        if no engine can be resumed; PolicyConflict while another than `holder` has the pause (None: any holder may), or
        if the policy is neither at this version nor at `after`.

        If the policy is not paused, only sets the version: calls in flight are cut, and continue afterwards."""
        pool = self._known_pool(name)
        update = await self._settled(name)
        if holder is not None:
            check_holder(pool, update, holder)
        if pool.version != version:
            check_version(pool, after)
        members = chosen(pool, engines)
        if engines is None and update is None:
            # before a version was named, an engine counts as version 0 without having been given it
            has_version = pool.is_named
            members = [one for one in members if not (has_version and one.is_usable and one.version == version)]
            if not members and pool.is_named and pool.version == version and pool.members:
                return self.status(name)  # a repeated call
        elif engines is None and update is not None and update.ids is not None:
            members = [member for member in members if member.is_paused or member.health is Health.QUARANTINED]
        if update is None:
            update = self._updates[name] = Update("", PauseMode.ABORT, {member.id for member in members})
        self._disarm(update)
        for member in members:
            member.pause(is_leaving=member.is_leaving)
        task = asyncio.create_task(self._resuming(pool, update, members, version), name=f"resume {name}")
        update.resuming = task
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())  # its caller may be gone
        await asyncio.shield(task)
        return self.status(name)

    async def _resuming(self, pool: EnginePool, update: Update, members: Sequence[PoolMember], version: int) -> None:
        try:
            await self._resume_all(pool, update, members, version)
        except BaseException:
            if update.holder and not update.is_abandoned:
                self._arm(pool, update, update.lease_s)
            else:
                update.is_abandoned = True
            raise
        finally:
            update.resuming = None

    async def _resume_all(self, pool: EnginePool, update: Update, members: Sequence[PoolMember], version: int) -> None:
        pausing = [update.tasks.pop(member) for member in members if member in update.tasks]
        for task in pausing:
            task.cancel()
        if pausing:
            await asyncio.wait(pausing)
        for member in members:
            member.expect(version)
        is_sparing = update.mode is PauseMode.KEEP
        await all_of([ended for member in members for ended in member.cut(is_sparing=is_sparing)])
        await self._followed()
        errors = await asyncio.gather(
            *(renew_engine(member, version, self._settings, self._revive) for member in members)
        )
        fresh = [member for member, error in zip(members, errors, strict=True) if error is None]
        for member, error in zip(members, errors, strict=True):
            update.turned.discard(member)
            if error is not None:
                member.next_version = None
                member.quarantine(error)
                member.cut(is_sparing=False)  # its kept calls continue on other engines, or wait as all others do
        if members and not fresh:
            await self._save(self._record(pool, update))
            raise PolicyStuck(
                f"no engine of policy {pool.name!r} could be resumed: "
                + "; ".join(f"{member.id}: {error}" for member, error in zip(members, errors, strict=True)),
                engines={member.id: error for member, error in zip(members, errors, strict=True)},
            )
        is_new = bool(members) or not update.ids  # otherwise its engines were removed, and no engine has these weights
        if is_new:
            pool.version, pool.is_named = version, True
        for member in fresh:
            member.has(version)
            member.is_joined = True
            self._known.pop((pool.name, member.id), None)
        for (name, engine_id), known in self._known.items():
            if name == pool.name and engine_id not in pool.members and update.covers(engine_id):
                self._known[name, engine_id] = replace(known, error=known.error or REMOVED_WHILE_PAUSED)
        paused_ids = still_paused(pool, update, members)
        if paused_ids:
            update.ids = paused_ids
        await self._save(self._record(pool, update if paused_ids else None, fresh))
        # no await from here on: the next pause must find the gates consistent
        pool.is_paused = False
        if not paused_ids:
            del self._updates[pool.name]
        elif update.holder and not update.is_abandoned:
            self._arm(pool, update, update.lease_s)
        for member in fresh:
            if member.health is not Health.GONE:
                member.set_health(Health.UP)
                member.unpause()
        pool.wake()
        extra = {"policy": pool.name, "version": pool.version, "engines": len(fresh)}
        log.info(
            "a policy has new weights" if is_new else "a policy continues without the engines to update", extra=extra
        )
        self.notify_listeners(pool.name, pool.version)

    def notify_listeners(self, name: str, version: int) -> None:
        """Calls the listeners for new versions."""
        for listener in self.on_version:
            try:
                listener(name, version)
            except Exception:  # the weights have changed, whether or not a listener fails
                log.exception("a listener for versions failed", extra={"policy": name})

    # --- engines that are added or removed

    def is_waiting(self, member: PoolMember) -> bool:
        """Whether the engine was paused or quarantined when saved: it may be unable to sample before a resume."""
        known = self._known.get((member.pool.name, member.id))
        update = self._updates.get(member.pool.name)
        return known is not None and (known.error is not None or (update is not None and update.covers(member.id)))

    async def admit_engine(self, member: PoolMember) -> None:
        """Admits an engine that answers, for the first time or again: it takes calls, waits for its policy, or is
        quarantined."""
        pool = member.pool
        if member.engine.spec.role is Role.JUDGE:
            member.is_joined = True
            member.set_health(Health.UP)
            return
        while True:
            update, version = await self._settled(pool.name), pool.version
            if member.health in (Health.GONE, Health.QUARANTINED) or member.is_usable:
                return
            is_covered = pool.is_paused or (update is not None and update.covers(member.id))
            if is_covered:
                member.pause()
            known = self._known.get((pool.name, member.id))
            is_new = known is None and not member.is_joined
            if not member.is_joined:
                member.version = known.version if known is not None else version
                member.started = known.started if known is not None else None
            error = known.error if known is not None else None
            if error is None:
                is_to_pause = is_covered and update is not None  # otherwise the caller of Router.pause controls it
                if is_to_pause and not is_new:  # calls from before it, or this service, was away may still run
                    await all_of(member.cut(is_sparing=False))
                    await self._followed()
                if not is_covered or is_to_pause:
                    error = await prepare_engine(member, self._settings, is_to_pause=is_to_pause, is_new=is_new)
            if update is self._updates.get(pool.name) and version == pool.version and not (update and update.resuming):
                break  # nothing changed meanwhile
        if member.health in (Health.GONE, Health.QUARANTINED):
            return
        self._known.pop((pool.name, member.id), None)
        member.is_joined = True
        if not is_covered and member.is_paused:
            member.unpause()
        if error is not None:
            member.quarantine(error)
        elif is_covered and update is not None and update.is_abandoned:
            update.turned.add(member)
            member.quarantine(ABANDONED)
        else:
            member.set_health(Health.UP)

    def forget(self, member: PoolMember) -> None:
        """Called when an engine is removed. If it may be paused, this is recorded: if it is added again, it cannot be
        probed, and waits for a resume."""
        name, update = member.pool.name, self._updates.get(member.pool.name)
        self._known.pop((name, member.id), None)
        if member.is_pause_accepted or (update is not None and update.covers(member.id)):
            self._known[name, member.id] = PolicyEngine(member.id, member.version, error=REMOVED_WHILE_PAUSED)
        if update is not None:
            update.turned.discard(member)
            if (pausing := update.tasks.pop(member, None)) is not None:
                pausing.cancel()

    # --- internal

    async def _settled(self, name: str) -> Update | None:
        """The current update, after waiting for a resume to end."""
        while (update := self._updates.get(name)) is not None and update.resuming is not None:
            await asyncio.wait({update.resuming})
        return update

    def _record(self, pool: EnginePool, update: Update | None, fresh: Sequence[PoolMember] = ()) -> PolicyRecord:
        absent = [engine for (name, _), engine in self._known.items() if name == pool.name]
        return record_of(pool, update, absent, fresh)

    async def _save(self, record: PolicyRecord) -> None:
        if self.save is not None:
            await self.save(record)
