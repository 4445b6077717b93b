"""Queries, one function each. Each runs on a reader's connection and reads the last commit.

A query is one statement, so that its result is one snapshot, and many rows are read at once (see `dialect`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollyard.core import EngineSpec, Json, Rollout, Run, State, Trajectory
from rollyard.core.failure import InvalidRequest, NotFound
from rollyard.core.ids import DEFAULT_RUN, SEPARATOR
from rollyard.store.base import ItemKind, KeptRollout, Page, QueuedRow, RunResults
from rollyard.store.codec import decode_trajectory, from_json
from rollyard.store.sql.dialect import Connection, Dialect, Row
from rollyard.store.sql.rows import BYTES, COLUMNS, FROM, fetch, parse_cursor, to_rollout, to_rollouts

LAST_SEQ = (1 << 63) - 1

MOST_SKIPPED = 100  # runs whose keys a search in the default run skips

LAST_CHARACTER = "\x7f"
"""Sorts after every character of a key."""

UNFINISHED = "r.ended_seq IS NULL AND r.state IN ('queued', 'init', 'ready', 'run', 'eval')"
"""The first condition for the index of a run, the second one for that of the states."""

PAGE = 1000
"""The most rollouts on one page."""

PAGE_BYTES = 16 << 20
"""The limit of one read; a single rollout may be larger. A task may have megabytes: a thousand of them would be more
than SQLite returns as one text, and more than a service should hold for one response."""


def get_run(connection: Connection, run_id: str) -> Run:
    row = connection.execute("SELECT record FROM runs WHERE id = ?", (run_id,)).fetchone()
    if row is None:
        raise NotFound(f"there is no run {run_id!r}")
    return from_json(row[0], Run)


def list_runs(connection: Connection) -> tuple[Run, ...]:
    """In order of creation."""
    return connection.read_records("record", "FROM runs ORDER BY seq", (), tuple[Run, ...])


def engines(connection: Connection) -> tuple[EngineSpec, ...]:
    rows = connection.execute("SELECT record FROM engines ORDER BY seq").fetchall()
    return tuple(from_json(record, EngineSpec) for (record,) in rows)


def get(connection: Connection, rollout_id: str) -> Rollout:
    return to_rollout(fetch(connection, rollout_id))


def get_many(connection: Connection, ids: Sequence[str]) -> list[Rollout]:
    """In the order given; unknown ids are left out."""
    dialect = connection.dialect
    clauses = f"{FROM} WHERE {dialect.among.format('r.id')}"
    sizes = connection.read_rows(f"r.id, {BYTES}", clauses, (dialect.listed(ids),))
    by_id: dict[str, Rollout] = {}
    while sizes:
        few = sizes[: _fitting([row[1] for row in sizes])]
        sizes = sizes[len(few) :]
        rows = connection.read_rows(COLUMNS[dialect], clauses, (dialect.listed([row[0] for row in few]),))
        rollouts = connection.offload(lambda rows=rows: to_rollouts(rows), len(rows))
        by_id |= {rollout.id: rollout for rollout in rollouts}
    return [by_id[rollout_id] for rollout_id in ids if rollout_id in by_id]


def named(connection: Connection, kind: ItemKind, id: str) -> dict[str, str]:
    """Needs one index lookup per run."""
    rows = connection.execute(
        f"SELECT id, run FROM {kind} WHERE id = ? UNION ALL "
        f"SELECT x.id, x.run FROM runs q JOIN {kind} x ON x.id = q.id || '{SEPARATOR}' || ?",
        (id, id),
    ).fetchall()
    return {row[0]: row[1] for row in rows}


def prefixed(connection: Connection, kind: ItemKind, prefix: str, runs: Sequence[str], limit: int) -> dict[str, str]:
    """Needs one index lookup per run: in the default run, the keys of each other run whose name has the prefix are
    skipped, of `MOST_SKIPPED` runs at most."""
    dialect, end = connection.dialect, prefix + LAST_CHARACTER
    found: dict[str, str] = {}
    start = prefix
    for _ in range(MOST_SKIPPED if DEFAULT_RUN in runs else 0):
        rows = _between(connection, kind, start, end, limit)
        found |= {row[0]: row[1] for row in rows if SEPARATOR not in row[0] and row[1] in runs}
        if len(rows) < limit or len(found) >= limit:
            break
        last = rows[-1][0]
        start = last.partition(SEPARATOR)[0] + SEPARATOR + LAST_CHARACTER if SEPARATOR in last else last + " "
    # A join would be a scan in PostgreSQL, which cannot estimate how few keys there are between two expressions.
    key = dialect.bytewise.format("x.id")
    first = (
        f"SELECT x.id FROM {kind} x WHERE {key} >= q.id || '{SEPARATOR}' || ? AND {key} < q.id || '{SEPARATOR}' || ? "
        f"ORDER BY {key} LIMIT 1"
    )
    among = dialect.among.format("q.id")
    firsts = connection.execute(
        f"SELECT q.id, ({first}) FROM runs q WHERE {among}", (prefix, end, dialect.listed(runs))
    ).fetchall()
    for run, first_key in firsts:
        if first_key is not None and len(found) < limit:
            rows = _between(connection, kind, first_key, f"{run}{SEPARATOR}{end}", limit)
            found |= {row[0]: row[1] for row in rows}
    return dict(list(found.items())[:limit])


def _between(connection: Connection, kind: ItemKind, start: str, end: str, limit: int) -> list[Row]:
    """Returns keys from `start` to before `end`, in order, and the run of each."""
    key = connection.dialect.bytewise.format("x.id")
    sql = f"SELECT x.id, x.run FROM {kind} x WHERE {key} >= ? AND {key} < ? ORDER BY {key} LIMIT ?"
    return connection.execute(sql, (start, end, limit)).fetchall()


def runs_of(connection: Connection, kind: ItemKind, keys: Sequence[str]) -> dict[str, str]:
    dialect = connection.dialect
    rows = connection.read_rows("id, run", f"FROM {kind} WHERE {dialect.among.format('id')}", (dialect.listed(keys),))
    return {row[0]: row[1] for row in rows}


def _fitting(sizes: Sequence[int]) -> int:
    """Returns how many rollouts, from the first on, are read at once."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > PAGE_BYTES:
            return max(1, count)
    return len(sizes)


def trajectory(connection: Connection, rollout_id: str) -> bytes | None:
    """Returns the encoded bytes, which a service may forward."""
    row = connection.execute(
        "SELECT j.trajectory FROM rollouts r LEFT JOIN trajectories j USING (seq) WHERE r.id = ?", (rollout_id,)
    ).fetchone()
    if row is None:
        raise NotFound(f"there is no rollout {rollout_id!r}")
    return row[0]


def evidence(connection: Connection, rollout_id: str) -> bytes:
    row = connection.execute(
        "SELECT e.evidence FROM rollouts r JOIN evidence e USING (seq) WHERE r.id = ?", (rollout_id,)
    ).fetchone()
    return b"" if row is None else bytes(row[0])


def encoded_trajectory(connection: Connection, rollout_id: str, max_bytes: int) -> bytes | None:
    row = connection.execute(
        "SELECT CASE WHEN length(j.trajectory) <= ? THEN j.trajectory END FROM rollouts r "
        "JOIN trajectories j USING (seq) WHERE r.id = ?",
        (max_bytes, rollout_id),
    ).fetchone()
    return None if row is None else row[0]


def kept(connection: Connection, ids: Sequence[str]) -> dict[str, KeptRollout]:
    dialect = connection.dialect
    rows = connection.read_rows(
        "r.id, r.ended_seq, CASE WHEN j.seq IS NULL THEN 0 ELSE 1 END",
        f"FROM rollouts r LEFT JOIN trajectories j USING (seq) WHERE {dialect.among.format('r.id')}",
        (dialect.listed(ids),),
    )
    return {row[0]: KeptRollout(row[1], bool(row[2])) for row in rows}


def last_ended(connection: Connection) -> int:
    (number,) = connection.execute("SELECT value FROM meta WHERE key = 'ended_seq'").fetchone()
    return int(number)


def saved_run(connection: Connection, rollout_id: str) -> tuple[Trajectory, Mapping[str, Json]] | None:
    row = connection.execute(
        "SELECT j.trajectory, j.info FROM rollouts r JOIN trajectories j USING (seq) "
        "WHERE r.id = ? AND j.info IS NOT NULL",
        (rollout_id,),
    ).fetchone()
    return None if row is None else (decode_trajectory(row[0]), from_json(row[1], dict[str, Json]))


def page(
    connection: Connection,
    *,
    state: State | None,
    runs: Sequence[str] | None,
    group: str | None,
    group_named: str | None,
    after: str | None,
    limit: int,
    is_newest_first: bool = False,
) -> Page:
    if not 1 <= limit <= PAGE:
        raise InvalidRequest(f"limit is {limit}; it must be from 1 to {PAGE}")
    dialect = connection.dialect
    is_ended = state is State.ENDED
    order = ("e" if is_ended else "s") + ("n" if is_newest_first else "")
    key = "r.ended_seq" if is_ended else "r.seq"
    start = LAST_SEQ if is_newest_first else 0
    where = [f"{key} {'<' if is_newest_first else '>'} ?"]
    values = list[object]([parse_cursor(after, order) if after is not None else start])
    if state is not None and not is_ended:
        where, values = [*where, "r.state = ?"], [*values, state]
    if group is not None:
        where, values = [*where, 'r."group" = ?'], [*values, group]
    more, their_values = _of(dialect, runs, group_named)
    where, values = [*where, *more], [*values, *their_values]
    clauses = f"{FROM} WHERE {' AND '.join(where)} ORDER BY {key}{' DESC' if is_newest_first else ''} LIMIT ?"
    sizes = [row[0] for row in connection.read_rows(BYTES, clauses, (*values, limit))]
    fitting = _fitting(sizes)
    rows = connection.read_rows(COLUMNS[dialect], clauses, (*values, fitting)) if sizes else []
    rollouts = connection.offload(lambda: tuple(to_rollouts(rows)), len(rows))
    if not rollouts or (order != "e" and len(sizes) < limit and fitting == len(sizes)):
        return Page(rollouts, None)  # not for "e": more rollouts will end
    return Page(rollouts, f"{order}:{rollouts[-1].ended_seq if is_ended else rollouts[-1].seq}")


def _of(dialect: Dialect, runs: Sequence[str] | None, group_named: str | None) -> tuple[list[str], list[object]]:
    """Returns the conditions on rollouts `r` of these runs, and of groups with that id, and their values."""
    where, values = list[str](), list[object]()
    if runs is not None and len(runs) == 1:
        where, values = [*where, "r.run = ?"], [*values, runs[0]]
    elif runs is not None:
        where, values = [*where, dialect.among.format("r.run")], [*values, dialect.listed(runs)]
    if group_named is not None:
        keys = f"SELECT id || '{SEPARATOR}' || ? FROM runs UNION ALL SELECT ?"
        where, values = [*where, f'r."group" IN ({keys})'], [*values, group_named, group_named]
    return where, values


def has_unfinished(connection: Connection, runs: Sequence[str] | None, group_named: str | None) -> bool:
    where, values = _of(connection.dialect, runs, group_named)
    # Of some runs or groups: not by the index of the states, which has the rollouts of all runs.
    unfinished = "r.ended_seq IS NULL" if where else UNFINISHED
    sql = f"SELECT 1 FROM rollouts r WHERE {' AND '.join([unfinished, *where])} LIMIT 1"
    return connection.execute(sql, values).fetchone() is not None


def queued(connection: Connection) -> tuple[QueuedRow, ...]:
    fields = "'id', id, 'run', run, 'priority', priority, 'seq', seq, 'attempt', attempt"
    record = f"{connection.dialect.json_object}({fields})"
    clauses = (
        "FROM rollouts WHERE state = 'queued' AND run NOT IN (SELECT id FROM runs WHERE is_deleting = 1) ORDER BY seq"
    )
    return connection.read_records(record, clauses, (), tuple[QueuedRow, ...])


def queued_of(connection: Connection, run_id: str, limit: int) -> list[str]:
    """Returns ids of a run's queued rollouts."""
    rows = connection.execute(
        "SELECT id FROM rollouts WHERE run = ? AND ended_seq IS NULL AND state = 'queued' LIMIT ?", (run_id, limit)
    ).fetchall()
    return [row[0] for row in rows]


def deleting_runs(connection: Connection) -> list[str]:
    return [row[0] for row in connection.execute("SELECT id FROM runs WHERE is_deleting = 1 ORDER BY seq").fetchall()]


def stored_bytes(connection: Connection, runs: Sequence[str]) -> dict[str, int]:
    dialect = connection.dialect
    rows = connection.read_rows(
        "r.run, SUM(LENGTH(j.trajectory))",
        f"FROM rollouts r JOIN trajectories j USING (seq) WHERE {dialect.among.format('r.run')} GROUP BY r.run",
        (dialect.listed(runs),),
    )
    return {row[0]: int(row[1]) for row in rows}


def count_of_run(connection: Connection, run_id: str) -> int:
    (count,) = connection.execute("SELECT COUNT(*) FROM rollouts WHERE run = ?", (run_id,)).fetchone()
    return int(count)


def results_of(connection: Connection, runs: Sequence[str] | None) -> dict[str, RunResults]:
    """Reads one index entry for each ended rollout, and the row of each other one and of the last ended one."""
    where, values = _of(connection.dialect, runs, None)
    ended, unfinished = (
        f"FROM rollouts r WHERE {' AND '.join([one, *where])}" for one in ("r.ended_seq IS NOT NULL", UNFINISHED)
    )
    rows = connection.read_rows(
        "s.run, s.state, s.rollouts, s.rewarded, s.rewards, s.trainable, COALESCE(s.active_at, l.updated_at)",
        "FROM (SELECT r.run AS run, 'ended' AS state, COUNT(*) AS rollouts, COUNT(r.reward) AS rewarded, "
        "SUM(r.reward) AS rewards, SUM(r.is_trainable) AS trainable, MAX(r.ended_seq) AS last, NULL AS active_at "
        f"{ended} GROUP BY r.run UNION ALL "
        f"SELECT r.run, r.state, COUNT(*), 0, 0.0, 0, NULL, MAX(r.updated_at) {unfinished} GROUP BY r.run, r.state"
        ") AS s LEFT JOIN rollouts l ON l.ended_seq = s.last",
        (*values, *values),
    )
    found: dict[str, RunResults] = {}
    for run, state, count, rewarded, rewards, trainable, active_at in rows:
        before = found.get(run, RunResults({}))
        found[run] = RunResults(
            states={**before.states, State(state): int(count)},
            rewarded=before.rewarded + int(rewarded),
            mean_reward=float(rewards) / int(rewarded) if rewarded else before.mean_reward,
            trainable=before.trainable + int(trainable),
            active_at=max(float(active_at), before.active_at or 0.0),
        )
    return found


def counts(connection: Connection) -> dict[str, int]:
    """Includes every state, even with 0 rollouts."""
    rows = connection.read_rows("state, COUNT(*)", "FROM rollouts GROUP BY state")
    return {state.value: 0 for state in State} | {row[0]: row[1] for row in rows}
