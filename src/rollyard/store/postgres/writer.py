"""The PostgreSQL writer: one transaction per batch, with few statements, because each is a round trip.

A batch is first tried without savepoints: an operation that fails before it has written anything (a stale move, an
unknown id: nearly all failures) leaves nothing to undo. If an operation fails after it has written, or the server
itself refuses it, the transaction is rolled back and the batch runs again with a savepoint for each operation. Nothing
was acknowledged by then, so callers do not notice. Neighbours of one kind run together (`BatchedWrite`).

Invariants, beside those of `sql.queue`. Each of these breaks the store: a lost connection, a server that shuts down, a
wait for a lock beyond the connection's lock_timeout, a missing response. A connection may be lost after the server has
committed: that commit was not acknowledged, and the next opening finds it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, cast

import asyncpg

from rollyard.store.postgres.connection import SERVER_ERRORS, PgConnection, in_greenlet
from rollyard.store.sql.dialect import Connection
from rollyard.store.sql.queue import BatchedWrite, Operation, Queued, Steps, WriteOutcome, WriteQueue

CLOSE_S = 5.0
"""How long a server may take to close a connection."""

DEADLOCKS = 5
"""How often a batch is retried after a deadlock with another session: the server chooses which of the two fails."""

JOINT = 1024
"""The number of rollouts after which no more operations are added to those that run together."""

_log = logging.getLogger("rollyard.store")

_OPERATION_ERRORS = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.SyntaxOrAccessError,
    asyncpg.FeatureNotSupportedError,
    asyncpg.ProgramLimitExceededError,  # for example, an id that is too long for an index
)
"""Errors of the server that the operation itself caused. The others (shutdown, disk, lock) concern the server."""


class _Again(Exception):
    """An operation must be undone, and there was no savepoint."""


class PgWriter(WriteQueue):
    """Commits batches on one connection, which it owns and closes when it ends."""

    def __init__(
        self,
        connection: PgConnection,
        *,
        guard: Callable[[Connection], None] = lambda _: None,
        on_commit: Callable[[float, int], None] = lambda _seconds, _operations: None,
    ) -> None:
        """`guard` runs first in every transaction."""
        self._connection = connection
        self._guard = guard
        super().__init__(on_commit)

    async def transact(self, batch: list[Queued]) -> list[WriteOutcome]:
        attempt = self._attempt
        for _ in range(DEADLOCKS):
            try:
                return await in_greenlet(partial(attempt, batch))
            except (_Again, asyncpg.TransactionRollbackError):
                attempt = self._attempt_carefully
        return await in_greenlet(partial(attempt, batch))

    async def undo(self) -> None:
        try:
            if self._connection.raw.is_in_transaction():
                await self._connection.raw.execute("ROLLBACK", timeout=CLOSE_S)
        except SERVER_ERRORS as error:
            # The server rolls back by itself when the connection is closed.
            _log.warning("the failed transaction was not rolled back", extra={"reason": str(error)})

    async def end(self) -> None:
        await hang_up(self._connection.raw)

    def _attempt(self, batch: list[Queued]) -> list[WriteOutcome]:
        connection, outcomes = self._connection, list[WriteOutcome]()
        connection.control("BEGIN")
        self._guard(connection)
        at = 0
        while at < len(batch):
            joint = _neighbours(batch, at)
            results = self._together(joint) if len(joint) > 1 else [self._try(batch[at][0])]
            for result in results:
                failure = result if isinstance(result, Exception) else None
                outcomes.append((batch[at][1], None if failure else result, failure))
                at += 1
        connection.commit()
        return outcomes

    def _together(self, joint: list[BatchedWrite[Any]]) -> list[Any]:
        """Returns their results and errors."""
        try:
            return type(joint[0]).together(self._connection, joint)
        except Exception as error:
            if is_servers(error):
                raise
            raise _Again from error

    def _try(self, operation: Operation[Any]) -> Any:
        """Returns the operation's result or its error; raises `_Again` if it may have written something."""
        before = self._connection.writes
        try:
            return _run(operation, self._connection)
        except _OPERATION_ERRORS as error:
            raise _Again from error
        except Exception as error:
            if is_servers(error):
                raise
            if self._connection.writes != before:
                raise _Again from error
            return error

    def _attempt_carefully(self, batch: list[Queued]) -> list[WriteOutcome]:
        connection, outcomes = self._connection, list[WriteOutcome]()
        connection.control("ROLLBACK")
        connection.control("BEGIN")
        self._guard(connection)
        for operation, future in batch:
            connection.control("SAVEPOINT operation")
            try:
                outcomes.append((future, _run(operation, connection), None))
            except Exception as error:
                if is_servers(error):
                    raise
                connection.control("ROLLBACK TO operation")
                outcomes.append((future, None, error))
            connection.control("RELEASE operation")
        connection.commit()
        return outcomes


async def hang_up(connection: asyncpg.Connection) -> None:
    """Closes a connection, in any state."""
    try:
        await connection.close(timeout=CLOSE_S)
    except asyncio.CancelledError:
        connection.terminate()
        raise
    except SERVER_ERRORS:
        connection.terminate()


def _neighbours(batch: list[Queued], at: int) -> list[BatchedWrite[Any]]:
    """Returns the operations from `at` on that have one kind and concern different rollouts."""
    joint, ids = list[BatchedWrite[Any]](), set[str]()
    for operation, _ in batch[at:]:
        if not isinstance(operation, BatchedWrite) or (joint and type(operation) is not type(joint[0])):
            break
        mine = operation.ids
        if not ids.isdisjoint(mine) or len(ids) > JOINT:
            break
        ids.update(mine)
        joint.append(operation)
    return joint


def _run(operation: Operation[Any], connection: PgConnection) -> Any:
    result = operation(connection)
    if not isinstance(result, Generator):
        return result
    steps = cast("Steps[Any]", result)
    while True:  # it need not yield to the loop: every statement is awaited
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def is_servers(error: Exception) -> bool:
    """Whether the error concerns more than the operation: the server, the network, or this connection."""
    if isinstance(error, asyncpg.PostgresError):
        return not isinstance(error, _OPERATION_ERRORS)
    if isinstance(error, asyncpg.InterfaceError):
        return not isinstance(error, ValueError)  # a ValueError is an invalid parameter
    return isinstance(error, SERVER_ERRORS)
