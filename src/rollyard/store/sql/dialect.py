"""One set of SQL statements for two databases, and the differences between them.

An operation or a query is a plain function over a `Connection`. Its SQL runs on both SQLite (3.35 and later) and
PostgreSQL: `?` for parameters, ON CONFLICT, RETURNING, 0 and 1 for booleans. The differences are in a `Dialect`, and in
how a connection reads many rows.

Many rows at once. For each row that Python fetches from SQLite, a reader's thread releases the interpreter lock and,
under a busy loop, waits to get it back (see `sqlite.writer`). So SQLite returns many rows as one JSON array, unless
that would exceed its maximum length (10⁹ bytes). PostgreSQL sends them in one response.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rollyard.store._clock import StoreClock
from rollyard.store.codec import from_json, to_json

T = TypeVar("T")

Row = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    json_object: str
    """The function that creates a JSON object from names and values."""

    exact: str
    """An expression that returns a float exactly as stored; `{}` is the column."""

    among: str
    """Whether a text column is one of several strings, which `listed` converts to a parameter; `{}` is the column."""

    listed: Callable[[Sequence[str]], object]

    bytewise: str
    """A text column in the order of its bytes, in which the strings with one prefix are next to each other."""

    skip_locked: str
    """At the end of a SELECT: locks its rows, and leaves out those that another transaction has locked."""

    for_share: str
    """At the end of a SELECT: its rows cannot change until the end of the transaction."""

    floor: str
    """The integer part of a number that is not negative; `{}` is the number."""

    integer_in: Callable[[str, str], str]
    """An integer in a column with JSON, by the column and the names that lead to it, with dots; NULL: it is missing."""


SQLITE = Dialect(
    json_object="json_object",
    exact="printf('%!.17g', {})",  # json_array would round it to 15 digits
    among="{} IN (SELECT value FROM json_each(?))",
    listed=to_json,
    bytewise="{} COLLATE BINARY",
    skip_locked="",  # one transaction writes at a time
    for_share="",
    floor="CAST({} AS INTEGER)",
    integer_in=lambda column, path: f"json_extract({column}, '$.{path}')",
)

POSTGRES = Dialect(
    json_object="json_build_object",
    exact="{}",
    among="{} = ANY(?::text[])",
    listed=list,
    bytewise='{} COLLATE "C"',
    skip_locked="FOR UPDATE SKIP LOCKED",
    for_share="FOR SHARE",
    floor="FLOOR({})::BIGINT",
    integer_in=lambda column, path: f"({column}::json #>> '{{{path.replace('.', ',')}}}')::BIGINT",
)


class Cursor(Protocol):
    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


class Connection(Protocol):
    @property
    def dialect(self) -> Dialect: ...

    @property
    def clock(self) -> StoreClock:
        """Only the connection that writes has one."""
        ...

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Cursor: ...

    def execute_each(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> list[Row]:
        """Executes the statement for each of the parameters; returns the returned rows, in that order."""
        ...

    def read_rows(self, columns: str, clauses: str, parameters: Sequence[Any] = (), /) -> list[Row]:
        """Returns all rows of `SELECT columns clauses`. Floats are exact only if selected by `Dialect.exact`."""
        ...

    def read_records(self, record: str, clauses: str, parameters: Sequence[Any], kind: type[T], /) -> T:
        """Returns all rows of `SELECT record clauses`, each a JSON text, decoded as one tuple."""
        ...

    def offload(self, call: Callable[[], T], rows: int, /) -> T:
        """Runs a computation on that many rows without blocking the event loop for long. Not for writes."""
        ...


class SqliteConnection(sqlite3.Connection):
    """For `sqlite3.connect(…, factory=SqliteConnection)`."""

    dialect = SQLITE
    clock: StoreClock

    def execute_each(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> list[Row]:
        return [row for values in parameters for row in self.execute(sql, values).fetchall()]

    def read_rows(self, columns: str, clauses: str, parameters: Sequence[Any] = (), /) -> list[Row]:
        try:
            return from_json(self._as_array(f"json_array({columns})", clauses, parameters), list[list[Any]])  # type: ignore[return-value]
        except sqlite3.DataError:  # longer than one text may be
            return [list(row) for row in self.execute(f"SELECT {columns} {clauses}", parameters).fetchall()]

    def read_records(self, record: str, clauses: str, parameters: Sequence[Any], kind: type[T], /) -> T:
        try:
            return from_json(self._as_array(record, clauses, parameters), kind)
        except sqlite3.DataError:
            rows = self.execute(f"SELECT {record} {clauses}", parameters).fetchall()
            return from_json(f"[{','.join(row[0] for row in rows)}]", kind)

    def offload(self, call: Callable[[], T], rows: int, /) -> T:
        return call()  # readers run in threads

    def _as_array(self, record: str, clauses: str, parameters: Sequence[Any]) -> str:
        # SQLite keeps the order of the inner query only if it has a limit.
        limit = "" if " LIMIT " in clauses else " LIMIT -1"
        query = f"SELECT json_group_array(json(record)) FROM (SELECT {record} AS record {clauses}{limit})"
        (array,) = self.execute(query, parameters).fetchone()
        return array
