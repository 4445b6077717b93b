"""The store of a node's pipeline: its writes go to the head, in order, and are kept until the head has stored them.

It has as much of the interface `store.base.Store` as a pipeline uses that gets its rollouts by leases: nothing is
submitted, listed or cancelled here. RUN's result stays at the node for EVAL; a copy goes to the head at once, so that
it is sent once.

Invariants. Items leave the outbox in the order in which they were put, each when the head has answered for it. `end`
and `requeue` are done when the head has committed them, or raise `Stale`: then the attempt belongs to another node, or
to none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollyard.core import Ending, Json, LostAttempt, Outcome, Position, Rollout, Run, State, Trajectory
from rollyard.core.failure import Cancelled, NotFound
from rollyard.fleet.messages import Blob, Ended, Item, Key, Moved, Returned, Saved
from rollyard.pipeline.artifacts import ArtifactFolder
from rollyard.store.base import QueuedRow, Recovery, Retention, Stale, SweepResult
from rollyard.store.codec import encode_trajectory, to_json

MOST_ARTIFACT_BYTES = 32 << 20
"""Limit on one rollout's artifacts that go to the head. Larger ones are scored here and cannot be rescored."""


@dataclass(slots=True)
class LedgerEntry:
    """An item for the head, and the future of its answer."""

    item: Item
    size_bytes: int
    answer: asyncio.Future[None]


@dataclass(slots=True)
class HeldRollout:
    """A rollout leased to this node."""

    rollout: Rollout

    @property
    def key(self) -> Key:
        return Key(self.rollout.id, self.rollout.attempt)


class NodeLedger:
    """The rollouts that a node holds, and its outbox. `on_news` is called when there is something to send."""

    epoch = 0
    recovered = Recovery()
    broken: str | None = None

    def __init__(self, artifacts: ArtifactFolder, on_news: Callable[[], None] = lambda: None) -> None:
        self._artifacts = artifacts
        self._on_news = on_news
        self._by_id: dict[str, HeldRollout] = {}
        self._outbox: deque[LedgerEntry] = deque()
        self._is_closed = False
        self._released: set[str] = set()  # released without an end: their artifacts may still be here

    # --- called by the node ---------------------------------------------------------------------------

    def accept(self, rollout: Rollout) -> bool:
        """Takes a lease. Returns False if it is here already (orders may come twice)."""
        holding = self._by_id.get(rollout.id)
        if holding is not None and holding.rollout.attempt >= rollout.attempt:
            return False
        self._by_id[rollout.id] = HeldRollout(rollout)
        return True

    @property
    def holds(self) -> list[Key]:
        return [holding.key for holding in self._by_id.values()]

    @property
    def rollouts(self) -> list[Rollout]:
        return [holding.rollout for holding in self._by_id.values()]

    def has(self, key: Key) -> bool:
        holding = self._by_id.get(key.id)
        return holding is not None and holding.key == key

    def next(self, most: int, most_bytes: int) -> list[LedgerEntry]:
        """Returns the oldest items to send, at least one if there is any. They stay until `acknowledge` or `drop`."""
        taken: list[LedgerEntry] = []
        size_bytes = 0
        for entry in self._outbox:
            size_bytes += entry.size_bytes
            if taken and (len(taken) >= most or size_bytes > most_bytes):
                break
            taken.append(entry)
        return taken

    def acknowledge(self, entries: Sequence[LedgerEntry], refused: Iterable[Key]) -> None:
        """Removes items that the head has answered. Those that it refused do not belong to this node."""
        stale = set(refused)
        for entry in entries:
            if self._outbox and self._outbox[0] is entry:
                self._outbox.popleft()
            if entry.item.key in stale:
                _fail(
                    entry, Stale(f"{entry.item.key.id}, attempt {entry.item.key.attempt}, is not at this node any more")
                )
            elif not entry.answer.done():
                entry.answer.set_result(None)
            if isinstance(entry.item, (Ended, Returned)) or entry.item.key in stale:
                self._forget(entry.item.key)

    def drop(self, key: Key) -> None:
        """Discards an attempt that was given to another node: nothing of it is sent any more."""
        error = Stale(f"{key.id}, attempt {key.attempt}, was given to another node")
        for entry in [entry for entry in self._outbox if entry.item.key == key]:
            self._outbox.remove(entry)
            _fail(entry, error)
        self._forget(key)

    def close(self) -> None:
        """Stops sending: waiters for an answer, now or later, get `Stale`."""
        self._is_closed = True
        for entry in self._outbox:
            _fail(entry, Stale("this node has left its head"))
        self._outbox.clear()

    def cancelled(self, key: Key, detail: str) -> None:
        """Reports the cancel of a rollout that had not started here."""
        ending = Ending(Outcome.CANCELLED, failure=Cancelled(detail).failure(State.QUEUED))
        self._put(Ended(key, to_json(ending), None, 0))

    def give_back(self, key: Key, code: str = "drained", why: str = "the node was drained") -> None:
        """Returns a rollout that has not started here to the queue."""
        self._put(Returned(key, LostAttempt(key.attempt, code, why, State.QUEUED), True))

    def _forget(self, key: Key) -> None:
        if self.has(key):
            del self._by_id[key.id]
            self._released.add(key.id)

    def __len__(self) -> int:
        return len(self._outbox)

    # --- called by the pipeline -----------------------------------------------------------------------

    async def list_runs(self) -> Sequence[Run]:
        return ()

    async def deleting_runs(self) -> Sequence[str]:
        return ()

    async def queued(self) -> Sequence[QueuedRow]:
        return ()

    async def sweep(self, _: Retention) -> SweepResult:
        released = [rollout_id for rollout_id in self._released if rollout_id not in self._by_id]
        self._released.difference_update(released)
        return SweepResult(tuple(released))

    async def leavings_among(self, ids: Sequence[str]) -> Sequence[str]:
        return [rollout_id for rollout_id in ids if rollout_id not in self._by_id]

    async def forget_leavings(self, ids: Sequence[str]) -> None:
        """Nothing to do: `sweep` returns each once."""

    async def get(self, rollout_id: str) -> Rollout:
        if rollout_id not in self._by_id:
            raise NotFound(f"rollout {rollout_id!r} is not at this node")
        return self._by_id[rollout_id].rollout

    def move(self, rollout_id: str, at: Position, to: Position) -> asyncio.Future[None]:
        holding = self._locate(rollout_id, at)
        holding.rollout = replace(holding.rollout, position=to)
        if to.state is State.INIT:  # the head has this state since the lease
            return _completed()
        return self._put(Moved(holding.key, to.state))

    def requeue(
        self, rollout_id: str, at: Position, lost: LostAttempt, *, is_excused: bool = False
    ) -> asyncio.Future[None]:
        return self._put(Returned(self._locate(rollout_id, at).key, lost, is_excused))

    async def save_run(self, rollout_id: str, at: Position, trajectory: Trajectory, info: Mapping[str, Json]) -> None:
        holding = self._locate(rollout_id, at)
        blobs = await self._blobs(trajectory, rollout_id, at.attempt)
        holding = self._locate(rollout_id, at)
        data = bytes(encode_trajectory(trajectory))
        holding.rollout = replace(holding.rollout, position=at.to(State.EVAL))
        size_bytes = len(data) + sum(len(blob.data) for blob in blobs)
        self._put(Saved(holding.key, data, trajectory.sampled_tokens, to_json(info), blobs), size_bytes)

    def excuse_eval(self, rollout_id: str, at: Position) -> asyncio.Future[None]:
        """Requeues a rollout whose EVAL was stopped: what EVAL needs is only here, so RUN is repeated elsewhere."""
        lost = LostAttempt(at.attempt, "drained", "the node was stopped", at.state)
        return self.requeue(rollout_id, at, lost, is_excused=True)

    async def saved_run(self, _: str) -> None:
        return None

    async def end(
        self,
        rollout_id: str,
        at: Position,
        ending: Ending,
        trajectory: Trajectory | None = None,
        *,
        evidence: bytes = b"",
    ) -> Rollout:
        holding = self._locate(rollout_id, at)
        data, tokens = None, 0
        if trajectory is not None:
            data, tokens = bytes(encode_trajectory(trajectory)), trajectory.sampled_tokens
        size_bytes = len(data or b"") + len(evidence)
        await self._put(Ended(holding.key, to_json(ending), data, tokens, evidence), size_bytes)
        await self._artifacts.delete(rollout_id)
        self._released.discard(rollout_id)
        return replace(holding.rollout, position=at.to(State.ENDED), ending=ending)

    # --- internal -------------------------------------------------------------------------------------

    def _locate(self, rollout_id: str, at: Position) -> HeldRollout:
        holding = self._by_id.get(rollout_id)
        if holding is None or holding.rollout.position != at:
            raise Stale(f"rollout {rollout_id}, attempt {at.attempt}, is not at this node any more")
        return holding

    def _put(self, item: Item, size_bytes: int = 0) -> asyncio.Future[None]:
        entry = LedgerEntry(item, size_bytes + 200, asyncio.get_running_loop().create_future())
        entry.answer.add_done_callback(lambda it: None if it.cancelled() else it.exception())  # few are awaited
        if self._is_closed:
            _fail(entry, Stale("this node has left its head"))
        else:
            self._outbox.append(entry)
            self._on_news()
        return entry.answer

    async def _blobs(self, trajectory: Trajectory, rollout_id: str, attempt: int) -> list[Blob]:
        if sum(artifact.bytes for artifact in trajectory.artifacts) > MOST_ARTIFACT_BYTES:
            return []
        paths = [await self._artifacts.load(artifact, rollout_id, attempt) for artifact in trajectory.artifacts]
        return [
            Blob(artifact.name, await asyncio.to_thread(path.read_bytes))
            for artifact, path in zip(trajectory.artifacts, paths, strict=True)
        ]


def _completed() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future


def _fail(entry: LedgerEntry, error: Exception) -> None:
    if not entry.answer.done():
        entry.answer.set_exception(error)
