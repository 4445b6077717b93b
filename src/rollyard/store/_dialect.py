"""What the SQL of this wing is written for: one body of statements, two databases that run them.

An operation or a question is a plain function over a `Connection`. Its SQL is what SQLite (3.35 and later) and
PostgreSQL both understand: `?` for parameters, ON CONFLICT, RETURNING, 0 and 1 for booleans. What they do not share is
in a `Dialect`, and in how a connection reads many rows.

Many rows at once. Each row that Python steps to in SQLite costs a reader's thread the interpreter lock, and under a
busy loop a wait to get it back (see `_writer`); so SQLite puts them into one JSON array, unless that would be longer
than it allows (10⁹ bytes). PostgreSQL sends them in one answer.
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
    """The function that makes a JSON object of names and values."""

    exact: str
    """An expression for a float that arrives as it is stored; `{}` is the column."""

    among: str
    """Whether a text column is one of the strings that `listed` makes a parameter of; `{}` is the column."""

    listed: Callable[[Sequence[str]], object]

    skip_locked: str
    """At the end of a SELECT: its rows are locked, and those that another transaction has locked are left out."""

    for_share: str
    """At the end of a SELECT: its rows stay as they are until the end of the transaction."""


SQLITE = Dialect(
    json_object="json_object",
    exact="printf('%!.17g', {})",  # json_array would round it to 15 digits
    among="{} IN (SELECT value FROM json_each(?))",
    listed=to_json,
    skip_locked="",  # one transaction writes at a time
    for_share="",
)

POSTGRES = Dialect(
    json_object="json_build_object",
    exact="{}",
    among="{} = ANY(?::text[])",
    listed=list,
    skip_locked="FOR UPDATE SKIP LOCKED",
    for_share="FOR SHARE",
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
        """Only the connection that writes has it."""
        ...

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Cursor: ...

    def execute_each(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> list[Row]:
        """One statement for each of the parameters; the rows that they returned, in that order."""
        ...

    def read_rows(self, columns: str, rest: str, parameters: Sequence[Any] = (), /) -> list[Row]:
        """All rows of `SELECT columns rest`. Of floats, only those that are `exact` are."""
        ...

    def read_records(self, record: str, rest: str, parameters: Sequence[Any], kind: type[T], /) -> T:
        """All rows of `SELECT record rest`, each a JSON text, decoded as one tuple."""
        ...

    def aside(self, call: Callable[[], T], rows: int, /) -> T:
        """What a computation on so many rows returns, which must not hold the loop for long. Not for writes."""
        ...


class SqliteConnection(sqlite3.Connection):
    """`sqlite3.connect(…, factory=SqliteConnection)`."""

    dialect = SQLITE
    clock: StoreClock

    def execute_each(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> list[Row]:
        return [row for values in parameters for row in self.execute(sql, values).fetchall()]

    def read_rows(self, columns: str, rest: str, parameters: Sequence[Any] = (), /) -> list[Row]:
        try:
            return from_json(self._as_array(f"json_array({columns})", rest, parameters), list[list[Any]])  # type: ignore[return-value]
        except sqlite3.DataError:  # more than one text holds
            return [list(row) for row in self.execute(f"SELECT {columns} {rest}", parameters).fetchall()]

    def read_records(self, record: str, rest: str, parameters: Sequence[Any], kind: type[T], /) -> T:
        try:
            return from_json(self._as_array(record, rest, parameters), kind)
        except sqlite3.DataError:
            rows = self.execute(f"SELECT {record} {rest}", parameters).fetchall()
            return from_json(f"[{','.join(row[0] for row in rows)}]", kind)

    def aside(self, call: Callable[[], T], rows: int, /) -> T:
        return call()  # readers are threads

    def _as_array(self, record: str, rest: str, parameters: Sequence[Any]) -> str:
        # The order of the inner query is only kept if it has a limit.
        limit = "" if " LIMIT " in rest else " LIMIT -1"
        query = f"SELECT json_group_array(json(record)) FROM (SELECT {record} AS record {rest}{limit})"
        (array,) = self.execute(query, parameters).fetchone()
        return array
