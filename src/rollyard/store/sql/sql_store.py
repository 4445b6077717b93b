"""The whole interface, for any database that runs the SQL of this package: a short method per operation.

Modules: `schema` has the tables; `writes`, `moves`, `reads` and `rows` the SQL; `groups` and `policies` that of
draws and weights; `dialect` the differences of the databases; `queue` the commits; `recovery` the opening; `codec`
the encoding. `sqlite` and `postgres` open a store and implement reads and writes. This file is long because it is the
whole interface.

Invariants, beside those of the interface (`base.py`):
- Every transaction first checks that the epoch in the store is that of this opening. If another server has opened the
  store, each operation of that batch is `Stale`, and all later calls are `StoreUnusable`.
- Reads return what was committed before they started: all that an awaited write has returned, never a batch in flight.
- Writes of clients (submit, cancel, runs, acknowledgements) wait for room once ROOM of them are queued. Writes of the
  pipeline never wait: the number of live rollouts limits them.
- A database that fails stops the store: later calls raise `StoreUnusable` with the reason. The store must be opened
  again.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar, overload

from rollyard.core import (
    Batch,
    Draw,
    Ending,
    EngineSpec,
    Group,
    GroupState,
    IllegalMove,
    Json,
    LostAttempt,
    Position,
    Rollout,
    Run,
    State,
    Trajectory,
    digest,
)
from rollyard.core.access import AuditEntry, LoginRecord, TokenRecord
from rollyard.core.failure import InvalidRequest
from rollyard.core.loop_yield import LoopYield
from rollyard.core.policy import PolicyRecord
from rollyard.store._clock import StoreClock
from rollyard.store.base import (
    Decision,
    EncodedTrajectory,
    EvalRecord,
    GroupAxis,
    GroupCount,
    ItemKind,
    KeptRollout,
    Page,
    QueuedRow,
    Recovery,
    Retention,
    RunResults,
    Stale,
    StoreUnusable,
    Submission,
    SweepResult,
)
from rollyard.store.codec import check_trajectory, decode_trajectory, encode_trajectory, from_json, to_json
from rollyard.store.sql import access, moves, policies, reads, writes
from rollyard.store.sql import groups as group_sql
from rollyard.store.sql import retention as retention_sql
from rollyard.store.sql.dialect import Connection
from rollyard.store.sql.queue import Fenced, Operation, Steps, WriteQueue
from rollyard.store.sql.rows import EncodedEnding, parse_cursor, to_rollout

T = TypeVar("T")

ROOM = 4096
"""Client operations that may be queued at once; further ones wait in order. One commit takes about 1 ms."""

_log = logging.getLogger("rollyard.store")


class SqlStore(ABC):
    """A store in a SQL database. A subclass opens it, reads, and closes what it opened; `async with` closes it."""

    def __init__(self, writer: WriteQueue, clock: StoreClock, epoch: int, recovered: Recovery) -> None:
        self._writer = writer
        self._clock = clock
        self._epoch = epoch
        self._recovered = recovered
        self._room = asyncio.Semaphore(ROOM)
        self._swept: dict[str, None] = {}  # in the order of the ids
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        _log.info(
            "store opened",
            extra={
                "epoch": epoch,
                "queued": recovered.queued,
                "requeued": recovered.requeued,
                "evals": len(recovered.evals),
                "failed": recovered.failed,
                "cancelled": recovered.cancelled,
                "leased": len(recovered.leased),
            },
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Commits what is queued, then releases the store. Idempotent; it continues if its caller is cancelled."""
        if self._closing is None:
            if not self._is_closed and self._writer.broken is None:
                self._writer.put(retention_sql.save_clock).add_done_callback(_forget_failure)
            self._is_closed = True
            self._closing = asyncio.create_task(self._close(), name="rollyard-store-close")
        await asyncio.shield(self._closing)

    @abstractmethod
    async def _close(self) -> None:
        """Runs once."""

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def recovered(self) -> Recovery:
        return self._recovered

    @property
    def broken(self) -> str | None:
        return self._writer.broken

    # --- runs -----------------------------------------------------------------------------------------

    async def put_run(self, run: Run, body: Mapping[str, Json]) -> Run:
        record = await self._from_client(
            partial(writes.put_run, run_id=run.id, digest=_digest(body), record=_encode(run))
        )
        return from_json(record, Run)

    async def get_run(self, run_id: str) -> Run:
        return await self._read(partial(reads.get_run, run_id=run_id))

    async def list_runs(self) -> Sequence[Run]:
        return await self._read(reads.list_runs)

    async def begin_deletion(self, run_id: str) -> None:
        await self._from_client(partial(writes.begin_deletion, run_id=run_id))

    async def deleting_runs(self) -> Sequence[str]:
        return await self._read(reads.deleting_runs)

    async def queued_of(self, run_id: str, limit: int) -> Sequence[str]:
        return await self._read(partial(reads.queued_of, run_id=run_id, limit=limit))

    async def stored_bytes(self, runs: Sequence[str]) -> Mapping[str, int]:
        return await self._read(partial(reads.stored_bytes, runs=runs))

    async def count_of_run(self, run_id: str) -> int:
        return await self._read(partial(reads.count_of_run, run_id=run_id))

    async def results_of(self, runs: Sequence[str] | None = None) -> Mapping[str, RunResults]:
        return await self._read(partial(reads.results_of, runs=runs))

    async def delete_run(self, run_id: str) -> None:
        while await self._from_client(partial(retention_sql.forget_of_run, run_id=run_id)):
            pass

    # --- engines --------------------------------------------------------------------------------------

    async def put_engine(self, spec: EngineSpec) -> None:
        await self._from_client(partial(writes.put_engine, engine_id=spec.id, record=_encode(spec)))

    async def engines(self) -> Sequence[EngineSpec]:
        return await self._read(reads.engines)

    async def delete_engine(self, engine_id: str) -> None:
        await self._from_client(partial(writes.delete_engine, engine_id=engine_id))

    # --- policies -------------------------------------------------------------------------------------

    async def put_policy(self, record: PolicyRecord) -> None:
        await self._from_client(partial(policies.put_policy, name=record.name, record=_encode(record)))

    async def policies(self) -> Sequence[PolicyRecord]:
        return await self._read(policies.policies)

    # --- access ---------------------------------------------------------------------------------------

    async def put_token(self, record: TokenRecord) -> None:
        await self._from_client(partial(access.put_token, token_id=record.id, record=_encode(record)))

    async def tokens(self) -> Sequence[TokenRecord]:
        return await self._read(access.tokens)

    async def delete_token(self, token_id: str) -> None:
        await self._from_client(partial(access.delete_token, token_id=token_id))

    async def put_login(self, record: LoginRecord) -> None:
        await self._from_client(partial(access.put_login, digest=record.digest, record=_encode(record)))

    async def logins(self) -> Sequence[LoginRecord]:
        return await self._read(access.logins)

    async def delete_logins(self, digests: Sequence[str]) -> None:
        await self._from_client(partial(access.delete_logins, digests=digests))

    async def put_owner(self, policy: str, owner: str | None) -> None:
        await self._from_client(partial(access.put_owner, policy=policy, owner=owner))

    async def owners(self) -> Mapping[str, str]:
        return await self._read(access.owners)

    async def add_audit(self, entry: AuditEntry) -> None:
        await self._from_client(partial(access.add_audit, record=_encode(entry)))

    async def audit(self, *, before: int | None = None, limit: int = 100) -> Sequence[AuditEntry]:
        return await self._read(partial(access.audit, before=before, limit=limit))

    # --- submit and cancel ----------------------------------------------------------------------------

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[Rollout]:
        stored = await self._from_client(writes.Submit(await _new_rows_in_steps(submissions)))
        return _as_rollouts(stored)

    async def request_cancel(self, rollout_id: str, detail: str, *, run: str | None = None) -> Rollout | None:
        row = await self._from_client(partial(writes.request_cancel, rollout_id=rollout_id, detail=detail, run=run))
        return None if row is None else to_rollout(row)

    async def cancel_many(self, ids: Sequence[str], detail: str) -> Sequence[str]:
        return await self._from_client(partial(writes.cancel_many, ids=ids, detail=detail))

    # --- groups, draws, evaluations -------------------------------------------------------------------

    async def put_groups(
        self, groups: Sequence[tuple[Group, Mapping[str, Json]]], submissions: Sequence[Submission]
    ) -> tuple[Sequence[Group], Sequence[Rollout]]:
        encoded, loop_yield = list[tuple[Group, str, str]](), LoopYield()
        for group, body in groups:
            encoded.append((group, _encode(group), _digest(body)))
            await loop_yield.step()
        operation = partial(group_sql.put_groups, groups=encoded, rows=await _new_rows_in_steps(submissions))
        records, stored = await self._from_client(operation)
        return [from_json(record, Group) for record in records], _as_rollouts(stored)

    async def step(self, step: Decision) -> Sequence[Rollout]:
        operation = partial(
            group_sql.step,
            rows=_new_rows(step.submissions),
            groups=[(group, _encode(group)) for group in step.groups],
            draw=None if step.draw is None else (step.draw, _encode(step.draw)),
            batches=[(batch, _encode(batch)) for batch in step.batches],
            undone_after=step.undone_after,
        )
        return _as_rollouts(await self._put(operation))

    async def get_group(self, group_id: str) -> Group:
        return await self._read(partial(group_sql.get_group, group_id=group_id))

    async def count_groups(self, run_id: str, by: GroupAxis, width: int) -> Sequence[GroupCount]:
        return await self._read(partial(group_sql.count_groups, run_id=run_id, by=by, width=width))

    async def list_groups(
        self,
        *,
        runs: Sequence[str] | None = None,
        draw: str | None = None,
        state: GroupState | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> tuple[Sequence[Group], int | None]:
        query = partial(group_sql.list_groups, runs=runs, draw=draw, state=state, before=before, limit=limit)
        return await self._read(query)

    async def unfinished_groups(self) -> Sequence[Group]:
        return await self._read(group_sql.unfinished_groups)

    async def orphans(self) -> Sequence[str]:
        return await self._read(group_sql.orphans)

    async def delivered_groups(self, draw_id: str, after: int, limit: int) -> Sequence[Group]:
        return await self._read(partial(group_sql.delivered_groups, draw_id=draw_id, after=after, limit=limit))

    async def put_draw(self, draw: Draw, body: Mapping[str, Json]) -> Draw:
        operation = partial(group_sql.put_draw, draw=draw, record=_encode(draw), digest=_digest(body))
        return from_json(await self._from_client(operation), Draw)

    async def put_items(self, draw_id: str, first: int, tasks: Sequence[Mapping[str, Json]]) -> None:
        encoded = [_encode(task) for task in tasks]
        await self._from_client(partial(group_sql.put_items, draw_id=draw_id, first=first, tasks=encoded))

    async def get_draw(self, draw_id: str) -> Draw:
        return await self._read(partial(group_sql.get_draw, draw_id=draw_id))

    async def list_draws(self, runs: Sequence[str] | None = None) -> Sequence[Draw]:
        return await self._read(partial(group_sql.list_draws, runs=runs))

    async def push_items(
        self, draw_id: str, items: Sequence[tuple[str | None, Mapping[str, Json]]], *, closed: str | None = None
    ) -> int:
        encoded = [(name, _encode(task)) for name, task in items]
        return await self._from_client(partial(group_sql.push_items, draw_id=draw_id, items=encoded, closed=closed))

    async def get_item(self, draw_id: str, item: int) -> Mapping[str, Json]:
        return await self._read(partial(group_sql.get_item, draw_id=draw_id, item=item))

    async def count_items(self, draw_id: str) -> int:
        return await self._read(partial(group_sql.count_items, draw_id=draw_id))

    async def list_batches(self, draw_id: str, before: int | None, limit: int) -> Sequence[Batch]:
        return await self._read(partial(group_sql.list_batches, draw_id=draw_id, before=before, limit=limit))

    async def get_batch(self, draw_id: str, number: int) -> Batch:
        return await self._read(partial(group_sql.get_batch, draw_id=draw_id, number=number))

    async def acknowledge_draw(self, draw_id: str, batch: int) -> int:
        total = 0
        operation = partial(retention_sql.acknowledge_draw, draw_id=draw_id, batch=batch)
        while taken := await self._from_client(operation):
            total += taken
        return total

    async def put_eval(self, record: EvalRecord, body: Mapping[str, Json] | None = None) -> EvalRecord:
        digest = "" if body is None else _digest(body)
        operation = partial(group_sql.put_eval, record=record, encoded=_encode(record), digest=digest)
        return from_json(await self._from_client(operation), EvalRecord)

    async def get_eval(self, eval_id: str) -> EvalRecord:
        return await self._read(partial(group_sql.get_eval, eval_id=eval_id))

    async def list_evals(self) -> Sequence[EvalRecord]:
        return await self._read(group_sql.list_evals)

    # --- the pipeline's writes ------------------------------------------------------------------------

    async def lease(self, requests: Sequence[tuple[str, int, str]]) -> Sequence[str]:
        return await self._put(partial(moves.lease, requests=requests))

    def move(self, rollout_id: str, at: Position, to: Position) -> asyncio.Future[None]:
        """The failure of a future that is not awaited is logged; the next write of that rollout is then `Stale`."""
        if to != at.to(to.state) or to.state in (State.QUEUED, State.EVAL, State.ENDED):
            raise IllegalMove(f"{at.state} → {to.state} is not a move of move(); use requeue, save_run or end")
        return self._put_unawaited(rollout_id, moves.MoveWrite(rollout_id, at, to))

    def requeue(
        self, rollout_id: str, at: Position, lost: LostAttempt, *, is_excused: bool = False
    ) -> asyncio.Future[None]:
        at.to(State.QUEUED)
        return self._put_unawaited(rollout_id, moves.RequeueWrite(rollout_id, at, lost, is_excused))

    async def save_run(
        self, rollout_id: str, at: Position, trajectory: Trajectory | EncodedTrajectory, info: Mapping[str, Json]
    ) -> None:
        at.to(State.EVAL)
        operation = partial(moves.save_run, saved=_encoded(trajectory), info=to_json(info))
        await self._put(partial(operation, rollout_id=rollout_id, at=at))

    def excuse_eval(self, rollout_id: str, at: Position) -> asyncio.Future[None]:
        return self._put_unawaited(rollout_id, partial(moves.excuse_eval, rollout_id=rollout_id, at=at))

    async def saved_run(self, rollout_id: str) -> tuple[Trajectory, Mapping[str, Json]] | None:
        return await self._read(partial(reads.saved_run, rollout_id=rollout_id))

    async def end(
        self,
        rollout_id: str,
        at: Position,
        ending: Ending,
        trajectory: Trajectory | EncodedTrajectory | None = None,
        *,
        evidence: bytes = b"",
    ) -> Rollout:
        at.to(State.ENDED)
        saved = None if trajectory is None else _encoded(trajectory)
        encoded = EncodedEnding.of(ending)
        return to_rollout(await self._put(moves.EndWrite(rollout_id, at, encoded, saved, evidence)))

    async def add_score(self, rollout_id: str, score: Mapping[str, Json]) -> Rollout:
        operation = partial(moves.add_score, rollout_id=rollout_id, score=_encode(score))
        return to_rollout(await self._from_client(operation))

    # --- reading --------------------------------------------------------------------------------------

    async def get(self, rollout_id: str) -> Rollout:
        return await self._read(partial(reads.get, rollout_id=rollout_id))

    async def get_many(self, ids: Sequence[str]) -> Sequence[Rollout]:
        return await self._read(partial(reads.get_many, ids=ids))

    async def named(self, kind: ItemKind, id: str) -> Mapping[str, str]:
        return await self._read(partial(reads.named, kind=kind, id=id))

    async def prefixed(self, kind: ItemKind, prefix: str, runs: Sequence[str], limit: int) -> Mapping[str, str]:
        return await self._read(partial(reads.prefixed, kind=kind, prefix=prefix, runs=runs, limit=limit))

    async def runs_of(self, kind: ItemKind, keys: Sequence[str]) -> Mapping[str, str]:
        return await self._read(partial(reads.runs_of, kind=kind, keys=keys))

    async def trajectory(self, rollout_id: str) -> Trajectory | None:
        data = await self._read(partial(reads.trajectory, rollout_id=rollout_id))
        return None if data is None else decode_trajectory(data)

    async def evidence(self, rollout_id: str) -> bytes:
        return await self._read(partial(reads.evidence, rollout_id=rollout_id))

    async def encoded_trajectory(self, rollout_id: str, max_bytes: int) -> bytes | None:
        return await self._read(partial(reads.encoded_trajectory, rollout_id=rollout_id, max_bytes=max_bytes))

    async def kept(self, ids: Sequence[str]) -> Mapping[str, KeptRollout]:
        return await self._read(partial(reads.kept, ids=ids))

    async def last_ended(self) -> int:
        return await self._read(reads.last_ended)

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
        query = partial(reads.page, state=state, runs=runs, group=group, group_named=group_named)
        return await self._read(partial(query, after=after, limit=limit, is_newest_first=is_newest_first))

    async def has_unfinished(self, runs: Sequence[str] | None = None, group_named: str | None = None) -> bool:
        return await self._read(partial(reads.has_unfinished, runs=runs, group_named=group_named))

    async def queued(self) -> Sequence[QueuedRow]:
        return await self._read(reads.queued)

    async def counts(self) -> Mapping[str, int]:
        return await self._read(reads.counts)

    # --- retention ------------------------------------------------------------------------------------

    async def acknowledge(self, run_id: str, cursor: str) -> int:
        up_to = parse_cursor(cursor, "e")
        total = 0
        while deleted := await self._from_client(partial(retention_sql.acknowledge, run_id=run_id, up_to=up_to)):
            total += deleted
        return total

    async def sweep(self, retention: Retention) -> SweepResult:
        await self._from_client(retention_sql.save_clock)
        before = self._clock.now() - retention.max_age_s
        while await self._from_client(partial(retention_sql.forget_batches, before=before)):
            pass
        deleted = {table: await self._forget(table, before) for table in retention_sql.TABLES}
        await self.forget_leavings(list(self._swept))
        self._swept = dict.fromkeys(await self._leavings())
        return SweepResult(tuple(self._swept), tuple(deleted["draws"]), tuple(deleted["runs"]))

    async def leavings_among(self, ids: Sequence[str]) -> Sequence[str]:
        return await self._read(partial(retention_sql.leavings_among, ids=ids))

    async def forget_leavings(self, ids: Sequence[str]) -> None:
        for start in range(0, len(ids), retention_sql.LEAVINGS):
            few = ids[start : start + retention_sql.LEAVINGS]
            await self._from_client(partial(retention_sql.forget_leavings, ids=few))
        for named in ids:  # not a copy of the others: there may be hundreds of thousands, and this is called for a few
            self._swept.pop(named, None)

    async def _leavings(self) -> list[str]:
        named = list[str]()
        while few := await self._read(partial(retention_sql.leavings, after=named[-1] if named else "")):
            named += few
        return named

    async def _forget(self, table: str, before: float) -> list[str]:
        deleted, place = list[str](), retention_sql.START
        while places := await self._read(partial(retention_sql.due, table=table, before=before, after=place)):
            place = places[-1]
            deleted += await self._from_client(partial(retention_sql.forget, table=table, before=before, places=places))
        return deleted

    # --- internal -------------------------------------------------------------------------------------

    @overload
    def _put(self, operation: Operation[Steps[T]]) -> asyncio.Future[T]: ...

    @overload
    def _put(self, operation: Operation[T]) -> asyncio.Future[T]: ...

    def _put(self, operation: Operation[Any]) -> asyncio.Future[Any]:
        return asyncio.shield(self._writer.put(operation))

    @overload
    async def _from_client(self, operation: Operation[Steps[T]]) -> T: ...

    @overload
    async def _from_client(self, operation: Operation[T]) -> T: ...

    async def _from_client(self, operation: Operation[Any]) -> Any:
        """Waits for room, and for the commit. The room is held until the commit, even if the caller is cancelled."""
        await self._room.acquire()
        try:
            future = self._writer.put(operation)
        except BaseException:
            self._room.release()
            raise
        future.add_done_callback(lambda _: self._room.release())
        return await asyncio.shield(future)

    def _put_unawaited(self, rollout_id: str, operation: Operation[None]) -> asyncio.Future[None]:
        future = self._writer.put(operation)
        future.add_done_callback(partial(_log_failure, rollout_id))
        return future

    @abstractmethod
    async def _read(self, query: Callable[[Connection], T]) -> T:
        """Runs a query on its own connection. If the database cannot answer, breaks the store (callers end on
        `StoreUnusable`) and raises `StoreUnusable`; an error that the query itself caused is raised unchanged."""

    def _unreadable(self, error: Exception) -> StoreUnusable:
        """Breaks the store, and returns the error to raise."""
        reason = f"the store cannot be read: {str(error) or type(error).__name__}"
        if not self._is_closed:  # queued operations must still be committed then
            self._writer.break_down(reason)
        return StoreUnusable(reason)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise StoreUnusable("the store is closed")
        if self._writer.broken is not None:
            raise StoreUnusable(self._writer.broken)


def guard(epoch: int, connection: Connection) -> None:
    """Runs first in every transaction. The row cannot change until the commit: another opening waits for it."""
    (stored_epoch,) = connection.execute(
        f"SELECT value FROM meta WHERE key = 'epoch' {connection.dialect.for_share}"
    ).fetchone()
    if stored_epoch != epoch:
        raise Fenced(f"another server has opened this store (epoch {stored_epoch}; this one has {epoch})", Stale)


def _new_rows(submissions: Sequence[Submission]) -> list[writes.NewRow]:
    tasks: dict[int, writes.EncodedTask] = {}
    return [_new_row(new, tasks) for new in submissions]


async def _new_rows_in_steps(submissions: Sequence[Submission]) -> list[writes.NewRow]:
    """For what a client sends in one call: encoding its tasks takes time for each of their values."""
    tasks: dict[int, writes.EncodedTask] = {}
    rows, loop_yield = list[writes.NewRow](), LoopYield()
    for new in submissions:
        rows.append(_new_row(new, tasks))
        await loop_yield.step()
    return rows


def _new_row(new: Submission, tasks: dict[int, writes.EncodedTask]) -> writes.NewRow:
    """`tasks`: those that are encoded, by their identity: members of a group have one, which is encoded once."""
    task = new.rollout.task
    if id(task) not in tasks:
        tasks[id(task)] = writes.EncodedTask.of(_encode(task))
    return writes.NewRow(new.rollout, _digest(new.body), tasks[id(task)])


def _as_rollouts(stored: Sequence[Any]) -> list[Rollout]:
    return [row if isinstance(row, Rollout) else to_rollout(row) for row in stored]


def _digest(body: Mapping[str, Json]) -> str:
    try:
        return digest(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def _encoded(trajectory: Trajectory | EncodedTrajectory) -> EncodedTrajectory:
    if isinstance(trajectory, EncodedTrajectory):
        check_trajectory(trajectory.data)
        return trajectory
    return EncodedTrajectory(bytes(encode_trajectory(trajectory)), trajectory.sampled_tokens)


def _encode(record: Any) -> str:
    try:
        return to_json(record)
    except (ValueError, TypeError, RecursionError) as error:  # for example, a lone surrogate
        raise InvalidRequest(f"this cannot be stored as JSON: {error}") from error


def _forget_failure(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()  # the store failed at its close: its clock loses a minute


def _log_failure(rollout_id: str, future: asyncio.Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        # A cancel ended the rollout just before; its caller detects that by itself.
        if isinstance(error, Stale) and error.state is State.ENDED:
            _log.debug("a move came too late", extra={"rollout": rollout_id, "reason": str(error)})
            return
        _log.warning("a move was not written", extra={"rollout": rollout_id, "reason": str(error)})
