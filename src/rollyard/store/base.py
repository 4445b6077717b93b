"""The door of this wing: the durable record of everything.

Invariants, proven for every store by `rollyard.testing.store_conformance`:
- When `submit` returns, its rows are committed. The same id with the same body is the same rollout; with
  another body it is `IdConflict`, and then nothing of that call was stored.
- A rollout ends once: `end` is a compare-and-set on position and epoch; who comes second gets `Stale`.
- An ended record is visible only after its commit, and gets the next number of the terminal order then.
- A cancel that comes before its submit wins: the submit finds the tombstone and ends as cancelled.
- Moves are written in the order they were made; a caller that need not wait for the disk does not await.
- Only one process has a store open. Each opening raises the epoch; rows of an older epoch are re-queued, but for
  those that are out at a node, if the opener keeps leases.
- A leased rollout is out at one node. (id, attempt) is its fencing token: giving it back raises the attempt, and what
  the node still says of the old one is `Stale`.

The file is long because it is the whole door, and the small records that go through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rollyard.core import (
    Batch,
    Draw,
    Ending,
    EngineSpec,
    Group,
    Json,
    LostAttempt,
    Position,
    Rollout,
    Run,
    State,
    Trajectory,
)
from rollyard.core.access import AuditEntry, TokenRecord
from rollyard.core.policy import PolicyRecord


class Stale(Exception):
    """The row is not where the caller thought: somebody else moved it, or another server owns it."""

    def __init__(self, detail: str = "", state: State | None = None) -> None:
        """`state` is where the rollout is instead; None: it is not there, or this is about something else."""
        super().__init__(detail)
        self.state = state


class StoreLocked(Exception):
    """Another process has this store open."""


class StoreUnusable(Exception):
    """The store cannot be used at all; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One rollout as a client wants it. `body` is what idempotency compares."""

    rollout: Rollout
    body: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class QueuedRow:
    """As little of a queued rollout as the scheduler needs to hold."""

    id: str
    run: str
    priority: int
    seq: int
    attempt: int
    since: float | None = field(default=None, compare=False)  # by the monotonic clock; None: an earlier process's


@dataclass(frozen=True, slots=True)
class LeasedRow:
    """A rollout that is out at a node."""

    id: str
    attempt: int
    node: str
    state: State


@dataclass(frozen=True, slots=True)
class EncodedTrajectory:
    """A trajectory as `codec.encode_trajectory` made it, here or elsewhere."""

    data: bytes
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """What an opening found, moved already."""

    queued: int = 0  # were queued, still are
    requeued: int = 0  # were in INIT, READY or RUN (or in EVAL without artifacts): attempt + 1
    evals: tuple[str, ...] = ()  # had ended RUN and can be evaluated from what was saved
    failed: int = 0  # attempts used up: ended as lost_to_restarts
    cancelled: int = 0  # a cancel had been asked for
    leased: tuple[LeasedRow, ...] = ()  # are out at nodes, and stay so: only for an opener that keeps leases


@dataclass(frozen=True, slots=True)
class Page:
    rollouts: tuple[Rollout, ...]
    next_cursor: str | None  # pass as `after`. None: nothing more; for ended, only on an empty page (ask again later)


@dataclass(frozen=True, slots=True)
class Retention:
    """What a sweep deletes: whatever ended so long ago, by the store's own clock, which counts only while it is open.

    Not the work of an open group, of a live draw that was not acknowledged, or of an evaluation that is running."""

    max_age_s: float


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep deleted, for those who remember it or keep files of it."""

    rollouts: tuple[str, ...] = ()  # their artifacts may be deleted: named until the next sweep
    draws: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of a draw, or of a group: all of it is committed, or nothing."""

    submissions: tuple[Submission, ...] = ()
    groups: tuple[Group, ...] = ()  # new or changed
    draw: Draw | None = None
    batches: tuple[Batch, ...] = ()  # new or changed
    undone_after: int | None = None  # batches of the draw beyond this number are deleted first


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """An evaluation: its groups are `ID.0`, `ID.1` …, in the run that was made for it."""

    id: str
    run: str
    policy: str
    version: int  # the one it is pinned to
    state: str = "running"  # running, done, failed, cancelled
    reason: str | None = None
    k: int = 1
    samples: int = 1
    tasks: int = 0
    threshold: float = 1.0
    max_missing: float = 0.05
    on_update: str = "hold"
    seed: int = 0
    result: Mapping[str, Json] | None = None
    created_at: float = 0.0
    ended_at: float | None = None
    data: Mapping[str, Json] = field(default_factory=dict[str, Json])


def eval_items(eval_id: str) -> str:
    """Under what name an evaluation's tasks are kept, beside those of draws: no draw can have it as its id."""
    return f"eval/{eval_id}"


class ItemKind(StrEnum):
    """What has a key: the table that it is in."""

    ROLLOUT = "rollouts"
    GROUP = "groups"
    DRAW = "draws"
    EVAL = "evals"


class Store(Protocol):
    @property
    def epoch(self) -> int: ...

    @property
    def recovered(self) -> Recovery: ...

    @property
    def broken(self) -> str | None:
        """Why it cannot be used any more; None while it can. Everything else raises StoreUnusable then, and only then
        or once it is closed."""
        ...

    # runs
    async def put_run(self, run: Run, body: Mapping[str, Json]) -> Run:
        """Idempotent by id like submit. Returns what is stored."""
        ...

    async def get_run(self, run_id: str) -> Run: ...

    async def list_runs(self) -> Sequence[Run]: ...

    async def begin_deletion(self, run_id: str) -> None:
        """From now on nothing is submitted to it, and `queued` leaves its rollouts out; `delete_run` is to follow."""
        ...

    async def deleting_runs(self) -> Sequence[str]:
        """Runs whose deletion was begun and is not complete."""
        ...

    async def queued_of(self, run_id: str, limit: int) -> Sequence[str]:
        """Ids of rollouts of a run that wait, as many at most."""
        ...

    async def stored_bytes(self, runs: Sequence[str]) -> Mapping[str, int]:
        """Of the trajectories of each of these runs that has any."""
        ...

    async def count_of_run(self, run_id: str) -> int:
        """Rollouts that it has."""
        ...

    async def delete_run(self, run_id: str) -> None:
        """Forgets a run and all its ended rollouts. `Stale` while one has not ended: cancel first, and wait."""
        ...

    # submit and cancel
    async def submit(self, submissions: Sequence[Submission]) -> Sequence[Rollout]:
        """All or nothing. Returns each as stored: new, the earlier one, or ended by its tombstone.

        `NotFound` for an unknown run; `IdConflict` also for an id that is twice in the call."""
        ...

    async def request_cancel(self, rollout_id: str, detail: str) -> Rollout | None:
        """Durable before it returns. A queued one ends here; a live one is marked; None: a tombstone was left."""
        ...

    async def cancel_many(self, ids: Sequence[str], detail: str) -> Sequence[str]:
        """In one transaction, durable before it returns. Queued ones end here, and are returned; live ones are marked;
        ids that are not there leave no tombstone."""
        ...

    # what the pipeline does
    async def lease(self, wanted: Sequence[tuple[str, int, str]]) -> Sequence[str]:
        """(id, attempt, node): queued → init, out at that node. Durable before it returns. The ids that it got, in the
        order given: what is not queued with that attempt (any more), or is held by another transaction just now, is
        left out."""
        ...

    def move(self, rollout_id: str, at: Position, to: Position) -> asyncio.Future[None]:
        """queued → init → ready → run. The other moves have calls of their own, below: `IllegalMove` at once. Raises
        `Stale` through the future."""
        ...

    def requeue(
        self, rollout_id: str, at: Position, lost: LostAttempt, *, is_excused: bool = False
    ) -> asyncio.Future[None]:
        """Back to queued with attempt + 1, out at no node."""
        ...

    async def save_run(
        self, rollout_id: str, at: Position, trajectory: Trajectory | EncodedTrajectory, info: Mapping[str, Json]
    ) -> None:
        """run → eval, with what RUN left, here or at the node where it is. Durable before it returns. `info` comes back
        from `saved_run`."""
        ...

    def excuse_eval(self, rollout_id: str, at: Position) -> asyncio.Future[None]:
        """Its evaluation was stopped, not lost: the next opening takes it up without counting that."""
        ...

    async def saved_run(self, rollout_id: str) -> tuple[Trajectory, Mapping[str, Json]] | None: ...

    async def end(
        self,
        rollout_id: str,
        at: Position,
        ending: Ending,
        trajectory: Trajectory | EncodedTrajectory | None = None,
    ) -> Rollout:
        """The one terminal record, out at no node. Durable before it returns."""
        ...

    async def add_score(self, rollout_id: str, score: Mapping[str, Json]) -> Rollout:
        """Appends a later score to an ended rollout; `Stale` if it has not ended."""
        ...

    # reading
    async def get(self, rollout_id: str) -> Rollout: ...

    async def get_many(self, ids: Sequence[str]) -> Sequence[Rollout]:
        """In the order given; what is not there is left out."""
        ...

    async def named(self, kind: ItemKind, id: str) -> Mapping[str, str]:
        """The keys of all that have this id, in whatever run, and the run of each."""
        ...

    async def runs_of(self, kind: ItemKind, keys: Sequence[str]) -> Mapping[str, str]:
        """Which of these keys there are, and the run of each."""
        ...

    async def trajectory(self, rollout_id: str) -> Trajectory | None:
        """None: it left none, or it was acknowledged away."""
        ...

    async def list(
        self,
        *,
        state: State | None = None,
        runs: Sequence[str] | None = None,
        group: str | None = None,
        group_named: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Of these runs, or of all: ended ones in terminal order, others in order of submission. `group` is a key;
        `group_named` an id, in whatever run."""
        ...

    async def queued(self) -> Sequence[QueuedRow]:
        """All that wait, in order of submission."""
        ...

    async def counts(self) -> Mapping[str, int]:
        """Rollouts per state."""
        ...

    # groups, draws, evaluations
    async def put_groups(
        self, groups: Sequence[tuple[Group, Mapping[str, Json]]], submissions: Sequence[Submission]
    ) -> tuple[Sequence[Group], Sequence[Rollout]]:
        """New groups, each with what idempotency compares, and their rollouts. All or nothing; a group that is there
        already, with the same body, is returned as it stands."""
        ...

    async def step(self, step: Decision) -> Sequence[Rollout]:
        """See `Decision`. Durable before it returns; the rollouts as stored."""
        ...

    async def get_group(self, group_id: str) -> Group: ...

    async def unfinished_groups(self) -> Sequence[Group]:
        """Those that are open or complete, in the order in which they began."""
        ...

    async def orphans(self) -> Sequence[str]:
        """Rollouts that have not ended although their group has: nobody wants them any more."""
        ...

    async def delivered_groups(self, draw_id: str, after: int, limit: int) -> Sequence[Group]:
        """In order of delivery, from place `after` + 1 on."""
        ...

    async def put_draw(self, draw: Draw, body: Mapping[str, Json]) -> Draw:
        """Idempotent by id."""
        ...

    async def get_draw(self, draw_id: str) -> Draw: ...

    async def list_draws(self) -> Sequence[Draw]: ...

    async def put_items(self, draw_id: str, first: int, tasks: Sequence[Mapping[str, Json]]) -> None:
        """Tasks number `first` and on, instead of what may be there from it on. Before the draw itself is stored."""
        ...

    async def push_items(
        self, draw_id: str, items: Sequence[tuple[str | None, Mapping[str, Json]]], *, closed: str | None = None
    ) -> int:
        """Appends tasks, each once by its name where it has one. How many there are then. `closed` says why none may
        be added any more: `SourceClosed` then, unless all are there."""
        ...

    async def get_item(self, draw_id: str, item: int) -> Mapping[str, Json]: ...

    async def count_items(self, draw_id: str) -> int: ...

    async def get_batch(self, draw_id: str, number: int) -> Batch: ...

    async def acknowledge_draw(self, draw_id: str, batch: int) -> int:
        """Batches up to there are safe with the trainer: their traces may go. Returns how many groups did."""
        ...

    async def put_eval(self, record: EvalRecord, body: Mapping[str, Json] | None = None) -> EvalRecord:
        """With a body: a new one, idempotent by id. Without: a change."""
        ...

    async def get_eval(self, eval_id: str) -> EvalRecord: ...

    async def list_evals(self) -> Sequence[EvalRecord]: ...

    # engines that clients added
    async def put_engine(self, spec: EngineSpec) -> None:
        """Remembers an engine, over an earlier one of that id."""
        ...

    async def engines(self) -> Sequence[EngineSpec]: ...

    async def delete_engine(self, engine_id: str) -> None:
        """Forgets it; nothing happens if it is not there."""
        ...

    # policies, and the changes of their weights
    async def put_policy(self, record: PolicyRecord) -> None:
        """Over an earlier one of that name. Durable before it returns."""
        ...

    async def policies(self) -> Sequence[PolicyRecord]: ...

    # who may do what
    async def put_token(self, record: TokenRecord) -> None:
        """Over an earlier one of that id. Durable before it returns."""
        ...

    async def tokens(self) -> Sequence[TokenRecord]:
        """In the order in which they were created."""
        ...

    async def delete_token(self, token_id: str) -> None: ...

    async def put_owner(self, policy: str, owner: str | None) -> None:
        """Names the owner of a policy; None: it has none."""
        ...

    async def owners(self) -> Mapping[str, str]:
        """The owner of each policy that has one."""
        ...

    async def add_audit(self, entry: AuditEntry) -> None:
        """Appends to the audit log, which keeps its newest `AUDIT_ENTRIES`."""
        ...

    async def audit(self, *, before: int | None = None, limit: int = 100) -> Sequence[AuditEntry]:
        """Newest first, those before that place."""
        ...

    # retention
    async def acknowledge(self, run_id: str, cursor: str) -> int:
        """What the run's trainer has safely got: traces up to there may go. Returns how many did.

        Not those of groups that are open, wait for a batch of their draw, or whose batch was not acknowledged."""
        ...

    async def sweep(self, retention: Retention) -> SweepResult:
        """Deletes what is due, and runs of which nothing is left.

        A rollout is named until the sweep after the one that named it, so a crash in between leaves no file behind."""
        ...

    async def close(self) -> None: ...
