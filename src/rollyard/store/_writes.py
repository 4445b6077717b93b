"""What is written, one function per operation. Each runs in a savepoint of its own; those that
return `Steps` yield between their rows, so that the loop is not held for all of them (see `_writer`).

Every function that moves a rollout first locates it at the position that the caller believes in (`Stale`
otherwise); the writer is alone in its transaction, so what was located stays so until the commit.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rollyard.core import LostAttempt, Position, Rollout, State
from rollyard.core.failure import IdConflict, InvalidRequest, NotFound
from rollyard.store._rows import Row, cancelled, fetch, find, finish, locate
from rollyard.store._writer import Steps
from rollyard.store.base import Stale
from rollyard.store.codec import from_json, to_json

TOMBSTONES = 100_000
"""Cancels of unknown ids that are remembered at most; the oldest goes first. About 10 MB."""

CHUNK = 50
"""Rollouts deleted in one operation: at up to 0.5 ms each, other writes wait some 25 ms for it."""


@dataclass(frozen=True, slots=True)
class NewRow:
    """A submission, encoded."""

    rollout: Rollout
    digest: str
    task: str


@dataclass(frozen=True, slots=True)
class SavedTrajectory:
    """A trajectory, encoded."""

    data: bytes | bytearray
    sampled_tokens: int


def put_run(connection: sqlite3.Connection, run_id: str, digest: str, record: str) -> str:
    row = connection.execute("SELECT digest, record FROM runs WHERE id = ?", (run_id,)).fetchone()
    if row is None:
        connection.execute("INSERT INTO runs (id, digest, record) VALUES (?, ?, ?)", (run_id, digest, record))
        return record
    if row[0] != digest:
        raise IdConflict(f"run {run_id!r} exists already, with another body")
    return row[1]


def put_engine(connection: sqlite3.Connection, engine_id: str, record: str) -> None:
    connection.execute("INSERT OR REPLACE INTO engines VALUES (?, ?)", (engine_id, record))


def delete_engine(connection: sqlite3.Connection, engine_id: str) -> None:
    connection.execute("DELETE FROM engines WHERE id = ?", (engine_id,))


def submit(connection: sqlite3.Connection, rows: Sequence[NewRow]) -> Steps[list[Row | Rollout]]:
    """Each as stored: a new one as a Rollout, without reading it back, an earlier or cancelled one as its row."""
    ids = {new.rollout.id for new in rows}
    if len(ids) < len(rows):
        raise IdConflict("a rollout id is given twice in one call")
    for run in {new.rollout.run for new in rows}:
        if connection.execute("SELECT 1 FROM runs WHERE id = ?", (run,)).fetchone() is None:
            raise NotFound(f"there is no run {run!r}")
    stored: list[Row | Rollout] = []
    for new in rows:
        stored.append(_submit_one(connection, new))
        yield
    return stored


def _submit_one(connection: sqlite3.Connection, new: NewRow) -> Row | Rollout:
    rollout, now = new.rollout, time.time()
    created_at = rollout.created_at or now
    inserted = connection.execute(
        'INSERT INTO rollouts (id, run, state, attempt, "group", "index", priority, created_at, updated_at, digest) '
        "VALUES (?, ?, 'queued', 1, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING RETURNING seq",
        (
            rollout.id, rollout.run, rollout.group, rollout.index, rollout.priority,
            created_at, now, new.digest,
        ),
    ).fetchone()  # fmt: skip
    if inserted is None:
        row = connection.execute("SELECT digest, run FROM rollouts WHERE id = ?", (rollout.id,)).fetchone()
        if row != (new.digest, rollout.run):
            raise IdConflict(f"rollout {rollout.id!r} exists already, with another body or in another run")
        return fetch(connection, rollout.id)
    (seq,) = inserted
    connection.execute("INSERT INTO tasks (seq, task) VALUES (?, ?)", (seq, new.task))
    connection.execute("DELETE FROM leavings WHERE id = ?", (rollout.id,))  # an id that is used again
    tombstone = connection.execute("SELECT detail FROM tombstones WHERE id = ?", (rollout.id,)).fetchone()
    if tombstone is not None:
        connection.execute("DELETE FROM tombstones WHERE id = ?", (rollout.id,))
        connection.execute("UPDATE rollouts SET cancel_detail = ? WHERE seq = ?", (tombstone[0], seq))
        finish(connection, seq, cancelled(tombstone[0], None))
        return fetch(connection, rollout.id)
    return Rollout(
        id=rollout.id,
        run=rollout.run,
        task=rollout.task,
        group=rollout.group,
        index=rollout.index,
        priority=rollout.priority,
        seq=seq,
        created_at=created_at,
        updated_at=now,
    )


def request_cancel(connection: sqlite3.Connection, rollout_id: str, detail: str) -> Row | None:
    row = connection.execute("SELECT seq, state FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
    if row is None:
        new = connection.execute(
            "INSERT INTO tombstones (id, detail, created_at) VALUES (?, ?, ?) "
            "ON CONFLICT (id) DO NOTHING RETURNING seq",
            (rollout_id, detail, time.time()),
        ).fetchone()
        if new is not None:
            connection.execute("DELETE FROM tombstones WHERE seq <= ?", (new[0] - TOMBSTONES,))
        return None
    seq, state = row
    if state != State.ENDED:
        connection.execute(
            "UPDATE rollouts SET cancel_detail = ?, updated_at = ? WHERE seq = ? AND cancel_detail IS NULL",
            (detail, time.time(), seq),
        )
    if state == State.QUEUED:
        finish(connection, seq, cancelled(detail, State.QUEUED))
    return find(connection, rollout_id)


def move(connection: sqlite3.Connection, rollout_id: str, at: Position, to: Position) -> None:
    moved = connection.execute(
        "UPDATE rollouts SET state = ?, attempt = ?, updated_at = ? WHERE id = ? AND state = ? AND attempt = ?",
        (to.state, to.attempt, time.time(), rollout_id, at.state, at.attempt),
    ).rowcount
    if not moved:
        locate(connection, rollout_id, at)  # says where it is instead


def requeue(
    connection: sqlite3.Connection, rollout_id: str, at: Position, lost: LostAttempt, is_excused: bool = False
) -> None:
    seq = locate(connection, rollout_id, at)
    to = at.to(State.QUEUED)
    (before,) = connection.execute("SELECT lost FROM rollouts WHERE seq = ?", (seq,)).fetchone()
    history = (*from_json(before, tuple[LostAttempt, ...]), lost)
    connection.execute(
        "UPDATE rollouts SET state = ?, attempt = ?, excused = excused + ?, lost = ?, updated_at = ? WHERE seq = ?",
        (to.state, to.attempt, is_excused, to_json(history), time.time(), seq),
    )
    connection.execute("DELETE FROM trajectories WHERE seq = ?", (seq,))  # the next attempt has tokens of its own


def save_run(connection: sqlite3.Connection, rollout_id: str, at: Position, saved: SavedTrajectory, info: str) -> None:
    seq = locate(connection, rollout_id, at)
    _put_trajectory(connection, seq, saved, info)
    connection.execute("UPDATE rollouts SET state = 'eval', updated_at = ? WHERE seq = ?", (time.time(), seq))


def excuse_eval(connection: sqlite3.Connection, rollout_id: str, at: Position) -> None:
    seq = locate(connection, rollout_id, at)
    connection.execute("UPDATE rollouts SET evals_lost = evals_lost - 1 WHERE seq = ?", (seq,))


def end(
    connection: sqlite3.Connection, rollout_id: str, at: Position, ending: str, saved: SavedTrajectory | None
) -> Row:
    seq = locate(connection, rollout_id, at)
    if saved is not None:
        _put_trajectory(connection, seq, saved, None)
    finish(connection, seq, ending)
    return fetch(connection, rollout_id)


def _put_trajectory(connection: sqlite3.Connection, seq: int, saved: SavedTrajectory, info: str | None) -> None:
    """Keeps the info of an earlier save where none is given: the final trajectory replaces only the tokens."""
    connection.execute(
        "INSERT INTO trajectories (seq, sampled_tokens, info, trajectory) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (seq) DO UPDATE SET sampled_tokens = excluded.sampled_tokens, "
        "info = COALESCE(excluded.info, info), trajectory = excluded.trajectory",
        (seq, saved.sampled_tokens, info, saved.data),
    )


def add_score(connection: sqlite3.Connection, rollout_id: str, score: str) -> Row:
    row = fetch(connection, rollout_id)
    if row[3] != State.ENDED:
        raise Stale(f"rollout {rollout_id} has not ended; only an ended one is scored again")
    connection.execute(
        "UPDATE rollouts SET scores = json_insert(scores, '$[#]', json(?)) WHERE id = ?", (score, rollout_id)
    )
    return fetch(connection, rollout_id)


# --- what is deleted, CHUNK by CHUNK; each says how many it took, and whoever calls goes on until that is 0 -----


def forget_of_run(connection: sqlite3.Connection, run_id: str) -> Steps[int]:
    """Ended rollouts of a run, then the run. `Stale` while one of its rollouts has not ended."""
    if connection.execute("SELECT 1 FROM runs WHERE id = ?", (run_id,)).fetchone() is None:
        raise NotFound(f"there is no run {run_id!r}")
    (live,) = connection.execute(
        "SELECT COUNT(*) FROM rollouts WHERE run = ? AND ended_seq IS NULL", (run_id,)
    ).fetchone()
    if live:
        raise Stale(f"run {run_id} has {live} rollouts that have not ended")
    rows = connection.execute("SELECT seq, id FROM rollouts WHERE run = ? LIMIT ?", (run_id, CHUNK)).fetchall()
    yield from _forget(connection, rows)
    if len(rows) < CHUNK:
        connection.execute("DELETE FROM runs WHERE id = ?", (run_id,))
        return 0
    return len(rows)


def acknowledge(connection: sqlite3.Connection, run_id: str, up_to: int) -> Steps[int]:
    """Trajectories of a run's rollouts that ended up to there. Begins where the last acknowledgement ended."""
    run = connection.execute("SELECT acked FROM runs WHERE id = ?", (run_id,)).fetchone()
    if run is None:
        raise NotFound(f"there is no run {run_id!r}")
    (last,) = connection.execute("SELECT value FROM meta WHERE key = 'ended_seq'").fetchone()
    if up_to > last:
        raise InvalidRequest(f"the cursor e:{up_to} is ahead of everything that has ended (e:{last})")
    rows = connection.execute(
        "SELECT r.seq, r.id FROM rollouts r JOIN trajectories USING (seq) "
        "WHERE r.run = ? AND r.ended_seq > ? AND r.ended_seq <= ? LIMIT ?",
        (run_id, run[0], up_to, CHUNK),
    ).fetchall()
    for seq, rollout_id in rows:
        connection.execute("INSERT OR IGNORE INTO leavings VALUES (?)", (rollout_id,))
        connection.execute("DELETE FROM trajectories WHERE seq = ?", (seq,))
        yield
    if len(rows) < CHUNK:
        connection.execute("UPDATE runs SET acked = MAX(acked, ?) WHERE id = ?", (up_to, run_id))
    return len(rows)


def forget_older(connection: sqlite3.Connection, before: float) -> Steps[int]:
    """Rollouts that ended, and tombstones that were left, before that moment; but not those that a group is waiting
    for, or that a live draw's trainer has not acknowledged."""
    connection.execute("DELETE FROM tombstones WHERE created_at < ?", (before,))
    rows = connection.execute(
        "SELECT seq, id FROM rollouts r WHERE ended_seq IS NOT NULL AND updated_at < ? AND NOT EXISTS ("
        'SELECT 1 FROM groups g LEFT JOIN draws d ON d.id = g.draw WHERE g.id = r."group" AND '
        "(g.state = 'open' OR (g.is_held AND d.is_active))) ORDER BY updated_at LIMIT ?",
        (before, CHUNK),
    ).fetchall()
    yield from _forget(connection, rows)
    return len(rows)


def _forget(connection: sqlite3.Connection, rows: Sequence[Row]) -> Steps[None]:
    for seq, rollout_id in rows:
        connection.execute("INSERT OR IGNORE INTO leavings VALUES (?)", (rollout_id,))
        connection.execute("DELETE FROM rollouts WHERE seq = ?", (seq,))
        yield


def name_leavings(connection: sqlite3.Connection, done: Sequence[str]) -> list[str]:
    """Forgets those whose artifacts are gone; returns the others."""
    connection.executemany("DELETE FROM leavings WHERE id = ?", [(rollout_id,) for rollout_id in done])
    return [row[0] for row in connection.execute("SELECT id FROM leavings")]
