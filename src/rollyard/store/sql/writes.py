"""The writes of clients: runs, engines, submits, cancels. One function per operation.

Each operation is atomic; those that return `Steps` yield between their rows, so that they do not block the loop for all
of them (see `sqlite.writer`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self, TypeVar

from rollyard.core import Rollout, State
from rollyard.core.failure import IdConflict, NotFound
from rollyard.core.texts import differences
from rollyard.store.sql.dialect import Connection, Row
from rollyard.store.sql.queue import BatchedWrite, Steps
from rollyard.store.sql.rows import cancelled, fetch, find, finish, finish_many

T = TypeVar("T")

TOMBSTONES = 100_000
"""The most cancels of unknown ids that are kept; the oldest is deleted first. About 10 MB."""

SLICE = 64
"""Rows that are written before the event loop may run again: at 5 to 20 µs each in SQLite, about 1 ms."""


@dataclass(frozen=True, slots=True)
class NewRow:
    """A submission, encoded."""

    rollout: Rollout
    digest: str
    task: EncodedTask


@dataclass(frozen=True, slots=True)
class EncodedTask:
    """A task as it is stored."""

    text: str
    bytes: int
    digest: str

    @classmethod
    def of(cls, text: str) -> EncodedTask:
        encoded = text.encode()
        return cls(text, len(encoded), blake2b(encoded, digest_size=16).hexdigest())


def sliced(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(rows), SLICE):
        yield rows[first : first + SLICE]


def put_run(connection: Connection, run_id: str, digest: str, record: str) -> str:
    row = connection.execute("SELECT digest, record, is_deleting FROM runs WHERE id = ?", (run_id,)).fetchone()
    if row is None:
        connection.execute(
            "INSERT INTO runs (id, digest, record, kept_from) VALUES (?, ?, ?, ?)",
            (run_id, digest, record, connection.clock.now()),
        )
        return record
    if row[2]:
        raise IdConflict(f"run {run_id!r} is being deleted: create it again afterwards")
    if row[0] != digest:
        raise IdConflict(
            f"run {run_id!r} already exists, with other settings: {_changed_settings(row[1], record)}",
            remedy="Use another name, or the settings that the run has.",
        )
    connection.execute("UPDATE runs SET kept_from = ? WHERE id = ?", (connection.clock.now(), run_id))
    return row[1]


def _changed_settings(known: str, given: str) -> str:
    """Describes how the records of two runs differ, as far as their creators chose."""
    same = dict.fromkeys(("id", "created_at", "owner"))
    text = differences({**json.loads(known), **same}, {**json.loads(given), **same})
    return text or "the values are the same, but it was created with other fields or by an evaluation"


def put_engine(connection: Connection, engine_id: str, record: str) -> None:
    connection.execute(
        "INSERT INTO engines (id, record, seq) VALUES (?, ?, (SELECT COALESCE(MAX(seq), 0) + 1 FROM engines)) "
        "ON CONFLICT (id) DO UPDATE SET record = excluded.record",
        (engine_id, record),
    )


def delete_engine(connection: Connection, engine_id: str) -> None:
    connection.execute("DELETE FROM engines WHERE id = ?", (engine_id,))


@dataclass(frozen=True, slots=True)
class Submit(BatchedWrite[list[Row | Rollout]]):
    rows: Sequence[NewRow]

    @property
    def ids(self) -> Sequence[str]:
        return [new.rollout.id for new in self.rows]

    def __call__(self, connection: Connection) -> Steps[list[Row | Rollout]]:
        return submit(connection, self.rows)

    @classmethod
    def together(cls, connection: Connection, joint: Sequence[Self]) -> list[list[Row | Rollout] | Exception]:
        known = _known_runs(connection, {new.rollout.run for one in joint for new in one.rows})
        refusals = [_refusal(one.rows, known) for one in joint]
        stored = _submit_few(
            connection, [new for one, no in zip(joint, refusals, strict=True) if no is None for new in one.rows]
        )
        each = iter(stored)
        return [no or [next(each) for _ in one.rows] for one, no in zip(joint, refusals, strict=True)]


def submit(connection: Connection, rows: Sequence[NewRow]) -> Steps[list[Row | Rollout]]:
    """Returns each as stored: a new one as a Rollout, without reading it back, an old or cancelled one as its row."""
    refusal = _refusal(rows, _known_runs(connection, {new.rollout.run for new in rows}))
    if refusal is not None:
        raise refusal
    stored: list[Row | Rollout] = []
    for few in sliced(rows):
        stored += _submit_few(connection, few)
        yield
    return stored


def _known_runs(connection: Connection, runs: set[str]) -> set[str]:
    among, listed = connection.dialect.among.format("id"), connection.dialect.listed(sorted(runs))
    rows = connection.execute(f"SELECT id FROM runs WHERE {among} AND is_deleting = 0", (listed,)).fetchall()
    return {row[0] for row in rows}


def _refusal(rows: Sequence[NewRow], known_runs: set[str]) -> Exception | None:
    """Returns what is wrong with a call, before anything is written."""
    if len({new.rollout.id for new in rows}) < len(rows):
        return IdConflict("a rollout id occurs twice in one call")
    for new in rows:
        if new.rollout.run not in known_runs:
            return NotFound(f"there is no run {new.rollout.run!r}, or it is being deleted")
    return None


def _submit_few(connection: Connection, rows: Sequence[NewRow]) -> list[Row | Rollout]:
    dialect, now = connection.dialect, time.time()
    rollouts = [new.rollout for new in rows]
    bodies = _put_bodies(connection, rows)
    inserted: dict[str, int] = {
        row[0]: row[1]
        for row in connection.execute_each(
            "INSERT INTO rollouts "
            '(id, run, state, attempt, "group", "index", priority, created_at, updated_at, digest, body) '
            "VALUES (?, ?, 'queued', 1, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING RETURNING id, seq",
            [
                (
                    *(one.id, one.run, one.group, one.index, one.priority, one.created_at or now, now),
                    *(new.digest, bodies[new.task.digest]),
                )
                for one, new in zip(rollouts, rows, strict=True)
            ],
        )
    }
    ids = dialect.listed(list(inserted))
    connection.execute(f"DELETE FROM leavings WHERE {dialect.among.format('id')}", (ids,))  # reused ids
    cancels: dict[str, str] = {
        row[0]: row[1]
        for row in connection.execute(
            f"DELETE FROM tombstones WHERE {dialect.among.format('id')} RETURNING id, detail", (ids,)
        ).fetchall()
    }
    stored: list[Row | Rollout] = []
    for new in rows:
        rollout = new.rollout
        if rollout.id not in inserted:
            row = connection.execute("SELECT digest, run FROM rollouts WHERE id = ?", (rollout.id,)).fetchone()
            if tuple(row) != (new.digest, rollout.run):
                raise IdConflict(f"rollout {rollout.id!r} already exists, with another body or in another run")
            stored.append(fetch(connection, rollout.id))
            continue
        seq = inserted[rollout.id]
        if rollout.id in cancels:
            detail = cancels[rollout.id]
            connection.execute("UPDATE rollouts SET cancel_detail = ? WHERE seq = ?", (detail, seq))
            finish(connection, seq, cancelled(detail, None))
            stored.append(fetch(connection, rollout.id))
            continue
        stored.append(
            Rollout(
                id=rollout.id,
                run=rollout.run,
                task=rollout.task,
                group=rollout.group,
                index=rollout.index,
                priority=rollout.priority,
                seq=seq,
                created_at=rollout.created_at or now,
                updated_at=now,
            )
        )
    return stored


def _put_bodies(connection: Connection, rows: Sequence[NewRow]) -> dict[str, int]:
    """Stores the tasks of these rollouts, each once; returns the ids of their bodies, by digest."""
    dialect = connection.dialect
    tasks = {new.task.digest: new.task for new in rows}
    among, listed = dialect.among.format("digest"), dialect.listed(list(tasks))
    known: dict[str, int] = {
        row[0]: row[1]
        for row in connection.execute(f"SELECT digest, id FROM bodies WHERE {among}", (listed,)).fetchall()
    }
    fresh = [(digest, task.bytes, task.text) for digest, task in tasks.items() if digest not in known]
    added = connection.execute_each(
        "INSERT INTO bodies (digest, bytes, task) VALUES (?, ?, ?) RETURNING digest, id", fresh
    )
    return known | {row[0]: row[1] for row in added}


def request_cancel(connection: Connection, rollout_id: str, detail: str, run: str | None) -> Row | None:
    row = connection.execute("SELECT seq, state FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
    if row is None:
        if run is not None and _known_runs(connection, {run}):
            _put_tombstone(connection, rollout_id, run, detail)
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


def _put_tombstone(connection: Connection, rollout_id: str, run: str, detail: str) -> None:
    # Selected first: in PostgreSQL, an insert with a conflict uses up a number too, and enough repeated cancels would
    # delete the tombstones of others.
    if connection.execute("SELECT 1 FROM tombstones WHERE id = ?", (rollout_id,)).fetchone() is None:
        (number,) = connection.execute(
            "INSERT INTO tombstones (id, run, detail, created_at, kept_from) VALUES (?, ?, ?, ?, ?) RETURNING seq",
            (rollout_id, run, detail, time.time(), connection.clock.now()),
        ).fetchone()
        connection.execute("DELETE FROM tombstones WHERE seq <= ?", (number - TOMBSTONES,))


def cancel_many(connection: Connection, ids: Sequence[str], detail: str) -> Steps[list[str]]:
    """Ends and returns the queued ones; marks the others. Unknown ids are ignored."""
    among, ending = connection.dialect.among.format("id"), cancelled(detail, State.QUEUED)
    ended: list[str] = []
    for few in sliced(ids):
        listed = connection.dialect.listed(list(few))
        connection.execute(
            "UPDATE rollouts SET cancel_detail = ?, updated_at = ? "
            f"WHERE {among} AND ended_seq IS NULL AND cancel_detail IS NULL",
            (detail, time.time(), listed),
        )
        queued = connection.execute(
            f"SELECT seq, id FROM rollouts WHERE {among} AND state = 'queued' ORDER BY seq", (listed,)
        ).fetchall()
        finish_many(connection, [(row[0], ending) for row in queued])
        ended += [row[1] for row in queued]
        yield
    return ended


def begin_deletion(connection: Connection, run_id: str) -> None:
    if not connection.execute("UPDATE runs SET is_deleting = 1 WHERE id = ?", (run_id,)).rowcount:
        raise NotFound(f"there is no run {run_id!r}")
