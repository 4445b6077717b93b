"""The SQLite writer: statements run on the event loop, in slices; only COMMIT, which waits for the disk, in a thread.

This is deliberate. Python's sqlite3 releases the interpreter lock at every step of every statement, and must get it
back from the loop. A loop that is busy but calls `select` more often than the switch interval (5 ms by default) starves
such a thread: its wait for the lock is interrupted before it may request the lock. With a saturated loop, a writer
thread was measured at 0.2 to 300 operations a second, and seconds for a single one. With one switch per batch and a
switch interval of 0.5 ms: 3,400 to 6,600 a second, 9 ms for a single one. A statement is 5 to 20 µs of work on cached
pages: less than the switch to a thread and back.

Invariants, beside those of `sql.queue`. Each operation has its own savepoint. The loop is blocked for SLICE_S at a
time, or for one step of an operation, whichever is longer.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

from rollyard.store.sql.dialect import Connection, SqliteConnection
from rollyard.store.sql.queue import Queued, Steps, WriteOutcome, WriteQueue

SLICE_S = 0.001

BUSY_S = 30.0
"""How long another process (such as a person's sqlite3 shell) may hold the write lock before the store gives up."""

_log = logging.getLogger("rollyard.store")

OPERATION_ERRORS = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.DataError, sqlite3.NotSupportedError)
"""Database errors that the operation itself caused. The others (full, I/O, corrupt) concern the file."""


class Writer(WriteQueue):
    """Commits batches on one connection, which it owns and closes when it ends."""

    def __init__(
        self,
        connection: SqliteConnection,
        *,
        guard: Callable[[Connection], None] = lambda _: None,
        on_commit: Callable[[float, int], None] = lambda _seconds, _operations: None,
    ) -> None:
        """`guard` runs first in every transaction."""
        self._connection = connection
        self._guard = guard
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="rollyard-store-commit")
        super().__init__(on_commit)

    async def transact(self, batch: list[Queued]) -> list[WriteOutcome]:
        await self._begin()
        self._guard(self._connection)
        outcomes = await self._run(batch)
        await self._in_thread(partial(self._connection.execute, "COMMIT"))
        return outcomes

    async def undo(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:  # SQLite rolls back by itself on such errors; closing does so in any case
            _log.warning("the failed transaction was not rolled back", extra={"reason": str(error)})

    async def end(self) -> None:
        self._disk.shutdown()  # waits for a commit in progress
        self._connection.close()

    async def _begin(self) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            await self._in_thread(self._begin_patiently)

    def _begin_patiently(self) -> None:
        self._connection.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute("PRAGMA busy_timeout = 0")

    async def _run(self, batch: list[Queued]) -> list[WriteOutcome]:
        """Runs every operation; returns the result or error of each future."""
        outcomes: list[WriteOutcome] = []
        until = time.perf_counter() + SLICE_S
        for operation, future in batch:
            self._connection.execute("SAVEPOINT operation")
            try:
                result = operation(self._connection)
                if isinstance(result, Generator):
                    steps = cast("Steps[Any]", result)
                    while True:
                        try:
                            next(steps)
                        except StopIteration as stop:
                            result = stop.value
                            break
                        if time.perf_counter() > until:
                            await asyncio.sleep(0)
                            until = time.perf_counter() + SLICE_S
            except Exception as error:
                if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, OPERATION_ERRORS):
                    raise
                self._connection.execute("ROLLBACK TO operation")
                outcomes.append((future, None, error))
            else:
                outcomes.append((future, result, None))
            self._connection.execute("RELEASE operation")
            if time.perf_counter() > until:
                await asyncio.sleep(0)
                until = time.perf_counter() + SLICE_S
        return outcomes

    async def _in_thread(self, call: Callable[[], object]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._disk, call)
