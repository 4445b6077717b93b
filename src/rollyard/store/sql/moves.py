"""The writes of the pipeline: leases, moves, results of RUN, endings. One function or `BatchedWrite` per operation.

Every operation that moves a rollout is a compare-and-set on the position that the caller expects (`Stale` otherwise).
The writer is alone in its transaction, so what it has read does not change until the commit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rollyard.core import LostAttempt, Position, State
from rollyard.store.base import EncodedTrajectory, Stale
from rollyard.store.codec import to_json
from rollyard.store.sql.dialect import Connection, Row
from rollyard.store.sql.queue import BatchedWrite, Steps
from rollyard.store.sql.rows import APPENDED, COLUMNS, FROM, EncodedEnding, fetch, finish_many, locate, misplaced
from rollyard.store.sql.writes import sliced


def lease(connection: Connection, requests: Sequence[tuple[str, int, str]]) -> Steps[list[str]]:
    """Leases (id, attempt, node) each; returns the ids that could be leased."""
    now, got = time.time(), list[str]()
    statement = (
        "UPDATE rollouts SET state = 'init', node = ?, updated_at = ? WHERE seq = (SELECT seq FROM rollouts "
        f"WHERE id = ? AND state = 'queued' AND attempt = ? {connection.dialect.skip_locked}) RETURNING id"
    )
    for few in sliced(requests):
        rows = [(node, now, rollout_id, attempt) for rollout_id, attempt, node in few]
        got += [row[0] for row in connection.execute_each(statement, rows)]
        yield
    return got


@dataclass(frozen=True, slots=True)
class MoveWrite(BatchedWrite[None]):
    rollout_id: str
    at: Position
    to: Position

    @property
    def ids(self) -> Sequence[str]:
        return (self.rollout_id,)

    @classmethod
    def together(cls, connection: Connection, joint: Sequence[Self]) -> list[Exception | None]:
        now = time.time()
        moved = connection.execute_each(
            "UPDATE rollouts SET state = ?, attempt = ?, updated_at = ? "
            "WHERE id = ? AND state = ? AND attempt = ? RETURNING id",
            [(one.to.state, one.to.attempt, now, one.rollout_id, one.at.state, one.at.attempt) for one in joint],
        )
        moved_ids = {row[0] for row in moved}
        return [None if one.rollout_id in moved_ids else _why_not(connection, one.rollout_id, one.at) for one in joint]


@dataclass(frozen=True, slots=True)
class RequeueWrite(BatchedWrite[None]):
    rollout_id: str
    at: Position
    lost: LostAttempt
    is_excused: bool = False

    @property
    def ids(self) -> Sequence[str]:
        return (self.rollout_id,)

    @classmethod
    def together(cls, connection: Connection, joint: Sequence[Self]) -> list[Exception | None]:
        now, rows = time.time(), list[tuple[object, ...]]()
        for one in joint:
            at, to, how = one.at, one.at.to(State.QUEUED), to_json(one.lost)
            excused = int(one.is_excused)
            rows.append((to.state, to.attempt, excused, how, how, now, one.rollout_id, at.state, at.attempt))
        moved = connection.execute_each(
            "UPDATE rollouts SET state = ?, attempt = ?, node = NULL, excused = excused + ?, "
            f"lost = {APPENDED.format('lost')}, updated_at = ? "
            "WHERE id = ? AND state = ? AND attempt = ? RETURNING id, seq",
            rows,
        )
        # The next attempt samples its own tokens.
        connection.execute_each("DELETE FROM trajectories WHERE seq = ?", [(seq,) for _, seq in moved])
        moved_ids = {row[0] for row in moved}
        return [None if one.rollout_id in moved_ids else _why_not(connection, one.rollout_id, one.at) for one in joint]


@dataclass(frozen=True, slots=True)
class EndWrite(BatchedWrite[Row]):
    rollout_id: str
    at: Position
    ending: EncodedEnding
    saved: EncodedTrajectory | None
    evidence: bytes = b""

    @property
    def ids(self) -> Sequence[str]:
        return (self.rollout_id,)

    @classmethod
    def together(cls, connection: Connection, joint: Sequence[Self]) -> list[Row | Exception]:
        dialect = connection.dialect
        ids = dialect.listed([one.rollout_id for one in joint])
        where = f"WHERE {dialect.among.format('id')}"
        matches = connection.execute(f"SELECT id, seq, state, attempt FROM rollouts {where}", (ids,)).fetchall()
        rows = {row[0]: row[1:] for row in map(tuple, matches)}
        stale = {one.rollout_id: misplaced(one.rollout_id, rows.get(one.rollout_id), one.at) for one in joint}
        good = [(rows[one.rollout_id][0], one) for one in joint if stale[one.rollout_id] is None]
        _put_trajectories(connection, [(seq, one.saved, None) for seq, one in good if one.saved is not None])
        if evidence := [(seq, one.evidence) for seq, one in good if one.evidence]:
            connection.execute_each("INSERT INTO evidence (seq, evidence) VALUES (?, ?)", evidence)
        finish_many(connection, [(seq, one.ending) for seq, one in good])
        where = f"WHERE {dialect.among.format('r.id')}"
        ended = connection.execute(f"SELECT {COLUMNS[dialect]} {FROM} {where}", (ids,)).fetchall()
        by_id = {row[0]: row for row in ended}
        return [stale[one.rollout_id] or by_id[one.rollout_id] for one in joint]


def save_run(connection: Connection, rollout_id: str, at: Position, saved: EncodedTrajectory, info: str) -> None:
    seq = locate(connection, rollout_id, at)
    _put_trajectories(connection, [(seq, saved, info)])
    connection.execute("UPDATE rollouts SET state = 'eval', updated_at = ? WHERE seq = ?", (time.time(), seq))


def excuse_eval(connection: Connection, rollout_id: str, at: Position) -> None:
    seq = locate(connection, rollout_id, at)
    connection.execute("UPDATE rollouts SET evals_lost = evals_lost - 1 WHERE seq = ?", (seq,))


def _why_not(connection: Connection, rollout_id: str, at: Position) -> Stale:
    """Returns why a rollout was not moved from that position."""
    try:
        locate(connection, rollout_id, at)
    except Stale as error:
        return error
    raise AssertionError("the rollout is at the expected position, and was not moved")


def _put_trajectories(connection: Connection, rows: Sequence[tuple[int, EncodedTrajectory, str | None]]) -> None:
    """Keeps the info of an earlier save if it is None here: the final trajectory replaces only the tokens."""
    connection.execute_each(
        "INSERT INTO trajectories (seq, sampled_tokens, info, trajectory) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (seq) DO UPDATE SET sampled_tokens = excluded.sampled_tokens, "
        "info = COALESCE(excluded.info, trajectories.info), trajectory = excluded.trajectory",
        [(seq, saved.sampled_tokens, info, saved.data) for seq, saved, info in rows],
    )


def add_score(connection: Connection, rollout_id: str, score: str) -> Row:
    row = fetch(connection, rollout_id)
    if row[3] != State.ENDED:
        raise Stale(f"rollout {rollout_id} has not ended; only an ended one is scored again")
    connection.execute(
        f"UPDATE rollouts SET scores = {APPENDED.format('scores')} WHERE id = ?", (score, score, rollout_id)
    )
    return fetch(connection, rollout_id)
