"""Rows and rollouts: the conversion of a row to a `Rollout`, and the terminal write that all endings share.

Invariant: `finish_many` has the only statement that writes `ended`, so every terminal record gets its number in the
terminal order in the same transaction, whatever ends it: the pipeline, a cancel, a tombstone or a restart.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollyard.core import Ending, Json, LostAttempt, Outcome, Position, Rollout, State, Task
from rollyard.core.failure import Cancelled, InvalidRequest, NotFound
from rollyard.store.base import Stale
from rollyard.store.codec import from_json, to_json
from rollyard.store.sql.dialect import POSTGRES, SQLITE, Connection, Row

COLUMNS = {
    dialect: f"""r.id, r.run, COALESCE(b.task, t.task), r.state, r.attempt, r."group", r."index", r.priority,
    r.seq, r.ended_seq, r.cancel_detail, r.excused, r.lost, r.ending, r.scores,
    {dialect.exact.format("r.created_at")}, {dialect.exact.format("r.updated_at")}"""
    for dialect in (SQLITE, POSTGRES)
}
FROM = "FROM rollouts r LEFT JOIN bodies b ON b.id = r.body LEFT JOIN tasks t ON t.seq = r.seq"

BYTES = "COALESCE(b.bytes, length(t.task)) + length(r.lost) + length(r.scores) + COALESCE(length(r.ending), 0)"
"""The approximate size of a row of COLUMNS."""

APPENDED = "CASE {0} WHEN '[]' THEN '[' || ? || ']' ELSE substr({0}, 1, length({0}) - 1) || ',' || ? || ']' END"
"""A column with a JSON array and one more element: pass the parameter twice."""


def to_rollouts(rows: Iterable[Row]) -> list[Rollout]:
    """Converts rows of COLUMNS. Rollouts with the same task share it."""
    tasks: dict[str, Task] = {}
    return [to_rollout(row, tasks) for row in rows]


def to_rollout(row: Row, tasks: dict[str, Task] | None = None) -> Rollout:
    """Converts a row of COLUMNS; `tasks` are those already decoded."""
    (
        rollout_id, run, task, state, attempt, group, index, priority, seq, ended_seq,
        cancel_detail, excused, lost, ending, scores, created_at, updated_at,
    ) = row  # fmt: skip
    return Rollout(
        id=rollout_id,
        run=run,
        task=_decoded(task, {} if tasks is None else tasks),
        position=Position(State(state), attempt),
        group=group,
        index=index,
        priority=priority,
        seq=seq,
        ended_seq=ended_seq,
        is_cancel_requested=cancel_detail is not None,
        excused=excused,
        lost=from_json(lost, tuple[LostAttempt, ...]),
        ending=from_json(ending, Ending) if ending else None,
        scores=from_json(scores, tuple[Mapping[str, Json], ...]),
        created_at=float(created_at),
        updated_at=float(updated_at),
    )


def _decoded(text: str, cache: dict[str, Task]) -> Task:
    if (task := cache.get(text)) is None:
        task = cache[text] = from_json(text, Task)
    return task


def find(connection: Connection, rollout_id: str) -> Row | None:
    return connection.execute(f"SELECT {COLUMNS[connection.dialect]} {FROM} WHERE r.id = ?", (rollout_id,)).fetchone()


def fetch(connection: Connection, rollout_id: str) -> Row:
    row = find(connection, rollout_id)
    if row is None:
        raise NotFound(f"there is no rollout {rollout_id!r}")
    return row


def locate(connection: Connection, rollout_id: str, at: Position) -> int:
    """Returns the row's seq if it is at that position; raises `Stale`, with its position, otherwise."""
    row = connection.execute("SELECT seq, state, attempt FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
    if (error := misplaced(rollout_id, row, at)) is not None:
        raise error
    return row[0]


def misplaced(rollout_id: str, row: Row | None, at: Position) -> Stale | None:
    """Returns the error if a rollout is not at that position; the row has seq, state and attempt."""
    if row is None:
        return Stale(f"rollout {rollout_id} is not in the store")
    _, state, attempt = row
    if (state, attempt) != (at.state, at.attempt):
        where = f"is in {state}, attempt {attempt}; not in {at.state}, attempt {at.attempt}"
        return Stale(f"rollout {rollout_id} {where}", State(state))
    return None


@dataclass(frozen=True, slots=True)
class EncodedEnding:
    """An ending as it is stored."""

    text: str
    reward: float | None
    is_trainable: bool

    @classmethod
    def of(cls, ending: Ending) -> EncodedEnding:
        return cls(to_json(ending), ending.score.reward if ending.score else None, ending.is_trainable)


def finish(connection: Connection, seq: int, ending: EncodedEnding) -> None:
    """Writes the terminal record of a row that the caller has located."""
    finish_many(connection, [(seq, ending)])


def finish_many(connection: Connection, ends: Sequence[tuple[int, EncodedEnding]]) -> None:
    """Writes (seq, ending) each, numbered in that order."""
    if not ends:
        return
    (last,) = connection.execute(
        "UPDATE meta SET value = value + ? WHERE key = 'ended_seq' RETURNING value", (len(ends),)
    ).fetchone()
    now, kept_from = time.time(), connection.clock.now()
    connection.execute_each(
        "UPDATE rollouts SET state = 'ended', node = NULL, ending = ?, reward = ?, is_trainable = ?, ended_seq = ?, "
        "updated_at = ?, kept_from = ? WHERE seq = ?",
        [
            (ending.text, ending.reward, int(ending.is_trainable), number, now, kept_from, seq)
            for number, (seq, ending) in enumerate(ends, last - len(ends) + 1)
        ],
    )


def cancelled(detail: str, stage: str | None) -> EncodedEnding:
    """Returns the ending of a rollout that was cancelled before anything could be scored."""
    return EncodedEnding.of(Ending(Outcome.CANCELLED, failure=Cancelled(detail).failure(stage)))


def parse_cursor(cursor: str, order: str) -> int:
    """Returns the number in "e:123" (terminal order) or "s:123" (order of submission); with "n", newest first."""
    prefix, _, number = cursor.partition(":")
    if prefix != order or not (number.isascii() and number.isdigit()) or len(number) > 18:
        meant = {"e": "the ended rollouts", "s": "rollouts in order of submission"}[order[0]]
        newest = ", newest first" if order.endswith("n") else ""
        raise InvalidRequest(f"{cursor[:40]!r} is not a cursor of a listing of {meant}{newest}")
    return int(number)
