"""The interface of this package: the durable record of everything.

Invariants, tested for every store by `rollyard.testing.store_conformance`:
- When `submit` returns, its rows are committed. The same id with the same body is the same rollout; with another body
  it is `IdConflict`, and nothing of that call is stored.
- A rollout ends once: `end` is a compare-and-set on position and epoch; a second caller gets `Stale`.
- An ended record is visible only after its commit, which gives it the next number in the terminal order.
- A cancel that arrives before its submit wins: the submit finds the tombstone and ends as cancelled. Tombstones are
  deleted with their run, and are stored only in a run that exists: a later run of that name has none.
- Moves are written in the order of the calls; a caller that need not wait for the disk does not await.
- Only one process has a store open. Each opening increments the epoch; rows of an older epoch are requeued, except
  those that are leased to a node, if the opener keeps leases.
- A rollout is leased to at most one node. (id, attempt) is its fencing token: a requeue increments the attempt, and
  what the node still writes for the old one is `Stale`.

The file is long because it contains the whole interface and its small records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from rollyard.core import (
    Batch,
    Draw,
    Ending,
    EngineSpec,
    Group,
    GroupState,
    Json,
    LostAttempt,
    Position,
    Rollout,
    Run,
    State,
    Trajectory,
)
from rollyard.core.access import AuditEntry, LoginRecord, TokenRecord
from rollyard.core.policy import PolicyRecord


class Stale(Exception):
    """The row is not at the expected position: another caller moved it, or another server owns it."""

    def __init__(self, detail: str = "", state: State | None = None) -> None:
        """`state` is the rollout's actual state; None: it does not exist, or the error concerns something else."""
        super().__init__(detail)
        self.state = state


class StoreLocked(Exception):
    """Another process has this store open."""


class StoreUnusable(Exception):
    """The store cannot be used at all; the message contains the reason and what to do."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One rollout as a client submits it. `body` is what idempotency compares."""

    rollout: Rollout
    body: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class QueuedRow:
    """The part of a queued rollout that the scheduler needs."""

    id: str
    run: str
    priority: int
    seq: int
    attempt: int
    since: float | None = field(default=None, compare=False)  # by the monotonic clock; None: of an earlier process


@dataclass(frozen=True, slots=True)
class LeasedRow:
    """A rollout that is leased to a node."""

    id: str
    attempt: int
    node: str
    state: State


@dataclass(frozen=True, slots=True)
class EncodedTrajectory:
    """A trajectory as `codec.encode_trajectory` returned it, in this process or another."""

    data: bytes
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """What an opening found and has already moved."""

    queued: int = 0  # were queued, still are
    requeued: int = 0  # were in INIT, READY or RUN (or in EVAL without artifacts): attempt + 1
    evals: tuple[str, ...] = ()  # had ended RUN and can be scored from what was saved
    failed: int = 0  # attempts used up: ended as lost_to_restarts
    cancelled: int = 0  # a cancel had been requested
    leased: tuple[LeasedRow, ...] = ()  # are and stay leased to nodes: only for an opener that keeps leases


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a listing of rollouts."""

    rollouts: tuple[Rollout, ...]
    next_cursor: str | None  # pass as `after`. None: no more; for ended, only on an empty page (repeat the call later)


@dataclass(frozen=True, slots=True)
class KeptRollout:
    """What the store still has of a rollout."""

    ended_seq: int | None  # None: it has not ended
    has_trajectory: bool


@dataclass(frozen=True, slots=True)
class RunResults:
    """The rollouts of a run in numbers."""

    states: Mapping[State, int]  # rollouts per state; a state without any is left out
    rewarded: int = 0  # ended rollouts with a reward
    mean_reward: float | None = None  # of those
    trainable: int = 0
    active_at: float | None = None  # the last change of a rollout; None: it has none


GroupAxis = Literal["time", "version"]


@dataclass(frozen=True, slots=True)
class GroupCount:
    """The groups of a run in one state, in one span of time or of weight versions."""

    place: int | None  # of the span, which starts at place * width; None: none of its tokens has a version
    state: GroupState
    number: int
    tokens: int  # sampled by all their rollouts


@dataclass(frozen=True, slots=True)
class Retention:
    """A sweep deletes what ended longer ago than this, by the store's own clock, which counts only while it is open.

    It keeps open groups, unacknowledged work of live draws, and running evaluations."""

    max_age_s: float


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep deleted, for components that cache it or store files of it."""

    rollouts: tuple[str, ...] = ()  # their artifacts may be deleted: listed until the next sweep
    draws: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of a draw, or of a group, which is committed atomically."""

    submissions: tuple[Submission, ...] = ()
    groups: tuple[Group, ...] = ()  # new or changed
    draw: Draw | None = None
    batches: tuple[Batch, ...] = ()  # new or changed
    undone_after: int | None = None  # batches of the draw beyond this number are deleted first


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """An evaluation: its groups are `ID.0`, `ID.1` …, in the run that was created for it."""

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
    """Returns the name under which an evaluation's tasks are stored, beside those of draws: it is no valid draw id."""
    return f"eval/{eval_id}"


class ItemKind(StrEnum):
    """The kinds of items that have a key; the value is their table."""

    ROLLOUT = "rollouts"
    GROUP = "groups"
    DRAW = "draws"
    EVAL = "evals"


class Store(Protocol):
    """The durable record of a service. A write for an attempt that is no longer the rollout's raises `Stale`."""

    @property
    def epoch(self) -> int:
        """The number of this opening of the store. Writes of earlier ones are refused."""
        ...

    @property
    def recovered(self) -> Recovery:
        """What the opening did with the rollouts of the last process."""
        ...

    @property
    def broken(self) -> str | None:
        """Why the store cannot be used any more; None while it can. All other methods raise StoreUnusable if it is
        broken or closed, and only then."""
        ...

    # runs
    async def put_run(self, run: Run, body: Mapping[str, Json]) -> Run:
        """Idempotent by id, like submit. Returns the stored run."""
        ...

    async def get_run(self, run_id: str) -> Run:
        """Returns a run. Raises `NotFound`."""
        ...

    async def list_runs(self) -> Sequence[Run]:
        """Returns all runs, in order of creation."""
        ...

    async def begin_deletion(self, run_id: str) -> None:
        """Refuses further submissions to the run, and leaves its rollouts out of `queued`; `delete_run` must follow."""
        ...

    async def deleting_runs(self) -> Sequence[str]:
        """Returns the runs whose deletion has started and is not complete."""
        ...

    async def queued_of(self, run_id: str, limit: int) -> Sequence[str]:
        """Returns ids of a run's queued rollouts, at most `limit`."""
        ...

    async def stored_bytes(self, runs: Sequence[str]) -> Mapping[str, int]:
        """Returns the size of the trajectories of each of these runs that has any."""
        ...

    async def count_of_run(self, run_id: str) -> int:
        """Returns the number of its rollouts."""
        ...

    async def results_of(self, runs: Sequence[str] | None = None) -> Mapping[str, RunResults]:
        """Returns the results of each of these runs, or of all, that has a rollout."""
        ...

    async def delete_run(self, run_id: str) -> None:
        """Deletes a run and all its ended rollouts. `Stale` while one has not ended: cancel first, and wait."""
        ...

    # submit and cancel
    async def submit(self, submissions: Sequence[Submission]) -> Sequence[Rollout]:
        """Applied atomically. Returns each rollout as stored: new, existing, or ended by its tombstone.

        `NotFound` for an unknown run; `IdConflict` also for an id that occurs twice in the call."""
        ...

    async def request_cancel(self, rollout_id: str, detail: str, *, run: str | None = None) -> Rollout | None:
        """Ends a queued rollout or marks a live one. None: it is unknown; with `run`, a tombstone is stored, unless
        there is no such run. Durable before it returns."""
        ...

    async def cancel_many(self, ids: Sequence[str], detail: str) -> Sequence[str]:
        """Ends and returns the queued ones, marks live ones, and stores no tombstone for unknown ids. One transaction,
        durable before it returns."""
        ...

    # the pipeline's writes
    async def lease(self, requests: Sequence[tuple[str, int, str]]) -> Sequence[str]:
        """(id, attempt, node): queued → init, leased to that node. Durable before it returns. Returns the leased ids in
        the order given: rollouts that are not queued with that attempt, or are locked by another transaction, are left
        out."""
        ...

    def move(self, rollout_id: str, at: Position, to: Position) -> asyncio.Future[None]:
        """queued → init → ready → run. Raises `IllegalMove` at once for other moves, which have their own methods, and
        `Stale` through the future."""
        ...

    def requeue(
        self, rollout_id: str, at: Position, lost: LostAttempt, *, is_excused: bool = False
    ) -> asyncio.Future[None]:
        """Back to queued with attempt + 1, leased to no node."""
        ...

    async def save_run(
        self, rollout_id: str, at: Position, trajectory: Trajectory | EncodedTrajectory, info: Mapping[str, Json]
    ) -> None:
        """run → eval, with the results of RUN; a lease stays. Durable before it returns. `saved_run` returns `info`."""
        ...

    def excuse_eval(self, rollout_id: str, at: Position) -> asyncio.Future[None]:
        """Records that its EVAL was stopped, not lost: the next opening repeats it without counting that."""
        ...

    async def saved_run(self, rollout_id: str) -> tuple[Trajectory, Mapping[str, Json]] | None:
        """Returns the results of RUN as `save_run` stored them; None if there are none."""
        ...

    async def end(
        self,
        rollout_id: str,
        at: Position,
        ending: Ending,
        trajectory: Trajectory | EncodedTrajectory | None = None,
        *,
        evidence: bytes = b"",
    ) -> Rollout:
        """Writes the one terminal record and ends the lease. Durable before it returns. `evidence` of EVAL, as JSON, is
        stored beside the trajectory and deleted with it."""
        ...

    async def add_score(self, rollout_id: str, score: Mapping[str, Json]) -> Rollout:
        """Appends a later score to an ended rollout; `Stale` if it has not ended."""
        ...

    # reading
    async def get(self, rollout_id: str) -> Rollout:
        """Returns a rollout. Raises `NotFound`."""
        ...

    async def get_many(self, ids: Sequence[str]) -> Sequence[Rollout]:
        """In the order given; unknown ids are left out."""
        ...

    async def named(self, kind: ItemKind, id: str) -> Mapping[str, str]:
        """Returns the keys of all items with this id, in any run, and the run of each."""
        ...

    async def prefixed(self, kind: ItemKind, prefix: str, runs: Sequence[str], limit: int) -> Mapping[str, str]:
        """Returns the keys of items of these runs whose id starts with a valid id, at most `limit`, and the run of
        each."""
        ...

    async def runs_of(self, kind: ItemKind, keys: Sequence[str]) -> Mapping[str, str]:
        """Returns which of these keys exist, and the run of each."""
        ...

    async def trajectory(self, rollout_id: str) -> Trajectory | None:
        """None: the rollout has none, or it was acknowledged and deleted."""
        ...

    async def evidence(self, rollout_id: str) -> bytes:
        """Returns what EVAL found, as JSON; empty if there is nothing, or it was deleted."""
        ...

    async def encoded_trajectory(self, rollout_id: str, max_bytes: int) -> bytes | None:
        """Returns a trajectory as `codec.encode_trajectory` returned it. None: there is none, or it is larger."""
        ...

    async def kept(self, ids: Sequence[str]) -> Mapping[str, KeptRollout]:
        """Returns which of these rollouts exist, and whether their trajectories do."""
        ...

    async def last_ended(self) -> int:
        """Returns the last number in the terminal order; 0 before the first end."""
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
        is_newest_first: bool = False,
    ) -> Page:
        """Returns rollouts of these runs, or of all: ended ones in terminal order, others in order of submission, or
        each in the reverse order. `group` is a key; `group_named` is an id, in any run."""
        ...

    async def has_unfinished(self, runs: Sequence[str] | None = None, group_named: str | None = None) -> bool:
        """Returns whether a rollout has not ended: of these runs, or of any; of groups with that id, or of any."""
        ...

    async def queued(self) -> Sequence[QueuedRow]:
        """Returns all queued rollouts, in order of submission."""
        ...

    async def counts(self) -> Mapping[str, int]:
        """Rollouts per state."""
        ...

    # groups, draws, evaluations
    async def put_groups(
        self, groups: Sequence[tuple[Group, Mapping[str, Json]]], submissions: Sequence[Submission]
    ) -> tuple[Sequence[Group], Sequence[Rollout]]:
        """Stores new groups, each with the body that idempotency compares, and their rollouts. Applied atomically; an
        existing group with the same body is returned unchanged. `IdConflict` if a new group's rollout exists."""
        ...

    async def step(self, step: Decision) -> Sequence[Rollout]:
        """Commits a `Decision`. Durable before it returns; returns the rollouts as stored."""
        ...

    async def get_group(self, group_id: str) -> Group:
        """Returns a group. Raises `NotFound`."""
        ...

    async def count_groups(self, run_id: str, by: GroupAxis, width: int) -> Sequence[GroupCount]:
        """Returns how many of a run's groups are in which state, for each span of their last change or of their newest
        weight version; `width` is that of a span. In the order of the spans."""
        ...

    async def list_groups(
        self,
        *,
        runs: Sequence[str] | None = None,
        draw: str | None = None,
        state: GroupState | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> tuple[Sequence[Group], int | None]:
        """Returns groups of these runs, or of all, newest first, and the next `before`; None: there are no more."""
        ...

    async def unfinished_groups(self) -> Sequence[Group]:
        """Returns open and complete groups, in the order in which they started."""
        ...

    async def orphans(self) -> Sequence[str]:
        """Returns rollouts that have not ended although their group has: they are no longer needed."""
        ...

    async def delivered_groups(self, draw_id: str, after: int, limit: int) -> Sequence[Group]:
        """In order of delivery, from place `after` + 1 on."""
        ...

    async def put_draw(self, draw: Draw, body: Mapping[str, Json]) -> Draw:
        """Idempotent by id."""
        ...

    async def get_draw(self, draw_id: str) -> Draw:
        """Returns a draw. Raises `NotFound`."""
        ...

    async def list_draws(self, runs: Sequence[str] | None = None) -> Sequence[Draw]:
        """Returns the draws of these runs, or of all, in order of creation."""
        ...

    async def put_items(self, draw_id: str, first: int, tasks: Sequence[Mapping[str, Json]]) -> None:
        """Stores tasks from number `first` on, and replaces existing ones. Called before the draw itself is stored."""
        ...

    async def push_items(
        self, draw_id: str, items: Sequence[tuple[str | None, Mapping[str, Json]]], *, closed: str | None = None
    ) -> int:
        """Appends tasks, each once by its name if it has one. Returns the new number of tasks. `closed` is the reason
        why no task may be added: `SourceClosed` then, unless all of them exist."""
        ...

    async def get_item(self, draw_id: str, item: int) -> Mapping[str, Json]:
        """Returns a task of a draw by its number. Raises `NotFound`."""
        ...

    async def count_items(self, draw_id: str) -> int:
        """Returns the number of tasks of a draw."""
        ...

    async def list_batches(self, draw_id: str, before: int | None, limit: int) -> Sequence[Batch]:
        """Returns the batches of a draw before that number, newest first."""
        ...

    async def get_batch(self, draw_id: str, number: int) -> Batch:
        """Returns a batch of a draw. Raises `NotFound`."""
        ...

    async def acknowledge_draw(self, draw_id: str, batch: int) -> int:
        """Deletes the traces of batches up to this one, which the trainer has saved. Returns the number of groups."""
        ...

    async def put_eval(self, record: EvalRecord, body: Mapping[str, Json] | None = None) -> EvalRecord:
        """With a body: a new one, idempotent by id. Without: a change."""
        ...

    async def get_eval(self, eval_id: str) -> EvalRecord:
        """Returns an evaluation. Raises `NotFound`."""
        ...

    async def list_evals(self) -> Sequence[EvalRecord]:
        """Returns all evaluations, in order of creation."""
        ...

    # engines that clients added
    async def put_engine(self, spec: EngineSpec) -> None:
        """Stores an engine, and replaces one with the same id."""
        ...

    async def engines(self) -> Sequence[EngineSpec]:
        """Returns all engines."""
        ...

    async def delete_engine(self, engine_id: str) -> None:
        """Does nothing if the engine does not exist."""
        ...

    # policies and their weights
    async def put_policy(self, record: PolicyRecord) -> None:
        """Replaces one with the same name. Durable before it returns."""
        ...

    async def policies(self) -> Sequence[PolicyRecord]:
        """Returns all policies."""
        ...

    # access
    async def put_token(self, record: TokenRecord) -> None:
        """Replaces one with the same id. Durable before it returns."""
        ...

    async def tokens(self) -> Sequence[TokenRecord]:
        """In order of creation."""
        ...

    async def delete_token(self, token_id: str) -> None:
        """Does nothing if the token does not exist."""
        ...

    async def put_login(self, record: LoginRecord) -> None:
        """Stores a new sign-in. Durable before it returns."""
        ...

    async def logins(self) -> Sequence[LoginRecord]:
        """In order of creation."""
        ...

    async def delete_logins(self, digests: Sequence[str]) -> None:
        """Unknown ones are ignored."""
        ...

    async def put_owner(self, policy: str, owner: str | None) -> None:
        """Sets the owner of a policy; None: it has no owner."""
        ...

    async def owners(self) -> Mapping[str, str]:
        """Returns the owner of each policy that has one."""
        ...

    async def add_audit(self, entry: AuditEntry) -> None:
        """Appends to the audit log, which keeps its newest `AUDIT_ENTRIES`."""
        ...

    async def audit(self, *, before: int | None = None, limit: int = 100) -> Sequence[AuditEntry]:
        """Newest first; only entries before position `before`."""
        ...

    # retention
    async def acknowledge(self, run_id: str, cursor: str) -> int:
        """Deletes the traces up to the cursor, which the run's trainer has saved. Returns how many.

        Keeps those of groups that are open, wait for a batch of their draw, or whose batch was not acknowledged."""
        ...

    async def sweep(self, retention: Retention) -> SweepResult:
        """Deletes what is due, and empty runs.

        The next sweep and `forget_leavings` drop the rollouts that this one returned. After a crash in between they are
        returned again, so that no file is left behind."""
        ...

    async def leavings_among(self, ids: Sequence[str]) -> Sequence[str]:
        """Returns those of the rollouts that a sweep returned whose ids were not submitted again since."""
        ...

    async def forget_leavings(self, ids: Sequence[str]) -> None:
        """Drops rollouts that a sweep returned: their files are deleted."""
        ...

    async def close(self) -> None:
        """Commits what is queued and releases the lock. Idempotent."""
        ...
