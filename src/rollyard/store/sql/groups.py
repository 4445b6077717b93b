"""Groups, draws, batches and evaluations in the store: one function per operation or query.

A change of a draw is one `Decision`: new rollouts, changed groups, the draw's progress, an opened or closed batch, all
in one transaction. So after a kill, the service finds either the whole decision or no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollyard.core import Batch, Draw, Group, GroupState
from rollyard.core.failure import IdConflict, NotFound, SourceClosed
from rollyard.store.base import EvalRecord, GroupAxis, GroupCount, eval_items
from rollyard.store.codec import from_json
from rollyard.store.sql import writes
from rollyard.store.sql.dialect import Connection
from rollyard.store.sql.queue import Steps

RETAINED_STATES = (GroupState.OPEN, GroupState.COMPLETE, GroupState.DELIVERED)

ITEMS = 1000
"""Tasks of a draw that are deleted in one statement: about 2 ms."""

EncodedGroup = tuple[Group, str]


def step(
    connection: Connection,
    rows: Sequence[writes.NewRow],
    groups: Sequence[EncodedGroup],
    draw: tuple[Draw, str] | None,
    batches: Sequence[tuple[Batch, str]],
    undone_after: int | None,
) -> Steps[list[Any]]:
    """Applied atomically. Returns the rollouts as stored."""
    stored: list[Any] = []
    if rows:
        stored = yield from writes.submit(connection, rows)
    for group, record in groups:
        _put_group(connection, group, record)
        yield
    if draw is not None:
        put = connection.execute(
            "UPDATE draws SET is_active = ?, acked = ?, kept_from = ?, record = ? WHERE id = ?",
            (int(draw[0].is_active), draw[0].progress.acked, connection.clock.now(), draw[1], draw[0].id),
        )
        if not put.rowcount:
            raise NotFound(f"there is no draw {draw[0].id!r}")
        if undone_after is not None:
            connection.execute("DELETE FROM batches WHERE draw = ? AND number > ?", (draw[0].id, undone_after))
    for batch, record in batches:
        connection.execute(
            "INSERT INTO batches (draw, number, record, kept_from) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (draw, number) DO UPDATE SET record = excluded.record, kept_from = excluded.kept_from",
            (batch.draw, batch.number, record, connection.clock.now()),
        )
    return stored


def _put_group(connection: Connection, group: Group, record: str, digest: str = "") -> None:
    if connection.execute("SELECT 1 FROM runs WHERE id = ?", (group.run,)).fetchone() is None:
        raise NotFound(f"there is no run {group.run!r}")  # deleted: a group written now would be in a later run
    put = connection.execute(
        "INSERT INTO groups (id, run, draw, state, batch, place, is_held, digest, updated_at, kept_from, record) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET state = excluded.state, "
        "batch = excluded.batch, place = excluded.place, is_held = excluded.is_held, "
        "updated_at = excluded.updated_at, kept_from = excluded.kept_from, record = excluded.record "
        "WHERE groups.draw = excluded.draw OR (groups.draw IS NULL AND excluded.draw IS NULL) RETURNING seq",
        (
            group.id, group.run, group.draw, group.state, group.batch, group.place,
            int(group.state in RETAINED_STATES), digest, group.updated_at, connection.clock.now(), record,
        ),
    ).fetchone()  # fmt: skip
    if put is None:
        raise IdConflict(f"group {group.id!r} already exists, and does not belong to this draw")


def put_groups(
    connection: Connection, groups: Sequence[tuple[Group, str, str]], rows: Sequence[writes.NewRow]
) -> Steps[tuple[list[str], list[Any]]]:
    """Stores new groups with their rollouts; an existing group with the same body is unchanged. Returns the records.
    `IdConflict` if a rollout of a new group exists: it would never be reported as a member."""
    records, created = list[str](), set[str]()
    for group, record, digest in groups:
        existing = connection.execute("SELECT digest, record FROM groups WHERE id = ?", (group.id,)).fetchone()
        if existing is None:
            _put_group(connection, group, record, digest)
            created.add(group.id)
        elif existing[0] != digest:
            raise IdConflict(f"group {group.id!r} already exists, with another body")
        records.append(record if existing is None else existing[1])
        yield
    stored = yield from writes.submit(connection, [new for new in rows if new.rollout.group in created])
    return records, stored


def put_draw(connection: Connection, draw: Draw, record: str, digest: str) -> str:
    """Idempotent like a submit. Returns the record as stored."""
    existing = connection.execute("SELECT digest, record FROM draws WHERE id = ?", (draw.id,)).fetchone()
    if existing is None:
        _require_run(connection, draw.run)
        connection.execute(
            "INSERT INTO draws (id, run, digest, is_active, kept_from, record) VALUES (?, ?, ?, ?, ?, ?)",
            (draw.id, draw.run, digest, int(draw.is_active), connection.clock.now(), record),
        )
        return record
    if existing[0] != digest:
        raise IdConflict(f"draw {draw.id!r} already exists, with another body")
    return existing[1]


def put_items(connection: Connection, draw_id: str, first: int, tasks: Sequence[str]) -> Steps[None]:
    yield from forget_items(connection, draw_id, first)
    for few in writes.sliced(list(enumerate(tasks, first))):
        connection.execute_each(
            "INSERT INTO draw_items VALUES (?, ?, NULL, ?)", [(draw_id, number, task) for number, task in few]
        )
        yield


def forget_items(connection: Connection, draw_id: str, first: int = 0) -> Steps[None]:
    """Deletes its tasks from number `first` on."""
    while (
        connection.execute(
            "DELETE FROM draw_items WHERE draw = ? AND item IN "
            "(SELECT item FROM draw_items WHERE draw = ? AND item >= ? LIMIT ?)",
            (draw_id, draw_id, first, ITEMS),
        ).rowcount
        == ITEMS
    ):
        yield


def forget_unowned_items(connection: Connection) -> None:
    """Deletes the tasks of draws and evaluations that were never stored, because the service ended before that."""
    # One index lookup for each draw, not one for each of its tasks.
    names = connection.execute(
        "WITH RECURSIVE names (draw) AS (SELECT MIN(draw) FROM draw_items UNION ALL "
        "SELECT (SELECT MIN(i.draw) FROM draw_items i WHERE i.draw > names.draw) FROM names "
        "WHERE names.draw IS NOT NULL) SELECT draw FROM names WHERE draw IS NOT NULL "
        "AND NOT EXISTS (SELECT 1 FROM draws d WHERE d.id = names.draw) "
        "AND NOT EXISTS (SELECT 1 FROM evals e WHERE e.id = substr(names.draw, ?) AND names.draw LIKE ?)",
        (len(eval_items("")) + 1, eval_items("%")),
    ).fetchall()
    for (name,) in names:
        connection.execute("DELETE FROM draw_items WHERE draw = ?", (name,))


def push_items(
    connection: Connection, draw_id: str, items: Sequence[tuple[str | None, str]], closed: str | None
) -> Steps[int]:
    """Appends tasks; one whose name exists is not added again. Returns the new number of tasks."""
    (count,) = connection.execute("SELECT COUNT(*) FROM draw_items WHERE draw = ?", (draw_id,)).fetchone()
    for name, task in items:
        if name is not None:
            existing = connection.execute(
                "SELECT task FROM draw_items WHERE draw = ? AND name = ?", (draw_id, name)
            ).fetchone()
            if existing is not None:
                if existing[0] != task:
                    raise IdConflict(f"task {name!r} was pushed before, with another body")
                continue
        if closed is not None:
            raise SourceClosed(closed)
        connection.execute("INSERT INTO draw_items VALUES (?, ?, ?, ?)", (draw_id, count, name, task))
        count += 1
        yield
    return count


def put_eval(connection: Connection, record: EvalRecord, encoded: str, digest: str) -> str:
    """Idempotent like a submit; with an empty digest it changes an existing evaluation."""
    existing = connection.execute("SELECT digest, record FROM evals WHERE id = ?", (record.id,)).fetchone()
    stands = (int(record.state == "running"), connection.clock.now(), encoded)
    if existing is None and not digest:
        raise NotFound(f"there is no evaluation {record.id!r}")
    if existing is None:
        _require_run(connection, record.run)
        connection.execute(
            "INSERT INTO evals (id, run, digest, is_active, kept_from, record) VALUES (?, ?, ?, ?, ?, ?)",
            (record.id, record.run, digest, *stands),
        )
        return encoded
    if not digest:
        connection.execute(
            "UPDATE evals SET is_active = ?, kept_from = ?, record = ? WHERE id = ?", (*stands, record.id)
        )
        return encoded
    if existing[0] != digest:
        raise IdConflict(f"evaluation {record.id!r} already exists, with another body")
    return existing[1]


def _require_run(connection: Connection, run_id: str) -> None:
    """Raises `NotFound` if the run does not exist or is being deleted, perhaps only since the caller's check."""
    row = connection.execute("SELECT is_deleting FROM runs WHERE id = ?", (run_id,)).fetchone()
    if row is None or row[0]:
        raise NotFound(f"there is no run {run_id!r}" if row is None else f"run {run_id!r} is being deleted")


# --- reading ------------------------------------------------------------------------------------------


def get_group(connection: Connection, group_id: str) -> Group:
    row = connection.execute("SELECT record FROM groups WHERE id = ?", (group_id,)).fetchone()
    if row is None:
        raise NotFound(f"there is no group {group_id!r}")
    return from_json(row[0], Group)


def count_groups(connection: Connection, run_id: str, by: GroupAxis, width: int) -> tuple[GroupCount, ...]:
    """Reads the row of each group of the run."""
    dialect = connection.dialect
    version, tokens = (dialect.integer_in("record", path) for path in ("newest_version", "stats.sampled_tokens"))
    place = (
        dialect.floor.format(f"updated_at / {width:d}")
        if by == "time"
        else f"CASE WHEN {version} >= 0 THEN {version} / {width:d} END"
    )
    rows = connection.read_rows(
        "c.place, c.state, c.number, c.tokens",
        f"FROM (SELECT {place} AS place, state, COUNT(*) AS number, COALESCE(SUM({tokens}), 0) AS tokens "
        "FROM groups WHERE run = ? GROUP BY 1, 2) AS c ORDER BY c.place, c.state",
        (run_id,),
    )
    return tuple(
        GroupCount(None if place is None else int(place), GroupState(state), int(number), int(tokens))
        for place, state, number, tokens in rows
    )


def list_groups(
    connection: Connection,
    runs: Sequence[str] | None,
    draw: str | None,
    state: GroupState | None,
    before: int | None,
    limit: int,
) -> tuple[tuple[Group, ...], int | None]:
    """Newest first."""
    where, values = list[str](), list[object]()
    if runs is not None and len(runs) == 1:
        where, values = [*where, "run = ?"], [*values, runs[0]]
    elif runs is not None:
        dialect = connection.dialect
        where, values = [*where, dialect.among.format("run")], [*values, dialect.listed(runs)]
    for column, value in (("draw = ?", draw), ("state = ?", state), ("seq < ?", before)):
        if value is not None:
            where, values = [*where, column], [*values, value]
    conditions = f"WHERE {' AND '.join(where)}" if where else ""
    rows = connection.read_rows(
        "seq, record", f"FROM groups {conditions} ORDER BY seq DESC LIMIT ?", (*values, limit + 1)
    )
    groups = from_json(f"[{','.join(row[1] for row in rows[:limit])}]", tuple[Group, ...])
    return groups, rows[limit - 1][0] if len(rows) > limit else None


def unfinished_groups(connection: Connection) -> tuple[Group, ...]:
    clauses = "FROM groups WHERE state IN ('open', 'complete') ORDER BY seq"
    return connection.read_records("record", clauses, (), tuple[Group, ...])


def orphans(connection: Connection) -> tuple[str, ...]:
    rows = connection.execute(
        'SELECT r.id FROM rollouts r JOIN groups g ON g.id = r."group" '
        "WHERE r.ended_seq IS NULL AND g.state != 'open' AND r.id = g.id || '-' || r.\"index\""
    ).fetchall()
    return tuple(row[0] for row in rows)


def delivered_groups(connection: Connection, draw_id: str, after: int, limit: int) -> tuple[Group, ...]:
    clauses = "FROM groups WHERE draw = ? AND place > ? ORDER BY place LIMIT ?"
    return connection.read_records("record", clauses, (draw_id, after, limit), tuple[Group, ...])


def get_draw(connection: Connection, draw_id: str) -> Draw:
    row = connection.execute("SELECT record FROM draws WHERE id = ?", (draw_id,)).fetchone()
    if row is None:
        raise NotFound(f"there is no draw {draw_id!r}")
    return from_json(row[0], Draw)


def list_draws(connection: Connection, runs: Sequence[str] | None) -> tuple[Draw, ...]:
    """In order of creation."""
    if runs is None:
        return connection.read_records("record", "FROM draws ORDER BY seq", (), tuple[Draw, ...])
    dialect = connection.dialect
    condition, value = dialect.among.format("run"), dialect.listed(runs)
    return connection.read_records("record", f"FROM draws WHERE {condition} ORDER BY seq", (value,), tuple[Draw, ...])


def get_item(connection: Connection, draw_id: str, item: int) -> dict[str, Any]:
    row = connection.execute("SELECT task FROM draw_items WHERE draw = ? AND item = ?", (draw_id, item)).fetchone()
    if row is None:
        raise NotFound(f"draw {draw_id!r} has no task {item}")
    return from_json(row[0], dict[str, Any])


def count_items(connection: Connection, draw_id: str) -> int:
    (count,) = connection.execute("SELECT COUNT(*) FROM draw_items WHERE draw = ?", (draw_id,)).fetchone()
    return int(count)


def list_batches(connection: Connection, draw_id: str, before: int | None, limit: int) -> tuple[Batch, ...]:
    rows = connection.execute(
        "SELECT record FROM batches WHERE draw = ? AND number < ? ORDER BY number DESC LIMIT ?",
        (draw_id, 1 << 62 if before is None else before, limit),
    ).fetchall()
    return tuple(from_json(record, Batch) for (record,) in rows)


def get_batch(connection: Connection, draw_id: str, number: int) -> Batch:
    row = connection.execute("SELECT record FROM batches WHERE draw = ? AND number = ?", (draw_id, number)).fetchone()
    if row is None:
        raise NotFound(f"draw {draw_id!r} has no batch {number}")
    return from_json(row[0], Batch)


def get_eval(connection: Connection, eval_id: str) -> EvalRecord:
    row = connection.execute("SELECT record FROM evals WHERE id = ?", (eval_id,)).fetchone()
    if row is None:
        raise NotFound(f"there is no evaluation {eval_id!r}")
    return from_json(row[0], EvalRecord)


def list_evals(connection: Connection) -> tuple[EvalRecord, ...]:
    rows = connection.execute("SELECT record FROM evals ORDER BY seq").fetchall()
    return tuple(from_json(record, EvalRecord) for (record,) in rows)
