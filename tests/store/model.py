"""A store against a plain model of it: random operations, re-openings included, must agree at every step.

The model is a few dicts and no cleverness; where it and the store differ, one of them is wrong. A walk is decided
by its seed alone, so a failure is found again by the seed that it prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from rollyard.core import LIVE, LostAttempt, Outcome, Position, Run, State
from rollyard.core.failure import IdConflict
from rollyard.store.base import LeasedRow, Stale, Store
from rollyard.testing.store_conformance import Open, completed, raises, submission, trajectory

MAX_ATTEMPTS = 3
IDS = [f"r{i}" for i in range(12)]


@dataclass
class Row:
    """What the model knows of a rollout."""

    note: str
    position: Position = field(default_factory=Position)
    outcome: Outcome | None = None
    reward: float | None = None
    is_cancel_requested: bool = False
    excused: int = 0
    lost: int = 0
    has_saved: bool = False
    is_reevaluable: bool = False
    evals_lost: int = 0
    node: str | None = None

    def end(self, outcome: Outcome, reward: float | None = None) -> None:
        self.position = self.position.to(State.ENDED)
        self.outcome, self.reward, self.node = outcome, reward, None

    def requeue(self, *, is_excused: bool = False) -> None:
        self.position = self.position.to(State.QUEUED)
        self.lost += 1
        self.excused += is_excused
        self.has_saved, self.is_reevaluable, self.node = False, False, None


class ModelWalk:
    """One random walk. `await Walk(open_store, seed).go(steps)`."""

    def __init__(self, open_store: Open, seed: int) -> None:
        self.open_store = open_store
        self.random = Random(seed)
        self.rows: dict[str, Row] = {}  # in order of submission
        self.ended: list[str] = []  # in terminal order
        self.tombstones: set[str] = set()

    async def go(self, steps: int) -> None:
        store = await self.open_store(max_attempts=MAX_ATTEMPTS)
        try:
            await store.put_run(Run("run"), {})
            for _ in range(steps):
                if self.random.random() < 0.05:
                    await store.close()
                    keeps_leases = self.random.random() < 0.5
                    store = await self.open_store(max_attempts=MAX_ATTEMPTS, keeps_leases=keeps_leases)
                    self.restart(store, keeps_leases)
                else:
                    kinds = [self.submit, self.cancel, *[self.move] * 4, self.lease, self.requeue, self.finish]
                    await self.random.choice(kinds)(store)
                await self.compare(store)
        finally:
            await store.close()

    def believed_position(self, rollout_id: str) -> Position:
        """Where the caller believes it to be: mostly right."""
        row = self.rows.get(rollout_id)
        at = row.position if row else Position()
        if at.state is State.ENDED or self.random.random() < 0.2:
            return Position(self.random.choice([State.QUEUED, *LIVE]), self.random.randint(1, 3))
        return at

    def is_right(self, rollout_id: str, at: Position) -> bool:
        return rollout_id in self.rows and self.rows[rollout_id].position == at

    async def submit(self, store: Store) -> None:
        ids = self.random.sample(IDS, self.random.randint(1, 3))
        new = {rollout_id: self.random.choice("xxxy") for rollout_id in ids}
        call = store.submit([submission(rollout_id, note=note) for rollout_id, note in new.items()])
        if any(rollout_id in self.rows and self.rows[rollout_id].note != note for rollout_id, note in new.items()):
            await raises(IdConflict, call)
            return
        stored = await call
        assert [rollout.id for rollout in stored] == ids
        for rollout_id, note in new.items():
            if rollout_id not in self.rows:
                row = self.rows[rollout_id] = Row(note)
                if rollout_id in self.tombstones:
                    self.tombstones.remove(rollout_id)
                    row.is_cancel_requested = True
                    row.end(Outcome.CANCELLED)
                    self.ended.append(rollout_id)

    async def cancel(self, store: Store) -> None:
        rollout_id = self.random.choice(IDS)
        row = self.rows.get(rollout_id)
        answer = await store.request_cancel(rollout_id, "", run="run")
        assert (answer is None) == (row is None)
        if row is None:
            self.tombstones.add(rollout_id)
        elif row.position.state is not State.ENDED:
            row.is_cancel_requested = True
            if row.position.state is State.QUEUED:
                row.end(Outcome.CANCELLED)
                self.ended.append(rollout_id)

    async def lease(self, store: Store) -> None:
        ids = self.random.sample(IDS, self.random.randint(1, 4))
        requests = [
            (rollout_id, self.believed_position(rollout_id).attempt, self.random.choice("nm")) for rollout_id in ids
        ]
        got = [one for one in requests if self.is_right(one[0], Position(State.QUEUED, one[1]))]
        assert list(await store.lease(requests)) == [rollout_id for rollout_id, _, _ in got]
        for rollout_id, _, node in got:
            row = self.rows[rollout_id]
            row.position, row.node = row.position.to(State.INIT), node

    async def move(self, store: Store) -> None:
        rollout_id = self.random.choice(IDS)
        at = self.believed_position(rollout_id)
        following = {State.QUEUED: State.INIT, State.INIT: State.READY, State.READY: State.RUN, State.RUN: State.EVAL}
        if at.state not in following:
            return
        to = at.to(following[at.state])
        is_reevaluable = self.random.random() < 0.5
        is_saved = to.state is State.EVAL
        if is_saved:
            saved = trajectory(rollout_id, at.attempt)
            call = store.save_run(rollout_id, at, saved, {"is_reevaluable": is_reevaluable})
        else:
            call = store.move(rollout_id, at, to)
        if not self.is_right(rollout_id, at):
            await raises(Stale, call)
            return
        await call
        row = self.rows[rollout_id]
        row.position = to
        if is_saved:
            row.has_saved, row.is_reevaluable = True, is_reevaluable

    async def requeue(self, store: Store) -> None:
        rollout_id = self.random.choice(IDS)
        at = self.believed_position(rollout_id)
        if at.state is State.QUEUED:
            return
        is_excused = self.random.random() < 0.3
        call = store.requeue(rollout_id, at, LostAttempt(at.attempt, "stalled", ""), is_excused=is_excused)
        if self.is_right(rollout_id, at):
            await call
            self.rows[rollout_id].requeue(is_excused=is_excused)
        else:
            await raises(Stale, call)

    async def finish(self, store: Store) -> None:
        rollout_id = self.random.choice(IDS)
        at, reward = self.believed_position(rollout_id), self.random.random()
        call = store.end(rollout_id, at, completed(reward))
        if self.is_right(rollout_id, at):
            await call
            self.rows[rollout_id].end(Outcome.COMPLETED, reward)
            self.ended.append(rollout_id)
        else:
            await raises(Stale, call)

    def restart(self, store: Store, keeps_leases: bool) -> None:
        """What an opening must have done. Cancels are ended first, in order of submission, then the lost."""
        live = [(rollout_id, row) for rollout_id, row in self.rows.items() if row.position.state is not State.ENDED]
        cancelled = [rollout_id for rollout_id, row in live if row.is_cancel_requested]
        for rollout_id in cancelled:
            self.rows[rollout_id].end(Outcome.CANCELLED)
        self.ended += cancelled
        evals, failed, leased = list[str](), 0, list[LeasedRow]()
        for rollout_id, row in live:
            if row.position.state not in LIVE:
                continue
            if keeps_leases and row.node is not None:
                leased.append(LeasedRow(rollout_id, row.position.attempt, row.node, row.position.state))
                continue
            is_evaluable = row.position.state is State.EVAL and row.is_reevaluable
            if is_evaluable and row.evals_lost < MAX_ATTEMPTS:
                row.evals_lost, row.node = row.evals_lost + 1, None
                evals.append(rollout_id)
            elif not is_evaluable and row.position.attempt - row.excused < MAX_ATTEMPTS:
                row.requeue()
            else:
                row.end(Outcome.FAILED)
                self.ended.append(rollout_id)
                failed += 1
        recovered = replace(store.recovered, queued=0, requeued=0)
        assert (list(recovered.evals), recovered.failed, recovered.cancelled) == (evals, failed, len(cancelled))
        assert list(recovered.leased) == leased

    async def compare(self, store: Store) -> None:
        rollouts = (await store.list(limit=100)).rollouts
        assert [rollout.id for rollout in rollouts] == list(self.rows)
        for rollout in rollouts:
            row = self.rows[rollout.id]
            assert rollout.position == row.position, rollout.id
            assert (rollout.is_cancel_requested, rollout.excused) == (row.is_cancel_requested, row.excused)
            assert len(rollout.lost) == row.lost
            assert (rollout.ending.outcome if rollout.ending else None) == row.outcome
            score = rollout.ending.score if rollout.ending else None
            assert (score.reward if score else None) == row.reward
        ended = (await store.list(state=State.ENDED, limit=100)).rollouts
        assert [rollout.id for rollout in ended] == self.ended
        queued = [rollout_id for rollout_id, row in self.rows.items() if row.position.state is State.QUEUED]
        assert [row.id for row in await store.queued()] == queued
        some = self.random.choice(IDS)
        if some in self.rows:
            assert (await store.trajectory(some) is not None) == self.rows[some].has_saved
