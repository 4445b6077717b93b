"""Cancelling many rollouts at once, and deleting runs.

Queued rollouts end in transactions of `CANCELS` each, so that a long queue does not block other writes for long. A run
that is being deleted is marked in the store first: from then on no rollout of it starts, and the deletion continues
after a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from rollyard.core import Rollout, Run
from rollyard.core.failure import NotFound
from rollyard.pipeline.base import LiveRollout
from rollyard.pipeline.scheduler import Scheduler
from rollyard.store.base import Stale, Store

CANCELS = 1000
"""Rollouts that one transaction cancels; other writes wait for it."""

PUBLISHED = 64
"""Records read at once to be published."""

AGAIN_S = 0.2
"""Seconds before a deletion looks again for rollouts that were requeued or leased while it cancelled the others."""


class CancellationHost(Protocol):
    """What `Cancellation` uses of the pipeline."""

    store: Store
    scheduler: Scheduler

    @property
    def live(self) -> Mapping[str, LiveRollout]: ...

    async def cancel(self, rollout_id: str, detail: str) -> Rollout | None: ...

    def publish(self, rollout: Rollout) -> None: ...

    def run_of(self, run_id: str) -> Run | None: ...

    def is_created_in(self, run_id: str) -> bool: ...

    async def changed(self) -> None: ...


class Cancellation:
    """Cancels rollouts and deletes runs. `deleting` contains the runs that are being deleted."""

    def __init__(self, pipeline: CancellationHost) -> None:
        self._pipeline = pipeline
        self._marking = asyncio.Lock()
        self.deleting: set[str] = set()

    async def cancel_many(self, ids: Sequence[str], detail: str) -> None:
        """Cancels each of the rollouts."""
        for first in range(0, len(ids), CANCELS):
            few = ids[first : first + CANCELS]
            queued = [rollout_id for rollout_id in few if self._pipeline.scheduler.remove(rollout_id)]
            ended = await self._end(queued, detail) if queued else set[str]()
            for rollout_id in few:
                if rollout_id not in ended:
                    await self._pipeline.cancel(rollout_id, detail)

    async def begin_deletion(self, run_id: str) -> bool:
        """Marks a run for deletion. Durable when it returns: no rollout of the run is queued any more. `delete` does
        the rest, also after a restart. False if the run was marked before: its deletion is in progress. Raises
        `NotFound` if it was deleted while this call waited for others: its name may be that of another tenant's run."""
        run = self._pipeline.run_of(run_id)
        async with self._marking:
            if run_id in self.deleting:
                return False
            now = self._pipeline.run_of(run_id)
            if run is not None and (now is None or (now.owner, now.created_at) != (run.owner, run.created_at)):
                raise NotFound(f"there is no run {run_id!r}: it was deleted during this call")
            await self._pipeline.store.begin_deletion(run_id)
            self.deleting.add(run_id)
            self._pipeline.scheduler.drop_run(run_id)
            return True

    async def delete(self, run_id: str) -> None:
        """Cancels the run's rollouts that have not ended, waits for them and for calls that create something in it, and
        deletes the run."""
        detail = "its run was deleted"
        while True:
            while ids := await self._pipeline.store.queued_of(run_id, CANCELS):
                await self._end(ids, detail)
            await self._end_live(run_id, detail)
            try:
                await self._pipeline.store.delete_run(run_id)
            except Stale:
                await asyncio.sleep(AGAIN_S)
                continue
            return

    async def _end_live(self, run_id: str, detail: str) -> None:
        """Cancels the run's live rollouts, and those that were being started and become live meanwhile, and waits until
        they have ended and no call creates something in the run."""
        cancelled: set[str] = set()
        while (live := self._live_of(run_id)) or self._pipeline.is_created_in(run_id):
            if not cancelled.issuperset(live):
                for rollout_id in live:
                    await self._pipeline.cancel(rollout_id, detail)
                cancelled.update(live)
            else:
                await self._pipeline.changed()

    def _live_of(self, run_id: str) -> list[str]:
        return [rollout_id for rollout_id, attempt in self._pipeline.live.items() if attempt.run.id == run_id]

    async def _end(self, ids: Sequence[str], detail: str) -> set[str]:
        """Ends those that are queued in the store, publishes their records, and returns their ids."""
        ended = await self._pipeline.store.cancel_many(ids, detail)
        for first in range(0, len(ended), PUBLISHED):
            for rollout in await self._pipeline.store.get_many(ended[first : first + PUBLISHED]):
                self._pipeline.publish(rollout)
        return set(ended)
