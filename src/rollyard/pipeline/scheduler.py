"""Selects the next queued rollout: strictly by priority, then fairly between owners, then fairly between the runs of an
owner, then in order of submission.

Fair means start-time fair queueing: each owner and each run has a virtual time that one admission advances by one.
Among those whose best rollout has the highest priority, the one with the lowest virtual time is next. One that was idle
starts at the current virtual time, so it can neither save up turns nor be starved; nor can one that could not use its
turns. A run or an owner at its quota of live rollouts is skipped, and so is a run that `may_go` rejects (its policy's
engines are full).

Pure data: no clock of its own, no I/O. It stores only a `QueuedRow` per rollout; tasks stay in the store.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from rollyard.core import Run
from rollyard.store.base import QueuedRow


@dataclass(slots=True)
class _Owner:
    max_live: int | None = None
    live: int = 0
    queued: int = 0
    virtual_time: float = 0.0


@dataclass(slots=True)
class _RunQueue:
    owner: _Owner
    max_live: int | None = None
    live: int = 0
    queued: int = 0
    virtual_time: float = 0.0
    rows: list[tuple[int, int, QueuedRow]] = field(default_factory=list[tuple[int, int, QueuedRow]])


class Scheduler:
    """The queue of rollouts, by run and owner."""

    def __init__(self) -> None:
        self._runs: dict[str, _RunQueue] = {}
        self._owners: dict[str, _Owner] = {}
        self._delayed: list[tuple[float, int, QueuedRow]] = []
        self._present: dict[str, QueuedRow] = {}  # authoritative; heaps may hold stale rows
        self._now = 0.0  # virtual time of runs
        self._owners_now = 0.0

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._present

    def queued_of(self, run_id: str) -> int:
        queue = self._runs.get(run_id)
        return queue.queued if queue is not None else 0

    @property
    def queued_runs(self) -> set[str]:
        """The runs that have a queued rollout."""
        return {run_id for run_id, queue in self._runs.items() if queue.queued}

    def queued_by(self, owner: str) -> int:
        return self._owner(owner).queued

    def set_quota(self, run: Run) -> None:
        queue = self._queue(run.id)
        queue.max_live = run.max_live
        owner = self._owner(run.owner)
        if queue.owner is not owner:
            for one, sign in ((queue.owner, -1), (owner, 1)):
                one.live += sign * queue.live
                one.queued += sign * queue.queued
            queue.owner = owner

    def set_owner(self, owner: str, max_live: int | None) -> None:
        self._owner(owner).max_live = max_live

    def drop_run(self, run_id: str) -> None:
        """Removes all rows of a run."""
        for row in [row for row in self._present.values() if row.run == run_id]:
            self.remove(row.id)

    def forget_run(self, run_id: str) -> None:
        queue = self._runs.get(run_id)
        if queue is not None and queue.live == 0 and self._head(queue) is None:
            del self._runs[run_id]

    def push(self, row: QueuedRow, not_before: float = 0.0) -> None:
        """Adds a row. `pop` does not return it before `not_before` (the caller's clock)."""
        self.remove(row.id)
        self._present[row.id] = row
        queue = self._queue(row.run)
        if not queue.owner.queued:
            queue.owner.virtual_time = max(queue.owner.virtual_time, self._owners_now)
        queue.queued += 1
        queue.owner.queued += 1
        if not_before:
            heapq.heappush(self._delayed, (not_before, row.seq, row))
        else:
            self._push_due(row)

    def remove(self, rollout_id: str) -> bool:
        row = self._present.pop(rollout_id, None)
        if row is None:
            return False
        queue = self._queue(row.run)
        queue.queued -= 1
        queue.owner.queued -= 1
        return True

    def pop(
        self, now: float, may_go: Callable[[str], bool] = lambda _: True, *, above: int | None = None
    ) -> QueuedRow | None:
        """Removes and returns the next row of the runs that may go, if its priority is higher than `above`. It counts
        as live in its run until `release`."""
        while self._delayed and self._delayed[0][0] <= now:
            _, _, row = heapq.heappop(self._delayed)
            if self._present.get(row.id) is row:
                self._push_due(row)
        best: tuple[int, float, float, int, _RunQueue] | None = None
        for run_id, queue in self._runs.items():
            if not queue.queued or not _has_live_room(queue):
                continue
            head = self._head(queue)
            if head is None or (above is not None and head.priority <= above) or not may_go(run_id):
                continue
            key = (-head.priority, queue.owner.virtual_time, queue.virtual_time, head.seq, queue)
            if best is None or key[:4] < best[:4]:
                best = key
        if best is None:
            return None
        queue = best[4]
        owner = queue.owner
        _, _, row = heapq.heappop(queue.rows)
        self.remove(row.id)
        self._now = max(self._now, queue.virtual_time)
        self._owners_now = max(self._owners_now, owner.virtual_time)
        for one, now in ((queue, self._now), (owner, self._owners_now)):
            one.virtual_time = max(one.virtual_time, now) + 1  # one turn, however long it could not use any
            one.live += 1
        return row

    def has_live_room(self, run_id: str) -> bool:
        """Whether the quotas of the run and its owner allow another live rollout."""
        return _has_live_room(self._queue(run_id))

    def adopt(self, run_id: str) -> None:
        """Counts a rollout as live that was not popped here: one recovered in EVAL, or one that is rescored."""
        self._live(run_id, 1)

    def release(self, run_id: str) -> None:
        """Ends the counting as live of a popped row."""
        self._live(run_id, -1)

    def _live(self, run_id: str, change: int) -> None:
        queue = self._queue(run_id)
        queue.live += change
        queue.owner.live += change

    def next_due(self) -> float | None:
        """Returns when the first delayed row becomes due."""
        return self._delayed[0][0] if self._delayed else None

    def _queue(self, run_id: str) -> _RunQueue:
        if run_id not in self._runs:
            self._runs[run_id] = _RunQueue(self._owner(""))
        return self._runs[run_id]

    def _owner(self, name: str) -> _Owner:
        return self._owners.setdefault(name, _Owner())

    def _push_due(self, row: QueuedRow) -> None:
        queue = self._queue(row.run)
        if self._head(queue) is None:
            queue.virtual_time = max(queue.virtual_time, self._now)
        heapq.heappush(queue.rows, (-row.priority, row.seq, row))

    def _head(self, queue: _RunQueue) -> QueuedRow | None:
        while queue.rows:
            row = queue.rows[0][2]
            if self._present.get(row.id) is row:
                return row
            heapq.heappop(queue.rows)
        return None


def _has_live_room(queue: _RunQueue) -> bool:
    return all(one.max_live is None or one.live < one.max_live for one in (queue, queue.owner))
