"""Runs rollouts in this process.

INIT admits a rollout when INIT has a free slot, the budget of live rollouts has room, and the READY buffer can take it:
so a slow EVAL slows admission and never a running rollout, and RUN finds prepared sandboxes waiting. Admission skips
runs whose policy's engines are full. Only some of their rollouts wait in READY for a seat, and these do not count
against the buffer, so that one policy's rollouts never keep another's from RUN.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from rollyard.core import Rollout, Run, State
from rollyard.core.failure import NotFound
from rollyard.pipeline.pipeline import Pipeline
from rollyard.store.base import QueuedRow


class LocalExecutor:
    """Starts queued rollouts as attempts of this process."""

    fixed_pools = ""
    remote = 0

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def open(self) -> Sequence[asyncio.Task[None]]:
        return ()

    def queued(self, rollout: Rollout) -> None:
        pass

    def cancelled(self, rollout_id: str, detail: str) -> None:
        pass  # its attempt finds the cancel in the store

    def add_pools(self, pools: dict[str, dict[str, int]]) -> None:
        pass

    def start_queued(self) -> None:
        pipeline = self._pipeline
        while not pipeline.is_draining and self._has_room():
            row = pipeline.scheduler.pop(time.monotonic(), self._may_go)
            if row is None:
                break
            pipeline.init_pool.try_acquire()
            pipeline.starting[row.id] = row.run
            run = pipeline.run_of(row.run)
            if run is not None:
                pipeline.admitted(run.policy)
            pipeline.spawn(partial(self._start, row, run, next(pipeline.admissions)), row)

    def _has_room(self) -> bool:
        pipeline = self._pipeline
        return (
            pipeline.init_pool.free > 0
            and pipeline.places_free > pipeline.rescoring.needed_places
            and pipeline.init_pool.active + pipeline.ready - pipeline.unseated
            < pipeline.ready_slots + pipeline.run_pool.free
        )

    def _may_go(self, run_id: str) -> bool:
        """Whether a rollout of this run would find a seat or a place among those that wait for one. These places are
        READY's size, at most half of the budget, shared by the policies with admitted rollouts that have no seat
        yet."""
        pipeline = self._pipeline
        run = pipeline.run_of(run_id)
        if run is None or (free := pipeline.resources.router.seats(run.policy).free) is None:
            return True
        may_wait = max(1, min(pipeline.ready_slots, pipeline.max_live // 2) // max(1, len(pipeline.ahead)))
        return pipeline.ahead.get(run.policy, 0) < free + may_wait

    async def _start(self, row: QueuedRow, run: Run | None, order: int) -> None:
        """Moves a rollout from the queue into INIT, unless its state has changed meanwhile."""
        pipeline = self._pipeline
        rollout: Rollout | None = None
        try:
            with suppress(NotFound):
                rollout = await pipeline.store.get(row.id)
            if rollout is not None and rollout.state is State.ENDED:
                pipeline.publish(rollout)  # cancelled after it left the queue
        finally:
            pipeline.starting.pop(row.id, None)
            may_start = rollout is not None and rollout.state is State.QUEUED and not pipeline.is_draining
            may_start = may_start and pipeline.run_of(row.run) is not None
            if not may_start or run is None:
                if run is not None:
                    pipeline.seated(run.policy)
                pipeline.init_pool.release()
                pipeline.scheduler.release(row.run)
                pipeline.notify()  # a drain may be waiting for this
        if may_start and rollout is not None and run is not None:
            await pipeline.run_attempt(rollout, run, order, pipeline.queued_s(row, rollout))
