"""Deletion: of a run, of acknowledged traces, and of what is older than the retention period.

Age is measured by the store's own clock (`_clock`), from the end of a rollout, group, draw or evaluation.

Invariants. A sweep deletes nothing of an open group or of a running evaluation. A group that waits for a batch of its
draw, or whose batch was not acknowledged, is kept while the draw is active, and then as long as anything else. Rollouts
are deleted before their group, groups before their draw, all of them before their run.

Each deletion takes `CHUNK` rows, and the caller repeats it until no row is left: other writes run in between. A reader
finds the rows that are due; the transaction that deletes them checks them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.core.failure import InvalidRequest, NotFound
from rollyard.store.base import Stale, eval_items
from rollyard.store.sql.dialect import Connection, Row
from rollyard.store.sql.groups import forget_items
from rollyard.store.sql.queue import Steps
from rollyard.store.sql.writes import SLICE, sliced

CHUNK = 50
"""Rollouts deleted in one operation: at up to 0.5 ms each, other writes wait about 25 ms for it."""

LEAVINGS = 1000
"""Leavings that are read at once: about 2 ms."""

Place = tuple[float, int]
"""kept_from and seq: the position of a sweep."""

START: Place = (-1.0, 0)

_IS_DUE = {
    "rollouts": """x.ended_seq IS NOT NULL AND x.kept_from < ? AND NOT EXISTS (
        SELECT 1 FROM groups g LEFT JOIN draws d ON d.id = g.draw WHERE g.id = x."group" AND
        (g.state = 'open' OR (g.is_held = 1 AND (d.is_active = 1 OR d.kept_from >= ?))))
        AND NOT EXISTS (SELECT 1 FROM evals e WHERE e.run = x.run AND e.is_active = 1)""",
    "groups": """x.kept_from < ? AND x.state <> 'open' AND NOT EXISTS (
        SELECT 1 FROM draws d WHERE d.id = x.draw AND x.is_held = 1 AND (d.is_active = 1 OR d.kept_from >= ?))
        AND NOT EXISTS (SELECT 1 FROM rollouts r WHERE r."group" = x.id)""",
    "draws": """x.kept_from < ? AND x.is_active = 0 AND NOT EXISTS (SELECT 1 FROM groups g WHERE g.draw = x.id)""",
    "evals": "x.kept_from < ? AND x.is_active = 0",
    "tombstones": "x.kept_from < ?",
    "runs": """x.kept_from < ? AND x.is_deleting = 0
        AND NOT EXISTS (SELECT 1 FROM rollouts r WHERE r.run = x.id)
        AND NOT EXISTS (SELECT 1 FROM groups g WHERE g.run = x.id)
        AND NOT EXISTS (SELECT 1 FROM draws d WHERE d.run = x.id)
        AND NOT EXISTS (SELECT 1 FROM evals e WHERE e.run = x.id)""",
}
"""In the order of a sweep. Every `?` is the time before which something must have ended."""

TABLES = tuple(_IS_DUE)


def due(connection: Connection, table: str, before: float, after: Place) -> list[Place]:
    """Returns the next rows of a table that may be deleted."""
    is_due = _IS_DUE[table]
    rows = connection.execute(
        f"SELECT x.kept_from, x.seq FROM {table} x WHERE {is_due} AND (x.kept_from, x.seq) > (?, ?) "
        "ORDER BY x.kept_from, x.seq LIMIT ?",
        (*[before] * is_due.count("?"), *after, CHUNK),
    ).fetchall()
    return [(row[0], row[1]) for row in rows]


def forget(connection: Connection, table: str, before: float, places: Sequence[Place]) -> Steps[list[str]]:
    """Deletes those of the rows that are still due; returns their ids."""
    is_due, deleted = _IS_DUE[table], list[str]()
    for _, seq in places:
        row = connection.execute(
            f"SELECT x.seq, x.id FROM {table} x WHERE x.seq = ? AND {is_due}", (seq, *[before] * is_due.count("?"))
        ).fetchone()
        if row is None:
            continue
        if table == "rollouts":
            _forget_rollout(connection, row)
        else:
            if table == "draws":
                yield from forget_items(connection, row[1])
                yield from _forget_batches(connection, row[1])
            elif table == "evals":
                yield from forget_items(connection, eval_items(row[1]))
            elif table == "runs":
                yield from _forget_tombstones(connection, row[1])
            connection.execute(f"DELETE FROM {table} WHERE seq = ?", (seq,))
        deleted.append(row[1])
        yield
    return deleted


def forget_batches(connection: Connection, before: float) -> int:
    """Deletes old batches before the last acknowledged one of their draw, to which a rewind may still go back."""
    return connection.execute(
        "DELETE FROM batches WHERE (draw, number) IN (SELECT b.draw, b.number FROM batches b "
        "JOIN draws d ON d.id = b.draw WHERE b.kept_from < ? AND b.number < d.acked LIMIT ?)",
        (before, CHUNK),
    ).rowcount


def save_clock(connection: Connection) -> None:
    connection.execute("UPDATE meta SET value = ? WHERE key = 'clock_ms'", (int(connection.clock.now() * 1000),))


def counted_s(connection: Connection) -> float:
    """Returns the value of the clock when it was last saved."""
    (counted_ms,) = connection.execute("SELECT value FROM meta WHERE key = 'clock_ms'").fetchone()
    return counted_ms / 1000


# --- a run --------------------------------------------------------------------------------------------


def forget_of_run(connection: Connection, run_id: str) -> Steps[int]:
    """Deletes a run's ended rollouts, then the run with its draws and groups. `Stale` while a rollout has not ended.
    Returns the number of deleted rollouts; 0 when the run is deleted."""
    if connection.execute("SELECT 1 FROM runs WHERE id = ?", (run_id,)).fetchone() is None:
        raise NotFound(f"there is no run {run_id!r}")
    (live,) = connection.execute(
        "SELECT COUNT(*) FROM rollouts WHERE run = ? AND ended_seq IS NULL", (run_id,)
    ).fetchone()
    if live:
        raise Stale(f"run {run_id} has {live} rollouts that have not ended")
    rows = connection.execute("SELECT seq, id FROM rollouts WHERE run = ? LIMIT ?", (run_id, CHUNK)).fetchall()
    for row in rows:
        _forget_rollout(connection, row)
        yield
    if len(rows) < CHUNK:
        yield from _forget_draws(connection, run_id)
        yield from _forget_tombstones(connection, run_id)
        connection.execute("DELETE FROM runs WHERE id = ?", (run_id,))
        return 0
    return len(rows)


def _forget_draws(connection: Connection, run_id: str) -> Steps[None]:
    """Deletes a run's draws, groups and evaluations, after its rollouts."""
    for (draw_id,) in connection.execute("SELECT id FROM draws WHERE run = ?", (run_id,)).fetchall():
        yield from forget_items(connection, draw_id)
        yield from _forget_batches(connection, draw_id)
    for (eval_id,) in connection.execute("SELECT id FROM evals WHERE run = ?", (run_id,)).fetchall():
        yield from forget_items(connection, eval_items(eval_id))
    for table in ("draws", "groups", "evals"):
        yield from _forget_rows(connection, table, run_id)


def _forget_tombstones(connection: Connection, run_id: str) -> Steps[None]:
    """Deletes the cancels of a run's unknown ids: they must not end rollouts of a later run of that name."""
    yield from _forget_rows(connection, "tombstones", run_id)


def _forget_rows(connection: Connection, table: str, run_id: str) -> Steps[None]:
    while connection.execute(
        f"DELETE FROM {table} WHERE seq IN (SELECT seq FROM {table} WHERE run = ? LIMIT ?)", (run_id, SLICE)
    ).rowcount:
        yield


def _forget_batches(connection: Connection, draw_id: str) -> Steps[None]:
    while connection.execute(
        "DELETE FROM batches WHERE draw = ? AND number IN (SELECT number FROM batches WHERE draw = ? LIMIT ?)",
        (draw_id, draw_id, SLICE),
    ).rowcount:
        yield


# --- acknowledgements ---------------------------------------------------------------------------------


def acknowledge(connection: Connection, run_id: str, up_to: int) -> Steps[int]:
    """Deletes trajectories of a run's rollouts that ended up to there; returns how many. Keeps those of groups that are
    open, that wait for a batch of their draw, or whose batch was not acknowledged.

    It starts where the last acknowledgement ended, or before the first rollout of a group that was open then. It does
    not visit a draw's groups again: the acknowledgement of their batch deletes theirs."""
    run = connection.execute("SELECT acked FROM runs WHERE id = ?", (run_id,)).fetchone()
    if run is None:
        raise NotFound(f"there is no run {run_id!r}")
    (last,) = connection.execute("SELECT value FROM meta WHERE key = 'ended_seq'").fetchone()
    if up_to > last:
        raise InvalidRequest(f"the cursor e:{up_to} is ahead of everything that has ended (e:{last})")
    rows = connection.execute(
        "SELECT r.seq, r.id FROM rollouts r JOIN trajectories USING (seq) "
        "WHERE r.run = ? AND r.ended_seq > ? AND r.ended_seq <= ? AND NOT EXISTS (SELECT 1 FROM groups g WHERE "
        "g.id = r.\"group\" AND (g.state = 'open' OR (g.draw IS NOT NULL AND g.is_held = 1))) LIMIT ?",
        (run_id, run[0], up_to, CHUNK),
    ).fetchall()
    for row in rows:
        _forget_trajectory(connection, row)
        yield
    if len(rows) < CHUNK:
        (first,) = connection.execute(
            'SELECT MIN(r.ended_seq) FROM rollouts r JOIN groups g ON g.id = r."group" '
            "WHERE r.run = ? AND r.ended_seq > ? AND r.ended_seq <= ? AND g.state = 'open' AND g.draw IS NULL",
            (run_id, run[0], up_to),
        ).fetchone()
        acked = up_to if first is None else first - 1
        connection.execute("UPDATE runs SET acked = ? WHERE id = ? AND acked < ?", (acked, run_id, acked))
    return len(rows)


def acknowledge_draw(connection: Connection, draw_id: str, batch: int) -> Steps[int]:
    """Releases the groups of batches up to that one and deletes their traces. Returns the number of groups."""
    groups = connection.execute(
        "SELECT seq, id FROM groups WHERE draw = ? AND batch <= ? AND is_held = 1 LIMIT ?", (draw_id, batch, CHUNK)
    ).fetchall()
    for seq, group_id in groups:
        rows = connection.execute(
            'SELECT r.seq, r.id FROM rollouts r JOIN trajectories USING (seq) WHERE r."group" = ? '
            'AND r.id = r."group" || \'-\' || r."index"',
            (group_id,),
        ).fetchall()
        for row in rows:
            _forget_trajectory(connection, row)
        connection.execute("UPDATE groups SET is_held = 0 WHERE seq = ?", (seq,))
        yield
    return len(groups)


def _forget_trajectory(connection: Connection, row: Row) -> None:
    seq, rollout_id = row
    connection.execute("INSERT INTO leavings VALUES (?) ON CONFLICT (id) DO NOTHING", (rollout_id,))
    connection.execute("DELETE FROM trajectories WHERE seq = ?", (seq,))
    connection.execute("DELETE FROM evidence WHERE seq = ?", (seq,))


def _forget_rollout(connection: Connection, row: Row) -> None:
    seq, rollout_id = row
    connection.execute("INSERT INTO leavings VALUES (?) ON CONFLICT (id) DO NOTHING", (rollout_id,))
    (body,) = connection.execute("DELETE FROM rollouts WHERE seq = ? RETURNING body", (seq,)).fetchone()
    if body is not None:
        connection.execute(
            "DELETE FROM bodies WHERE id = ? AND NOT EXISTS (SELECT 1 FROM rollouts WHERE body = ?)", (body, body)
        )


def forget_leavings(connection: Connection, ids: Sequence[str]) -> Steps[None]:
    """Removes ids whose artifacts were deleted."""
    for few in sliced(ids):
        among, listed = connection.dialect.among.format("id"), connection.dialect.listed(list(few))
        connection.execute(f"DELETE FROM leavings WHERE {among}", (listed,))
        yield


def leavings(connection: Connection, after: str) -> list[str]:
    """Returns the next ids whose artifacts are to be deleted, `LEAVINGS` at most."""
    rows = connection.read_rows("id", "FROM leavings WHERE id > ? ORDER BY id LIMIT ?", (after, LEAVINGS))
    return [row[0] for row in rows]


def leavings_among(connection: Connection, ids: Sequence[str]) -> list[str]:
    dialect = connection.dialect
    rows = connection.read_rows("id", f"FROM leavings WHERE {dialect.among.format('id')}", (dialect.listed(ids),))
    return [row[0] for row in rows]
