"""Scores an ended rollout again from what was saved, without inference. The terminal record does not change.

Rescoring works like the EVAL of an attempt: it takes a slot of EVAL's pool and a place in the budget of live sandboxes
(before INIT does), and its sandbox is renewed and proven gone.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol

from rollyard.core import Deadline, Json, Rollout, Score, State, Trajectory
from rollyard.core.failure import Gone, InvalidRequest, NotFound, SandboxStuck
from rollyard.pipeline.attempts.evaluation import CheckKilled
from rollyard.pipeline.attempts.runner import StageRunner
from rollyard.pipeline.base import AttemptHost


class RescoringHost(AttemptHost, Protocol):
    """What `Rescoring` uses of the pipeline."""

    quarantined: int

    @property
    def places_free(self) -> int: ...

    async def changed(self) -> None: ...

    def on_place_freed(self) -> None: ...


class Rescoring:
    """Rescores rollouts and keeps the leases of their sandboxes."""

    def __init__(self, pipeline: RescoringHost) -> None:
        self._pipeline = pipeline
        self._runners: set[StageRunner] = set()
        self.active = 0  # rescorings with a place in the budget
        self.waiting = 0  # rescorings that wait for a place

    def tick(self) -> None:
        for runner in self._runners:
            runner.renew()

    async def rescore(self, rollout_id: str) -> Rollout:
        """Returns the record with the new score appended. Raises Gone, or InvalidRequest with the reason, if nothing
        can be scored."""
        pipeline = self._pipeline
        rollout = await pipeline.store.get(rollout_id)
        trajectory = await self._saved(rollout)
        run, lease_s = await pipeline.store.get_run(rollout.run), pipeline.settings.lease_s
        runner = StageRunner(pipeline.resources, rollout, run, lease_s=lease_s, metrics=pipeline.metrics)

        async def evaluate(*, is_last: bool) -> Score:
            clock = Deadline(rollout.task.limits.eval_s, pipeline.clock)
            return await runner.evaluate(trajectory, clock, is_last=is_last)

        async with self._place(), pipeline.eval_pool.slot((-rollout.priority, rollout.seq)):
            self._runners.add(runner)
            try:
                try:
                    score = await evaluate(is_last=False)
                except CheckKilled:
                    score = await evaluate(is_last=True)
            except SandboxStuck:
                pipeline.quarantined += 1
                raise
            finally:
                self._runners.remove(runner)
        if run.overlong_penalty is not None:
            score = run.overlong_penalty.applied(score, trajectory.sampled_tokens)
        entry: dict[str, Json] = {
            "at": time.time(),
            "reward": score.reward,
            "components": dict(score.components),
            "metrics": dict(score.metrics),
        }
        if (await pipeline.store.get(rollout_id)).seq != rollout.seq:
            raise NotFound(f"rollout {rollout_id} was deleted while it was scored")  # and another one has its id
        return await pipeline.store.add_score(rollout_id, entry)

    async def _saved(self, rollout: Rollout) -> Trajectory:
        store = self._pipeline.store
        if rollout.state is not State.ENDED:
            raise InvalidRequest(f"rollout {rollout.id} has not ended yet")
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

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None, None]:
        self.waiting += 1
        try:
            while self._pipeline.places_free <= 0:
                await self._pipeline.changed()
            self.active += 1
        finally:
            self.waiting -= 1
            self._pipeline.wake()
        try:
            yield
        finally:
            self.active -= 1
            self._pipeline.on_place_freed()
