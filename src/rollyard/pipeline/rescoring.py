"""Scores an ended rollout again from what was saved, without inference. The terminal record does not change.

Rescoring works like the EVAL of an attempt: it takes a slot of EVAL's pool and a place in the budget of live sandboxes,
and its sandbox is renewed and proven gone. Until it starts, it counts as a queued rollout of its run, then as a live
one, so that the quotas of its run and of its owner apply.

Invariants. Of those that wait, one at a time has the *turn* (another one only if its priority is higher): it waits for
an EVAL slot, behind the rollouts of its priority that wait for one already. The next turn is selected as the scheduler
selects rollouts. So attempts in EVAL wait for one rescoring at a time, and owners take turns. While it waits it holds
no place, except in one case: an EVAL slot was free and all places were taken. Then INIT leaves it the next place, and
it gives back the slot, which an attempt that holds a place may need.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager
from itertools import count
from typing import Protocol

from rollyard.core import Deadline, Json, Rollout, Run, Score, State, Trajectory
from rollyard.core.failure import Gone, InvalidRequest, NotFound, SandboxStuck
from rollyard.pipeline.attempts.evaluation import CheckKilled
from rollyard.pipeline.attempts.runner import StageRunner
from rollyard.pipeline.base import AttemptHost
from rollyard.pipeline.scheduler import Scheduler
from rollyard.store.base import QueuedRow

MOST_SCORES = 100
"""Later scores of one rollout: each is kept in its record, which every listing reads."""


class RescoringHost(AttemptHost, Protocol):
    """What `Rescoring` uses of the pipeline."""

    scheduler: Scheduler
    quarantined: int
    is_draining: bool

    @property
    def places_free(self) -> int: ...

    def arriving(self, count: int, run_id: str) -> AbstractContextManager[None]: ...

    def creating_in(self, run: Run) -> AbstractContextManager[None]: ...

    def run_of(self, run_id: str) -> Run | None: ...

    async def changed(self) -> None: ...

    def on_place_freed(self) -> None: ...


class Rescoring:
    """Rescores rollouts and keeps the leases of their sandboxes."""

    def __init__(self, pipeline: RescoringHost) -> None:
        self._pipeline = pipeline
        self._runners: set[StageRunner] = set()
        self._queue = Scheduler()  # those that wait for their turn
        self._turns: dict[str, asyncio.Event] = {}  # by their id in the queue
        self._ids = count()
        self._appending = asyncio.Lock()  # from checking the number of a rollout's scores to appending one
        self._started: list[int] = []  # the priorities of those that have the turn
        self.needed_places = 0  # those that have the turn and wait for a place
        self.active = 0  # rescorings with a place in the budget
        self.waiting = 0  # rescorings that wait for their turn, an EVAL slot or a place

    def tick(self) -> None:
        for runner in self._runners:
            runner.renew()

    async def rescore(self, rollout_id: str) -> Rollout:
        """Returns the record with the new score appended. Raises Gone, or InvalidRequest with the reason, if nothing
        can be scored; QueueFull or QuotaExceeded, if too much waits already."""
        pipeline = self._pipeline
        rollout = await pipeline.store.get(rollout_id)
        if rollout.state is not State.ENDED:
            raise InvalidRequest(f"rollout {rollout.id} has not ended yet")
        _check_scores(rollout)
        run = await pipeline.store.get_run(rollout.run)
        async with self._slot(rollout, run):
            trajectory, score = await self._score(rollout, run)
        if run.overlong_penalty is not None:
            score = run.overlong_penalty.applied(score, trajectory.sampled_tokens)
        entry: dict[str, Json] = {
            "at": time.time(),
            "reward": score.reward,
            "components": dict(score.components),
            "metrics": dict(score.metrics),
        }
        async with self._appending:
            return await self._append(rollout, run, entry)

    async def _append(self, rollout: Rollout, run: Run, entry: dict[str, Json]) -> Rollout:
        pipeline = self._pipeline
        with pipeline.creating_in(run):
            now = await pipeline.store.get(rollout.id)
            if now.seq != rollout.seq:
                raise NotFound(f"rollout {rollout.id} was deleted while it was scored")  # and another one has its id
            _check_scores(now)  # others may have been appended meanwhile
            return await pipeline.store.add_score(rollout.id, entry)

    async def _score(self, rollout: Rollout, run: Run) -> tuple[Trajectory, Score]:
        pipeline = self._pipeline
        trajectory = await self._saved(rollout)  # not before it starts: what waits stays small
        lease_s = pipeline.settings.lease_s
        runner = StageRunner(pipeline.resources, rollout, run, lease_s=lease_s, metrics=pipeline.metrics)

        async def evaluate(*, is_last: bool) -> Score:
            clock = Deadline(rollout.task.limits.eval_s, pipeline.clock)
            return await runner.evaluate(trajectory, clock, is_last=is_last)

        self._runners.add(runner)
        try:
            try:
                return trajectory, await evaluate(is_last=False)
            except CheckKilled:
                return trajectory, await evaluate(is_last=True)
        except SandboxStuck:
            pipeline.quarantined += 1
            raise
        finally:
            self._runners.remove(runner)

    async def _saved(self, rollout: Rollout) -> Trajectory:
        store = self._pipeline.store
        saved = await store.saved_run(rollout.id)
        if saved is None:
            if await store.trajectory(rollout.id) is None:
                raise Gone(f"rollout {rollout.id} has no saved trajectory to score")
            raise InvalidRequest(f"RUN of rollout {rollout.id} was cut short: there is nothing to score")
        trajectory, info = saved
        if info.get("is_sandbox_gone"):
            raise InvalidRequest(f"the agent of rollout {rollout.id} ended its own sandbox: there is nothing to score")
        if info.get("eval_mode") == "same":
            raise InvalidRequest(
                f"rollout {rollout.id} was scored on RUN's own files (eval mode `same`), which are gone: only what was"
                " scored from saved artifacts can be scored again"
            )
        return trajectory

    # --- waiting --------------------------------------------------------------------------------------

    def start_next(self) -> None:
        """Gives the turn to the next rescoring that the quotas of live rollouts allow, unless one has it."""
        pipeline = self._pipeline
        if pipeline.is_draining:
            return
        above = max(self._started, default=None)
        row = self._queue.pop(time.monotonic(), pipeline.scheduler.has_live_room, above=above)
        if row is not None:
            self._started.append(row.priority)
            pipeline.scheduler.adopt(row.run)
            self._turns[row.id].set()

    @asynccontextmanager
    async def _slot(self, rollout: Rollout, run: Run) -> AsyncGenerator[None, None]:
        """Waits for an EVAL slot and a place in the budget, and holds both."""
        pipeline = self._pipeline
        self.waiting += 1
        try:
            await self._turn(rollout, run)
            try:
                await self._acquire(rollout.priority)
            except BaseException:
                self._release(run)
                raise
            finally:
                self._started.remove(rollout.priority)
        finally:
            self.waiting -= 1
            pipeline.wake()
        try:
            yield
        finally:
            pipeline.eval_pool.release()
            self.active -= 1
            self._release(run)
            pipeline.on_place_freed()

    async def _turn(self, rollout: Rollout, run: Run) -> None:
        pipeline = self._pipeline
        number = next(self._ids)
        row = QueuedRow(str(number), run.id, rollout.priority, number, rollout.attempt)
        turn = asyncio.Event()
        with pipeline.arriving(1, run.id):
            self._turns[row.id] = turn
            self._queue.set_quota(run)
            self._queue.push(row)
            pipeline.wake()
            try:
                await turn.wait()
            except asyncio.CancelledError:
                self._queue.remove(row.id)
                if turn.is_set():
                    self._started.remove(rollout.priority)
                    self._release(run)
                else:
                    self._queue.forget_run(run.id)
                raise
            finally:
                del self._turns[row.id]

    async def _acquire(self, priority: int) -> None:
        pipeline, pool = self._pipeline, self._pipeline.eval_pool
        await pool.acquire(pool.last_rank(priority))
        if pipeline.places_free > 0:
            self.active += 1
            return
        pool.release()
        self.needed_places += 1
        try:
            while pipeline.places_free <= 0:
                await pipeline.changed()
            self.active += 1
        finally:
            self.needed_places -= 1
        try:
            await pool.acquire(pool.last_rank(priority))
        except BaseException:
            self.active -= 1
            pipeline.on_place_freed()
            raise

    def _release(self, run: Run) -> None:
        """Ends the counting of a rescoring as a live rollout."""
        pipeline = self._pipeline
        self._queue.release(run.id)
        self._queue.forget_run(run.id)
        pipeline.scheduler.release(run.id)
        if pipeline.run_of(run.id) is None:  # deleted meanwhile
            pipeline.scheduler.forget_run(run.id)


def _check_scores(rollout: Rollout) -> None:
    if len(rollout.scores) >= MOST_SCORES:
        raise InvalidRequest(f"rollout {rollout.id} already has {MOST_SCORES} later scores, which is the limit")
