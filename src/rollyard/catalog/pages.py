"""Queries of the catalog: a page of rows, and the failures since a time. Each runs on a reader's connection.

A page is read newest first from the terminal order, with a limit, so that a condition that most rows meet reads few of
them. Many rows come as one JSON array: see `store.sql.dialect`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rollyard.catalog.filters import Filter
from rollyard.catalog.search import Search
from rollyard.catalog.texts import unpack
from rollyard.core import Json

LAST_SEQ = (1 << 63) - 1

MOST_COUNTED = 10_000
"""Rows up to which a total is counted: about 2 ms, or 10 ms with a search."""


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A row of a page: its number in the terminal order, its key, and the row as the API returns it."""

    seq: int
    key: str
    row: dict[str, Json]


@dataclass(frozen=True, slots=True)
class ResultPage:
    rows: tuple[FoundRow, ...] = ()
    next_seq: int | None = None  # pass as `before`; None: there are no more
    total: int = 0
    is_total_exact: bool = True
    behind: int = 0


@dataclass(frozen=True, slots=True)
class FailureCount:
    code: str
    blame: str
    count: int
    last_at: float


def page(
    connection: sqlite3.Connection, wanted: Filter, search: Search | None, before: int | None, limit: int
) -> tuple[list[FoundRow], int | None]:
    """Returns rows before that number, newest first, and the next `before`."""
    source, where, values = _source(wanted, search)
    key = "r.seq" if search is None else "words.rowid"
    where = [*where, f"{key} < ?"]
    values = [*values, LAST_SEQ if before is None else before]
    inner = f"SELECT r.seq AS seq, r.id AS id {source} WHERE {' AND '.join(where)} ORDER BY {key} DESC LIMIT ?"
    (found,) = connection.execute(
        "SELECT json_group_array(json_array(f.seq, f.id, json(c.record))) "
        f"FROM ({inner}) AS f CROSS JOIN records c ON c.seq = f.seq",
        (*values, limit + 1),
    ).fetchone()
    rows = [FoundRow(seq, id, record) for seq, id, record in _ROWS.decode(found)]
    rows.sort(key=lambda row: -row.seq)
    if search is not None:
        _add_excerpts(connection, rows[:limit], search)
    return rows[:limit], rows[limit - 1].seq if len(rows) > limit else None


def total(connection: sqlite3.Connection, wanted: Filter, search: Search | None) -> tuple[int, bool]:
    """Returns the number of rows, up to `MOST_COUNTED`, and whether it is exact."""
    source, where, values = _source(wanted, search)
    conditions = f"WHERE {' AND '.join(where)}" if where else ""
    (count,) = connection.execute(
        f"SELECT COUNT(*) FROM (SELECT 1 {source} {conditions} LIMIT ?)", (*values, MOST_COUNTED + 1)
    ).fetchone()
    return min(count, MOST_COUNTED), count <= MOST_COUNTED


def failures(
    connection: sqlite3.Connection,
    runs: Sequence[str] | None,
    since: float,
    deleted: Sequence[tuple[str, int]] = (),
) -> list[FailureCount]:
    """Returns the failures of rollouts that ended since then, the most frequent first."""
    among = "" if runs is None else "AND run IN (SELECT value FROM json_each(?))"
    values: list[object] = [since] if runs is None else [since, json.dumps(list(runs))]
    for run, last in deleted:
        among += " AND NOT (run = ? AND seq <= ?)"
        values += (run, last)
    rows = connection.execute(
        "SELECT code, blame, COUNT(*), MAX(ended_at) FROM rollouts INDEXED BY by_failure "
        f"WHERE ended_at >= ? AND code IS NOT NULL {among} GROUP BY code, blame ORDER BY 3 DESC, 1 LIMIT 100",
        values,
    ).fetchall()
    return [FailureCount(*row) for row in rows]


def _source(wanted: Filter, search: Search | None) -> tuple[str, list[str], list[object]]:
    where, values = wanted.conditions()
    if search is None:
        return "FROM rollouts r", where, values
    # CROSS JOIN: the search first, whose matches come in order, then the row of each.
    return "FROM words CROSS JOIN rollouts r ON r.seq = words.rowid", ["words MATCH ?", *where], [search.query, *values]


def _add_excerpts(connection: sqlite3.Connection, rows: Sequence[FoundRow], search: Search) -> None:
    texts = dict(
        connection.execute(
            "SELECT seq, text FROM texts WHERE seq IN (SELECT value FROM json_each(?))",
            (json.dumps([row.seq for row in rows]),),
        ).fetchall()
    )
    for row in rows:
        data = texts.get(row.seq)
        excerpt = search.excerpt("" if data is None else unpack(data))
        row.row["match"] = {"before": excerpt.before, "hit": excerpt.hit, "after": excerpt.after}


_ROWS = msgspec.json.Decoder(list[tuple[int, str, dict[str, Json]]])
