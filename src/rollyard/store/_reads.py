"""What is read, one function per question. Each runs in a reader's thread, on its own snapshot.

A question is answered in one row: where there are many, SQLite puts them into one JSON array. Each row that Python
steps to would cost the thread the interpreter lock, and under a busy loop a wait to get it back (see `_writer`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any

from rollyard.core import EngineSpec, Json, Rollout, Run, State, Trajectory
from rollyard.core.failure import InvalidRequest, NotFound
from rollyard.store._rows import COLUMNS, FROM, fetch, parse_cursor, to_rollout
from rollyard.store.base import Page, QueuedRow
from rollyard.store.codec import decode_trajectory, from_json

PAGE = 1000
"""Rollouts on one page at most."""


def get_run(connection: sqlite3.Connection, run_id: str) -> Run:
    row = connection.execute("SELECT record FROM runs WHERE id = ?", (run_id,)).fetchone()
    if row is None:
        raise NotFound(f"there is no run {run_id!r}")
    return from_json(row[0], Run)


def list_runs(connection: sqlite3.Connection) -> tuple[Run, ...]:
    """In the order in which they were made."""
    (runs,) = connection.execute(
        "SELECT json_group_array(json(record)) FROM (SELECT record FROM runs ORDER BY seq LIMIT -1)"
    ).fetchone()
    return from_json(runs, tuple[Run, ...])


def engines(connection: sqlite3.Connection) -> tuple[EngineSpec, ...]:
    rows = connection.execute("SELECT record FROM engines ORDER BY rowid").fetchall()
    return tuple(from_json(record, EngineSpec) for (record,) in rows)


def get(connection: sqlite3.Connection, rollout_id: str) -> Rollout:
    return to_rollout(fetch(connection, rollout_id))


def trajectory(connection: sqlite3.Connection, rollout_id: str) -> bytes | None:
    """Encoded: a service may pass the bytes on."""
    row = connection.execute(
        "SELECT j.trajectory FROM rollouts r LEFT JOIN trajectories j USING (seq) WHERE r.id = ?", (rollout_id,)
    ).fetchone()
    if row is None:
        raise NotFound(f"there is no rollout {rollout_id!r}")
    return row[0]


def saved_run(connection: sqlite3.Connection, rollout_id: str) -> tuple[Trajectory, Mapping[str, Json]] | None:
    row = connection.execute(
        "SELECT j.trajectory, j.info FROM rollouts r JOIN trajectories j USING (seq) "
        "WHERE r.id = ? AND j.info IS NOT NULL",
        (rollout_id,),
    ).fetchone()
    return None if row is None else (decode_trajectory(row[0]), from_json(row[1], dict[str, Json]))


def page(
    connection: sqlite3.Connection,
    *,
    state: State | None,
    run: str | None,
    group: str | None,
    after: str | None,
    limit: int,
) -> Page:
    if not 1 <= limit <= PAGE:
        raise InvalidRequest(f"limit is {limit}; it is from 1 to {PAGE}")
    order = "e" if state is State.ENDED else "s"
    key = "r.ended_seq" if order == "e" else "r.seq"
    where, values = [f"{key} > ?"], list[object]([parse_cursor(after, order) if after is not None else 0])
    if state is not None and order == "s":
        where, values = [*where, "r.state = ?"], [*values, state]
    if run is not None:
        where, values = [*where, "r.run = ?"], [*values, run]
    if group is not None:
        where, values = [*where, 'r."group" = ?'], [*values, group]
    (rows,) = connection.execute(
        f"SELECT json_group_array(json(row)) FROM (SELECT json_array({COLUMNS}) AS row {FROM} "
        f"WHERE {' AND '.join(where)} ORDER BY {key} LIMIT ?)",
        (*values, limit),
    ).fetchone()
    rollouts = tuple(to_rollout(row) for row in from_json(rows, list[list[Any]]))
    if not rollouts or (order == "s" and len(rollouts) < limit):
        return Page(rollouts, None)
    return Page(rollouts, f"{order}:{rollouts[-1].ended_seq if order == 'e' else rollouts[-1].seq}")


def queued(connection: sqlite3.Connection) -> tuple[QueuedRow, ...]:
    record = "json_object('id', id, 'run', run, 'priority', priority, 'seq', seq, 'attempt', attempt)"
    (rows,) = connection.execute(
        f"SELECT json_group_array(json(row)) FROM "
        f"(SELECT {record} AS row FROM rollouts WHERE state = 'queued' ORDER BY seq LIMIT -1)"
    ).fetchone()
    return from_json(rows, tuple[QueuedRow, ...])


def counts(connection: sqlite3.Connection) -> dict[str, int]:
    """Every state is named, also with 0."""
    (found,) = connection.execute(
        "SELECT json_group_object(state, n) FROM (SELECT state, COUNT(*) AS n FROM rollouts GROUP BY state)"
    ).fetchone()
    return {state.value: 0 for state in State} | from_json(found, dict[str, int])
