"""The pipeline: queues rollouts, has them run by its executor when there is room, and reports its state.

The executor starts queued rollouts: in this process (`local_executor.py`), or on the nodes of a fleet (`fleet/`).

Invariants. Everything accepted is durable first. A live rollout is exactly one `LiveRollout`: an `Attempt` in one task
of this process, or a lease of one node. The process may die at any instant: the store's recovery restores a consistent
state. This file is long because it is the one interface to all rollouts of a service.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from types import TracebackType

from rollyard.core import Ending, Outcome, Position, Rollout, Run, State, WorkClock
from rollyard.core.access import Quota
from rollyard.core.failure import (
    Cancelled,
    Draining,
    InternalError,
    InvalidRequest,
    NotFound,
    QueueFull,
    QuotaExceeded,
    Stalled,
)
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import Tracer
from rollyard.pipeline.attempts.attempt import Attempt
from rollyard.pipeline.base import Executor, LiveRollout, Shutdown
from rollyard.pipeline.cancellation import Cancellation
from rollyard.pipeline.event_log import EventLog
from rollyard.pipeline.rescoring import Rescoring
from rollyard.pipeline.resources import StageResources
from rollyard.pipeline.scheduler import Scheduler
from rollyard.pipeline.settings import PipelineSettings
from rollyard.pipeline.worker_pool import WorkerPool
from rollyard.store.base import QueuedRow, Retention, Store, StoreUnusable, Submission, SweepResult

log = logging.getLogger("rollyard.pipeline")

SWEEP_EVERY_S = 60.0

LEAVINGS = 64
"""Rollouts whose artifacts are deleted between two checks of whether their ids are in use again."""


class Pipeline:
    """Runs rollouts. Entering the context recovers what an earlier process left; leaving it gives back what is live."""

    def __init__(
        self,
        store: Store,
        resources: StageResources,
        settings: PipelineSettings,
        executor: Callable[[Pipeline], Executor],
        *,
        metrics: Metrics,
        tracer: Tracer,
    ) -> None:
        self.store = store
        self.resources = resources
        self.settings = settings
        self.metrics = metrics
        self.tracer = tracer
        self.clock = WorkClock()
        self._opened, self._opened_at = time.monotonic(), time.time()
        self.event_log = EventLog(store.epoch)
        self.scheduler = Scheduler()
        self.init_pool = WorkerPool("init", settings.init_slots, self.wake)
        self.run_pool = WorkerPool("run", settings.run_slots, self.wake)
        self.eval_pool = WorkerPool("eval", settings.eval_slots, self.wake)
        self.ready_slots = settings.ready_slots
        self.ready = 0
        self.unseated = 0  # those in READY that wait for a seat at their policy
        self.ahead: dict[str, int] = {}  # by policy: admitted rollouts that have no seat yet
        self.is_draining = False
        self.live: dict[str, LiveRollout] = {}
        self.quarantined = 0  # places lost to sandboxes that could not be proven gone
        self.admissions = count()  # numbers rollouts as they leave the queue: the order within RUN and EVAL
        self.starting: dict[str, str] = {}  # run ids of rollouts that have left the queue and are not live yet
        self._arriving = 0  # rollouts being stored or waiting to be rescored, whose places in the queue are taken
        self._arriving_by: Counter[str] = Counter()  # by owner
        self._arriving_in: Counter[str] = Counter()  # by run
        self._creating_in: Counter[str] = Counter()  # by run: calls that create something in it
        self.overfull: set[str] = set()  # owners that have used up their storage quota
        self.quota_of: Callable[[str], Quota] = lambda _: Quota()  # by owner
        self.rescoring = Rescoring(self)
        self.cancelling = Cancellation(self)
        self._max_live = settings.max_live
        self._runs: dict[str, Run] = {}
        self._tasks = asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self.on_end: list[Callable[[Rollout], None]] = []  # called with every terminal record, after its commit
        self.on_swept: list[Callable[[SweepResult], None]] = []  # called with what retention has deleted
        self.on_deleted: list[Callable[[Run], Awaitable[None]]] = []  # called with each deleted run; its name is taken
        self.on_room: list[Callable[[], None]] = []  # called after everything that may free a place
        self.broken: StoreUnusable | None = None
        self.broke = asyncio.Event()  # the store is unusable: the process should end
        self._is_awake = False
        self._timer: asyncio.TimerHandle | None = None
        self.executor = executor(self)

    # --- lifecycle ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Pipeline:
        await self._tasks.__aenter__()
        self.clock.start()
        for run in await self.store.list_runs():
            self.register_run(run)
        self.cancelling.deleting.update(await self.store.deleting_runs())
        for row in await self.store.queued():
            self.scheduler.push(row)
        for rollout_id in self.store.recovered.evals:
            rollout = await self.store.get(rollout_id)
            self.scheduler.adopt(rollout.run)
            self.spawn(partial(self.run_attempt, rollout, self._runs[rollout.run], next(self.admissions)))
        self._loops = [self.spawn(self._tick, is_vital=True), self.spawn(self._sweep, is_vital=True)]
        self._loops += await self.executor.open()
        self.wake()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_now()
        self.clock.stop()
        for loop in self._loops:
            loop.cancel()
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def drain(self, within_s: float | None = None) -> None:
        """Stops admission, gives back what has not started RUN, and waits for the rest, at most `within_s`."""
        self.is_draining = True
        for attempt in list(self.live.values()):
            if attempt.state in (State.QUEUED, State.INIT, State.READY):
                attempt.stop(Shutdown())
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_s if within_s is None else within_s):
                while self.live_here or self.starting:
                    await self.changed()

    def stop_now(self) -> None:
        """Gives back everything that is live; each attempt still proves its sandbox gone."""
        self.is_draining = True
        for attempt in list(self.live.values()):
            attempt.stop(Shutdown())

    # --- called by clients ----------------------------------------------------------------------------

    def register_run(self, run: Run) -> None:
        """Applies a run that the store has: its quotas, and those of its owner. It replaces an older record of it."""
        is_new = run.id not in self._runs
        self._runs[run.id] = run
        if is_new:
            self.event_log.run_created(run.id)
        self.scheduler.set_quota(run)
        self.scheduler.set_owner(run.owner, self.quota_of(run.owner).live)

    def quota_changed(self, owner: str) -> None:
        """Applies what `quota_of` now returns for this owner."""
        self.scheduler.set_owner(owner, self.quota_of(owner).live)
        self.wake()

    def run_of(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    @property
    def runs(self) -> Collection[Run]:
        return self._runs.values()

    @contextmanager
    def creating_in(self, run: Run) -> Generator[None, None, None]:
        """Ensures that what a call creates is not stored in a later run of that name, perhaps of another owner: a
        deletion waits for the call. Raises `NotFound` if the run is being deleted, or has been since it was read."""
        known = self._runs.get(run.id)
        if run.id in self.cancelling.deleting:
            raise NotFound(f"run {run.id!r} is being deleted")
        if known is None or (known.owner, known.created_at) != (run.owner, run.created_at):
            raise NotFound(f"there is no run {run.id!r}: it was deleted during this call")
        self._creating_in[run.id] += 1
        try:
            yield
        finally:
            self._creating_in[run.id] -= 1
            if not self._creating_in[run.id]:
                del self._creating_in[run.id]
                self.notify()

    def is_created_in(self, run_id: str) -> bool:
        """Whether a call creates something in that run."""
        return run_id in self._creating_in

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[Rollout]:
        """Stores and queues rollouts; they are durable when it returns. The caller has checked the tasks."""
        with self.arriving(len(submissions), submissions[0].rollout.run if submissions else ""):
            stored = await self.store.submit(submissions)
        self.enqueue(stored)
        return stored

    @contextmanager
    def arriving(self, count: int, run_id: str) -> Generator[None, None, None]:
        """Reserves places in the queue: for `count` new rollouts of a run while they are being stored, or for one that
        waits to be rescored. Raises `Draining`, `QueueFull` or `QuotaExceeded`."""
        if self.is_draining:
            raise Draining("the service is shutting down")
        if count > self.room:
            raise QueueFull(f"{count} rollouts do not fit: the queue has room for {max(0, self.room)}")
        if count > (room := self.room_of(run_id)):
            if self._owner_of(run_id) in self.overfull:
                raise QuotaExceeded(
                    "the token's storage quota is used up: acknowledge the records that you have, or delete a run"
                )
            raise QuotaExceeded(
                f"{count} rollouts do not fit: the quota of the token or run has room for {max(0, room)} in the queue"
            )
        owner = self._owner_of(run_id)
        self._arriving += count
        self._arriving_by[owner] += count
        self._arriving_in[run_id] += count
        try:
            yield
        finally:
            self._arriving -= count
            self._arriving_by[owner] -= count
            self._arriving_in[run_id] -= count
            if not self._arriving_in[run_id]:
                del self._arriving_in[run_id]  # the number of runs over time has no bound

    @property
    def room(self) -> int:
        """Rollouts that the queue can take."""
        return self.settings.max_queued - len(self.scheduler) - self._arriving

    def room_of(self, run_id: str) -> int:
        """Rollouts of that run that the queue can take."""
        owner = self._owner_of(run_id)
        if owner in self.overfull:
            return 0
        room, run = self.room, self._runs.get(run_id)
        if (most := self.quota_of(owner).queued) is not None:
            room = min(room, most - self.scheduler.queued_by(owner) - self._arriving_by[owner])
        if run is not None and run.max_queued is not None:
            room = min(room, run.max_queued - self.scheduler.queued_of(run_id) - self._arriving_in[run_id])
        return room

    def _owner_of(self, run_id: str) -> str:
        run = self._runs.get(run_id)
        return run.owner if run is not None else ""

    def enqueue(self, stored: Sequence[Rollout], waited_s: float = 0.0) -> None:
        """Queues rollouts that were stored now or earlier; known ones are skipped. `waited_s` is the time spent in
        another queue before this one."""
        for rollout in stored:
            if rollout.state is State.QUEUED and not self.has(rollout.id):
                self.executor.queued(rollout)
                self.queue(_row(rollout, waited_s))
                self.event_log.publish(rollout)
            elif rollout.state is State.ENDED:
                self.event_log.publish(rollout)
                self._notify_end(rollout)
        self.wake()

    def has(self, rollout_id: str) -> bool:
        """Whether the rollout is queued, being started or live."""
        return rollout_id in self.scheduler or rollout_id in self.starting or rollout_id in self.live

    async def cancel(
        self, rollout_id: str, detail: str = "cancelled by the client", *, run: str | None = None
    ) -> Rollout | None:
        """Cancels a rollout. Durable when it returns; a live attempt ends soon after. Returns None if the rollout is
        not stored; if the client named its `run`, the cancel is kept for its submit."""
        was_queued = self.scheduler.remove(rollout_id)
        rollout = await self.store.request_cancel(rollout_id, detail, run=run)
        if rollout is not None and rollout.state is State.ENDED:
            was_queued |= self.scheduler.remove(rollout_id)  # it was submitted or requeued in between
        attempt = self.live.get(rollout_id)
        if attempt is not None:
            attempt.stop(Cancelled(detail))
        elif was_queued and rollout is not None and rollout.state is State.ENDED:
            self.publish(rollout)  # the executor publishes one that is being started
        elif rollout is not None and rollout.state is not State.ENDED and rollout_id in self.starting:
            self.executor.cancelled(rollout_id, detail)
        return rollout

    async def wait(self, rollout_id: str, within_s: float) -> Rollout:
        """Returns the record when the rollout has ended or `within_s` is over."""
        end = self.event_log.end_of(rollout_id)
        rollout = await self.store.get(rollout_id)
        if rollout.state is State.ENDED or within_s <= 0:
            return rollout
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(end), within_s)
        return await self.store.get(rollout_id)

    def cancel_later(self, ids: Sequence[str], detail: str) -> None:
        """Cancels rollouts in the background."""
        self.spawn(partial(self.cancelling.cancel_many, list(ids), detail))

    async def delete_run(self, run_id: str) -> None:
        """Completes `cancelling.begin_deletion`: cancels what has not ended, waits for it, and deletes the run."""
        run = self._runs.get(run_id)
        await self.cancelling.delete(run_id)
        try:
            await self._forget_run(run_id, run)
        finally:
            self.cancelling.deleting.discard(run_id)

    async def rescore(self, rollout_id: str) -> Rollout:
        """Evaluates saved artifacts again. The terminal record does not change; the new score is appended. Raises as
        `arriving` does: until it starts, it takes a place in the queue."""
        return await self.rescoring.rescore(rollout_id)

    def queued_of(self, run_id: str) -> int:
        """The run's rollouts that have not started. With its live rollouts, each rollout is counted exactly once."""
        return self.scheduler.queued_of(run_id) + sum(run == run_id for run in self.starting.values())

    @property
    def live_here(self) -> int:
        """Live rollouts in this process."""
        return len(self.live) - self.executor.remote

    @property
    def places_free(self) -> int:
        """Free places in the budget of live rollouts."""
        return self.max_live - self.live_here - len(self.starting) - self.quarantined - self.rescoring.active

    async def changed(self) -> None:
        """Waits until a place may have become free."""
        self._idle.clear()
        await self._idle.wait()

    def notify(self) -> None:
        """Wakes those that wait in `changed`."""
        self._idle.set()

    def on_place_freed(self) -> None:
        """Called when a place became free or the budget may have grown."""
        self.notify()
        self.wake()

    def resize(self, sizes: Mapping[str, int]) -> None:
        """Sets pool sizes; init, run, eval, ready and live are each optional."""
        if self.executor.fixed_pools:
            raise InvalidRequest(self.executor.fixed_pools)
        for name, size in sizes.items():
            if size < 0:
                raise InvalidRequest(f"pool {name}: a size is 0 or more, not {size}")
        for pool in (self.init_pool, self.run_pool, self.eval_pool):
            if pool.name in sizes:
                pool.resize(sizes[pool.name])
        self.ready_slots = sizes.get("ready", self.ready_slots)
        self._max_live = sizes.get("live", self._max_live)
        self.on_place_freed()

    @property
    def max_live(self) -> int:
        if self._max_live is not None:
            return self._max_live
        return self.init_pool.size + self.ready_slots + self.run_pool.size + self.eval_pool.size

    def pools(self) -> dict[str, dict[str, int]]:
        """Returns the size and use of each pool."""
        pools = {
            pool.name: {"size": pool.size, "active": pool.active, "waiting": pool.waiting}
            for pool in (self.init_pool, self.run_pool, self.eval_pool)
        }
        pools["ready"] = {"size": self.ready_slots, "active": self.ready, "waiting": self.unseated}
        pools["live"] = {
            "size": self.max_live,
            "active": self.live_here + self.rescoring.active,
            "waiting": self.rescoring.waiting,
            "quarantined": self.quarantined,
        }
        pools["queue"] = {"size": self.settings.max_queued, "active": len(self.scheduler), "waiting": 0}
        self.executor.add_pools(pools)
        return pools

    # --- called by attempts ---------------------------------------------------------------------------

    def publish(self, rollout: Rollout) -> None:
        self.event_log.publish(rollout)
        if rollout.ending is not None:
            self.metrics.rollout_ended(rollout)
            self._notify_end(rollout)

    def _notify_end(self, rollout: Rollout) -> None:
        for listener in self.on_end:
            listener(rollout)

    def requeued(self, rollout: Rollout, delay_s: float) -> None:
        self.metrics.attempt_lost(rollout.lost[-1])
        if not self.is_draining:
            self.queue(_row(rollout), delay_s)

    def queue(self, row: QueuedRow, delay_s: float = 0.0) -> None:
        """Queues a rollout that the store has as queued. If its run is being deleted, the deletion ends it there."""
        if row.run not in self.cancelling.deleting:
            self.scheduler.push(row, time.monotonic() + delay_s if delay_s else 0.0)

    def wake(self) -> None:
        """Schedules an admission pass; calls made before it runs share it."""
        if not self._is_awake:
            self._is_awake = True
            asyncio.get_running_loop().call_soon(self._admit)

    # --- called by the executor -----------------------------------------------------------------------

    def _admit(self) -> None:
        self._is_awake = False
        self.rescoring.start_next()
        self.executor.start_queued()
        due = self.scheduler.next_due()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None and not self.is_draining:
            delay = max(0.0, due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay + 0.001, self.wake)
        for listener in self.on_room:
            listener()

    def admitted(self, policy: str) -> None:
        """Counts a rollout that leaves the queue and has no seat yet; `seated` is called once for each."""
        self.ahead[policy] = self.ahead.get(policy, 0) + 1

    def seated(self, policy: str) -> None:
        remaining = self.ahead.get(policy, 0) - 1
        if remaining > 0:
            self.ahead[policy] = remaining
        else:
            self.ahead.pop(policy, None)
        self.wake()

    def queued_s(self, row: QueuedRow, rollout: Rollout) -> float:
        """Returns how long the rollout has been queued. Time in an earlier process's queue is measured by the wall
        clock, up to this process's start."""
        now = time.monotonic()
        if row.since is not None:
            return now - row.since
        return max(0.0, self._opened_at - rollout.updated_at) + now - self._opened

    async def run_attempt(self, rollout: Rollout, run: Run, order: int, queued_s: float = 0.0) -> None:
        """Runs an attempt in this process, to its end. It holds an INIT slot, unless it resumes in EVAL. In each stage,
        attempts of the same priority are served in the order of their admission."""
        attempt = Attempt(self, rollout, run, order, queued_s)
        self.live[attempt.rollout.id] = attempt
        if self.is_draining:  # a drain that started meanwhile did not stop this attempt
            attempt.stop(Shutdown())
        try:
            await attempt.main()
        finally:
            del self.live[attempt.rollout.id]
            if not attempt.is_seated:
                self.seated(attempt.run.policy)
            self.scheduler.release(attempt.rollout.run)
            self.quarantined += attempt.quarantined
            self.on_place_freed()

    def spawn(
        self,
        work: Callable[[], Coroutine[object, object, None]],
        row: QueuedRow | None = None,
        *,
        is_vital: bool = False,
    ) -> asyncio.Task[None]:
        """Runs `work` in a task of the pipeline. An unexpected error is logged and ends the rollout of `row`, if given.
        In vital work, without which the pipeline cannot continue, it ends the service."""
        return self._tasks.create_task(self._guarded(work, row, is_vital))

    async def _guarded(
        self, work: Callable[[], Coroutine[object, object, None]], row: QueuedRow | None, is_vital: bool
    ) -> None:
        """A broken store ends everything that is live, once and with one reason, not as a failure of each."""
        try:
            try:
                await work()  # called here: a task cancelled before its first step leaves no unawaited coroutine
            except StoreUnusable:
                raise
            except Exception as error:
                if is_vital:
                    raise
                if row is not None:
                    await self.give_up(row, error)
                else:
                    log.exception("a task of the pipeline failed")
        except StoreUnusable as error:
            if self.broken is None:
                log.critical("the store is unusable", extra={"reason": str(error)})
                self.broken = error
                self.stop_now()
                self.broke.set()

    async def give_up(self, row: QueuedRow, error: Exception) -> None:
        """Ends a rollout that could not be started."""
        log.error("a rollout could not be started", exc_info=error, extra={"rollout": row.id})
        failure = InternalError(f"{type(error).__name__}: {error}").failure(State.QUEUED)
        try:
            at = Position(State.QUEUED, row.attempt)
            self.publish(await self.store.end(row.id, at, Ending(Outcome.FAILED, failure=failure)))
        except StoreUnusable:
            raise
        except Exception:  # its state changed meanwhile, or it cannot be read back
            log.exception("a rollout that could not be started could not be ended", extra={"rollout": row.id})

    # --- background loops -----------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Renews leases, stops attempts without progress for longer than their stall bound, and checks the store."""
        while True:
            await asyncio.sleep(self.settings.tick_s)
            if self.store.broken is not None:
                raise StoreUnusable(self.store.broken)
            now = self.clock()
            self.rescoring.tick()
            for attempt in list(self.live.values()):
                idle_s = attempt.tick(now)
                bound_s = attempt.rollout.task.limits.stall_s
                if idle_s is not None and idle_s > bound_s:
                    attempt.stop(Stalled(f"no progress in {attempt.state} for {idle_s:.1f} s (bound: {bound_s:g} s)"))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            await self.sweep()

    async def sweep(self) -> None:
        """Deletes what retention no longer keeps: rows, then the artifacts of deleted or acknowledged rollouts."""
        runs_before = dict(self._runs)
        swept = await self.store.sweep(Retention(self.settings.retain_s))
        for run_id in swept.runs:
            await self._forget_run(run_id, runs_before.get(run_id))
        for listener in self.on_swept:
            listener(swept)
        for start in range(0, len(swept.rollouts), LEAVINGS):
            few = swept.rollouts[start : start + LEAVINGS]
            for rollout_id in await self.store.leavings_among(few):
                await self.resources.artifacts.delete(rollout_id)
            # At once: an id may be submitted and deleted again before the next sweep, with other files.
            await self.store.forget_leavings(few)

    async def _forget_run(self, run_id: str, run: Run | None) -> None:
        """Forgets a run that the store has deleted, unless its owner has created it again meanwhile. Until it returns,
        no other token can take the name: a new run must find nothing of the old one."""
        self.event_log.forget_run(run_id)
        if run is not None:
            for call in self.on_deleted:
                await call(run)
        if self._runs.get(run_id) is run:
            self._runs.pop(run_id, None)
            self.scheduler.forget_run(run_id)
            if run is not None and all(one.policy != run.policy for one in self._runs.values()):
                self.resources.router.forget(run.policy)


def _row(rollout: Rollout, waited_s: float = 0.0) -> QueuedRow:
    since = time.monotonic() - waited_s
    return QueuedRow(rollout.id, rollout.run, rollout.priority, rollout.seq, rollout.attempt, since)
