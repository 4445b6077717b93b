"""The one writer: it commits whatever has queued up, in one transaction.

There is no time window: a lone operation is committed at once, and while one commit waits for the disk the next
batch gathers by itself. So durability costs one fsync per batch, and the batch grows with the load.

Statements run on the event loop, in slices; only COMMIT, which is where the disk is waited for, runs in a thread.
It looks the wrong way round and is not. Python's sqlite3 gives up the interpreter lock at every step of every
statement, and has to get it back from the loop. A loop that is busy but passes through `select` more often than
the switch interval (5 ms by default) starves such a thread: the wait for the lock is interrupted before it may ask
for it. With a saturated loop, a writer thread was measured at 0.2 to 300 operations a second and seconds for a
lone one. With one hand-over per batch and a switch interval of 0.5 ms: 3,400 to 6,600 a second, 9 ms for a lone one.
A statement is 5 to 20 µs of work on cached pages: less than the switch to a thread and back.

Invariants.
- Operations run in the order in which they were put.
- An operation that raises fails alone: it is rolled back to its savepoint, the others of the batch go on.
- A future is resolved after the commit that holds its operation, never before.
- A commit that fails, or an error of the disk or the file, fails every operation of the batch and breaks the
  writer: from then on `put` raises `StoreUnusable` with the reason. What such a batch wrote was not acknowledged.
- A caller that is cancelled does not take its operation back.
- The loop is held for SLICE_S at a time, or for one step of an operation, whichever is longer.

The queue is not bounded here: the store bounds what clients can put (they wait for room), and what the pipeline
puts is bounded by the rollouts that are live.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, cast, overload

from rollyard.store.base import StoreUnusable

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], T]
"""What is done in the transaction. A long one is a generator that yields where the loop may breathe."""

Steps = Generator[None, None, T]

BATCH = 512
"""Operations in one transaction at most, so that the first of them does not wait long for the last."""

SLICE_S = 0.001

SWITCH_S = 0.0005
"""The interpreter's switch interval while a store is open; see above. It is the whole process's."""

BUSY_S = 30.0
"""How long a person's sqlite3 shell may hold the write lock before the store gives up."""

_log = logging.getLogger("rollyard.store")

_FAILS_ALONE = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.DataError, sqlite3.NotSupportedError)
"""Database errors that are the operation's own doing. The others (full, I/O, corrupt) are the file's."""

_Queued = tuple[Operation[Any], asyncio.Future[Any]]


class Fenced(Exception):
    """Raised by a guard: this store is no longer ours to write. `as_error` makes what each operation gets."""

    def __init__(self, reason: str, as_error: Callable[[str], Exception]) -> None:
        super().__init__(reason)
        self.as_error = as_error


class Writer:
    """See the module. It owns the connection and closes it when it ends."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        guard: Callable[[sqlite3.Connection], None] = lambda _: None,
        on_commit: Callable[[float, int], None] = lambda _seconds, _operations: None,
    ) -> None:
        """`guard` runs first in every transaction; `on_commit` gets each commit's seconds and operations."""
        self._connection = connection
        self._guard = guard
        self._on_commit = on_commit
        self._queue: list[_Queued] = []
        self._wake = asyncio.Event()
        self._is_closing = False
        self._broken: str | None = None
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="rollyard-store-commit")
        self._task = asyncio.create_task(self._main(), name="rollyard-store-writer")

    @property
    def broken(self) -> str | None:
        """Why nothing can be written any more."""
        return self._broken

    @overload
    def put(self, operation: Operation[Steps[T]]) -> asyncio.Future[T]: ...

    @overload
    def put(self, operation: Operation[T]) -> asyncio.Future[T]: ...

    def put(self, operation: Operation[Any]) -> asyncio.Future[Any]:
        """Queues an operation."""
        if self._broken is not None:
            raise StoreUnusable(self._broken)
        if self._is_closing:
            raise StoreUnusable("the store is closed")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append((operation, future))
        self._wake.set()
        return future

    async def close(self) -> None:
        """Commits what is queued, then ends. Idempotent."""
        self._is_closing = True
        self._wake.set()
        await asyncio.shield(self._task)

    async def _main(self) -> None:
        batch: list[_Queued] = []
        try:
            while self._queue or not self._is_closing:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    batch, self._queue = self._queue[:BATCH], self._queue[BATCH:]
                    await self._commit(batch)
        finally:  # also when the loop is torn down with the store still open
            self._is_closing = True
            self._disk.shutdown()  # a commit that is under way ends first
            self._connection.close()
            for _, future in (*batch, *self._queue):
                _resolve(future, None, StoreUnusable("the store was closed before this was written"))

    async def _commit(self, batch: list[_Queued]) -> None:
        if self._broken is not None:
            _fail(batch, StoreUnusable, self._broken)
            return
        started = time.perf_counter()
        try:
            await self._begin()
            self._guard(self._connection)
            told = await self._run(batch)
            await self._in_thread(partial(self._connection.execute, "COMMIT"))
        except Fenced as error:
            self._break(str(error))
            _fail(batch, error.as_error, str(error))
        except Exception as error:  # the disk, the file, or a bug: nothing of this batch may be acknowledged
            reason = f"the store failed and was stopped: {type(error).__name__}: {error}"
            self._break(reason)
            _fail(batch, StoreUnusable, reason)
        else:
            for future, result, failure in told:
                _resolve(future, result, failure)
            self._on_commit(time.perf_counter() - started, len(batch))

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

    async def _run(self, batch: list[_Queued]) -> list[tuple[asyncio.Future[Any], Any, Exception | None]]:
        """Runs every operation; says what each of the futures is to get."""
        told: list[tuple[asyncio.Future[Any], Any, Exception | None]] = []
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
                if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, _FAILS_ALONE):
                    raise
                self._connection.execute("ROLLBACK TO operation")
                told.append((future, None, error))
            else:
                told.append((future, result, None))
            self._connection.execute("RELEASE operation")
            if time.perf_counter() > until:
                await asyncio.sleep(0)
                until = time.perf_counter() + SLICE_S
        return told

    async def _in_thread(self, call: Callable[[], object]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._disk, call)

    def _break(self, reason: str) -> None:
        self._broken = reason
        _log.error("the store can no longer be written", extra={"reason": reason})
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:  # SQLite rolls back by itself on such errors; closing does so in any case
            _log.warning("the failed transaction was not rolled back", extra={"reason": str(error)})


def _fail(batch: list[_Queued], as_error: Callable[[str], Exception], reason: str) -> None:
    for _, future in batch:
        _resolve(future, None, as_error(reason))


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # its caller was cancelled, or it has been told
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
