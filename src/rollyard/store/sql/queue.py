"""The queue of operations to write: the part of a writer that does not depend on the database.

A writer takes all queued operations and commits them in one transaction. There is no time window: a single operation is
committed at once, and while one commit waits for the disk, the next batch accumulates. So durability costs one wait for
the disk per batch, and the batch grows with the load.

Invariants.
- Operations run in the order in which they were queued.
- An operation that raises fails alone: its writes are undone, and the others of the batch continue.
- A future is resolved after the commit of its operation, never before.
- A commit that fails, or an error of the database itself (disk, file, connection), fails every operation of the batch
  and breaks the writer: from then on `put` raises `StoreUnusable` with the reason. The writes of such a batch were not
  acknowledged.
- Cancelling a caller does not cancel its operation.

The queue itself is not bounded: the store limits the operations of clients (they wait for room), and the number of live
rollouts limits those of the pipeline.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar, overload

from rollyard.store.base import StoreUnusable
from rollyard.store.sql.dialect import Connection

T = TypeVar("T")
Operation = Callable[[Connection], T]
"""Runs in the transaction. A long operation is a generator that yields where the event loop may run."""

Steps = Generator[None, None, T]

BATCH = 512
"""The most operations in one transaction, so that the first does not wait long for the last."""

SWITCH_S = 0.0005
"""The interpreter's switch interval while a store is open; see `sqlite.writer`. It applies to the whole process."""

_log = logging.getLogger("rollyard.store")

Queued = tuple[Operation[Any], asyncio.Future[Any]]
WriteOutcome = tuple[asyncio.Future[Any], Any, Exception | None]
"""A future, and its result or its error."""


class BatchedWrite(ABC, Generic[T]):
    """An operation that can run together with its neighbours of the same kind: if a statement is a round trip to a
    server, a hundred of them then cost as much as one. It is also an `Operation`, which runs alone."""

    __slots__ = ()

    @property
    @abstractmethod
    def ids(self) -> Sequence[str]:
        """The rollouts that it concerns; operations that run together have none in common."""

    @classmethod
    @abstractmethod
    def together(cls, connection: Connection, joint: Sequence[Any]) -> list[T | Exception]:
        """Returns each operation's result, or the error with which it failed alone, without having written anything. An
        exception concerns all of them: each must then run alone."""

    def __call__(self, connection: Connection) -> Any:
        (result,) = self.together(connection, [self])
        if isinstance(result, Exception):
            raise result
        return result


class Fenced(Exception):
    """Raised by a guard: this process may no longer write to the store. `as_error` creates the operations' error."""

    def __init__(self, reason: str, as_error: Callable[[str], Exception]) -> None:
        super().__init__(reason)
        self.as_error = as_error


class WriteQueue(ABC):
    """Queues operations and commits them in batches. A subclass commits a batch, undoes a failed one, and closes."""

    def __init__(self, on_commit: Callable[[float, int], None]) -> None:
        """`on_commit` is called with each commit's seconds and operations. Must be created on the loop that it uses."""
        self._on_commit = on_commit
        self._queue: list[Queued] = []
        self._wake = asyncio.Event()
        self._is_closing = False
        self._broken: str | None = None
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._task = asyncio.create_task(self._main(), name="rollyard-store-writer")

    @abstractmethod
    async def transact(self, batch: list[Queued]) -> list[WriteOutcome]:
        """Commits a batch; returns the result or error of each future. Raises errors that concern the whole batch."""

    @abstractmethod
    async def undo(self) -> None:
        """Rolls a failed transaction back, if the database can still be reached."""

    @abstractmethod
    async def end(self) -> None:
        """Closes the connection, after the last batch."""

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

    def break_down(self, reason: str) -> None:
        """Stops the writer: queued and later operations fail. The first reason is kept."""
        if self._broken is None:
            self._broken = reason
            _log.error("the store can no longer be written", extra={"reason": reason})

    async def close(self) -> None:
        """Commits the queued operations, then ends. Idempotent."""
        self._is_closing = True
        self._wake.set()
        await asyncio.shield(self._task)

    async def _main(self) -> None:
        batch: list[Queued] = []
        try:
            while self._queue or not self._is_closing:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    batch, self._queue = self._queue[:BATCH], self._queue[BATCH:]
                    await self._commit(batch)
        finally:  # also when the event loop ends while the store is open
            self._is_closing = True
            try:
                await self.end()
            finally:
                doubt = "the store was closed while this was written: it is unknown whether it was stored"
                _fail(batch, StoreUnusable, doubt)
                _fail(self._queue, StoreUnusable, "the store was closed before this was written")

    async def _commit(self, batch: list[Queued]) -> None:
        if self._broken is not None:
            _fail(batch, StoreUnusable, self._broken)
            return
        started = time.perf_counter()
        try:
            outcomes = await self.transact(batch)
        except Fenced as error:
            self.break_down(str(error))
            await self.undo()
            _fail(batch, error.as_error, str(error))
        except Exception as error:  # the disk, the file, the server, or a bug: no operation may be acknowledged
            reason = f"the store failed and was stopped: {type(error).__name__}: {error}"
            self.break_down(reason)
            await self.undo()
            _fail(batch, StoreUnusable, self._broken or reason)
        else:
            for future, result, failure in outcomes:
                _resolve(future, result, failure)
            try:
                self._on_commit(time.perf_counter() - started, len(batch))
            except Exception:  # an observer must not stop the writer
                _log.exception("a commit could not be reported")


def _fail(batch: list[Queued], as_error: Callable[[str], Exception], reason: str) -> None:
    for _, future in batch:
        _resolve(future, None, as_error(reason))


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # its caller was cancelled, or it is already resolved
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
