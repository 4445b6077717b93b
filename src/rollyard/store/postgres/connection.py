"""PostgreSQL for the SQL of this package: statements in synchronous style that do not block the event loop.

An operation is a plain function (see `dialect`). For PostgreSQL it runs in a greenlet: when it sends a statement, the
greenlet is suspended, the loop awaits the response, and the greenlet continues with it. So one set of SQL serves both
stores, and the loop is never blocked while the server works.

Every statement is prepared once per connection. `execute_each` sends all of its parameters before it waits for the
responses: a hundred moves are two or three round trips, not a hundred.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import asyncpg
import greenlet
from asyncpg.prepared_stmt import PreparedStatement

from rollyard.core.failure import InvalidRequest
from rollyard.store._clock import StoreClock
from rollyard.store.codec import from_json
from rollyard.store.sql.dialect import POSTGRES, Row

T = TypeVar("T")

SERVER_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""What a call to a server can raise; a TimeoutError is an OSError."""

FEW = 16
"""Rows whose decoding is not worth a thread: at up to 20 µs each, it costs less than the switch there and back."""


async def in_greenlet(call: Callable[[], T]) -> T:
    """Runs a function in a greenlet; what it passes to `wait` is awaited here."""
    child = greenlet.greenlet(call)
    child.gr_context = contextvars.copy_context()
    switched = child.switch()
    while not child.dead:
        try:
            answer = await switched
        except BaseException as error:
            switched = child.throw(error)
        else:
            switched = child.switch(answer)
    return switched


def wait(awaitable: Awaitable[T]) -> T:
    """Awaits something from inside `in_greenlet`."""
    parent = greenlet.getcurrent().parent
    assert parent is not None, "not inside a greenlet"
    return parent.switch(awaitable)


class PgCursor:
    """The complete result of one statement."""

    def __init__(self, rows: list[Any], status: str) -> None:
        self._rows = rows
        self._status = status

    @property
    def rowcount(self) -> int:
        """Parsed from "UPDATE 3", "INSERT 0 1", "SELECT 7"."""
        count = self._status.rpartition(" ")[2]
        return int(count) if count.isdigit() else -1

    def fetchone(self) -> Any:
        return self._rows[0] if self._rows else None

    def fetchall(self) -> list[Any]:
        return self._rows


class PgConnection:
    """A connection for functions inside `in_greenlet`, one at a time."""

    dialect = POSTGRES
    clock: StoreClock

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.raw = connection
        self.writes = 0  # statements that changed something, which a failed operation may have left behind
        self._prepared: dict[str, PreparedStatement] = {}

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> PgCursor:
        return wait(self._execute(sql, parameters))

    def execute_each(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> list[Row]:
        rows = list(parameters)
        if len(rows) < 2:  # a batch needs more statements
            return [row for values in rows for row in self.execute(sql, values).fetchall()]
        return wait(self._execute_each(sql, rows))

    def read_rows(self, columns: str, clauses: str, parameters: Sequence[Any] = (), /) -> list[Row]:
        return self.execute(f"SELECT {columns} {clauses}", parameters).fetchall()

    def read_records(self, record: str, clauses: str, parameters: Sequence[Any], kind: type[T], /) -> T:
        rows = self.execute(f"SELECT {record} {clauses}", parameters).fetchall()
        return self.offload(lambda: from_json(f"[{','.join(row[0] for row in rows)}]", kind), len(rows))

    def offload(self, call: Callable[[], T], rows: int, /) -> T:
        return call() if rows <= FEW else wait(asyncio.to_thread(call))

    def control(self, sql: str) -> None:
        """Executes BEGIN and similar statements: without parameters, and not prepared."""
        wait(self.raw.execute(sql))

    def commit(self) -> None:
        status = wait(self.raw.execute("COMMIT"))
        if status != "COMMIT":  # the server rolls back a failed transaction here, and reports it only here
            raise RuntimeError(f"the server answered a COMMIT with {status}")

    async def _execute(self, sql: str, parameters: Sequence[Any]) -> PgCursor:
        _refuse_nul(parameters)
        statement = self._prepared.get(sql) or await self._prepare(sql)
        cursor = PgCursor(await statement.fetch(*parameters), statement.get_statusmsg())
        if not sql.startswith("SELECT") and cursor.rowcount:
            self.writes += 1
        return cursor

    async def _execute_each(self, sql: str, rows: list[Sequence[Any]]) -> list[Row]:
        for parameters in rows:
            _refuse_nul(parameters)
        statement = self._prepared.get(sql) or await self._prepare(sql)
        if " RETURNING " not in sql:
            self.writes += 1
            await statement.executemany(rows)
            return []
        returned = await statement.fetchmany(rows)
        self.writes += len(returned)
        return returned

    async def _prepare(self, sql: str) -> PreparedStatement:
        parts = sql.split("?")
        numbered = "".join(f"{part}${number}" for number, part in enumerate(parts[:-1], 1)) + parts[-1]
        statement = self._prepared[sql] = await self.raw.prepare(numbered)
        return statement


def _refuse_nul(parameters: Sequence[Any]) -> None:
    for value in parameters:
        if isinstance(value, list):
            _refuse_nul(value)
        elif isinstance(value, str) and "\0" in value:
            raise InvalidRequest("PostgreSQL cannot store text that contains a NUL character")
