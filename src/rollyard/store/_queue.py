"""What is to be written, in the order in which it was put: the half of a writer that no database knows of.

A writer takes whatever has queued up and commits it in one transaction. There is no time window: a lone operation is
committed at once, and while one commit waits for the disk the next batch gathers by itself. So durability costs one
wait for the disk per batch, and the batch grows with the load.

Invariants.
- Operations run in the order in which they were put.
- An operation that raises fails alone: nothing of it is kept, the others of the batch go on.
- A future is resolved after the commit that holds its operation, never before.
- A commit that fails, or an error of the database itself (disk, file, connection), fails every operation of the batch
  and breaks the writer: from then on `put` raises `StoreUnusable` with the reason. What such a batch wrote was not
  acknowledged.
- A caller that is cancelled does not take its operation back.

The queue is not bounded here: the store bounds what clients can put (they wait for room), and what the pipeline
puts is bounded by the rollouts that are live.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar, overload

from rollyard.store._dialect import Connection
from rollyard.store.base import StoreUnusable

T = TypeVar("T")
Operation = Callable[[Connection], T]
"""What is done in the transaction. A long one is a generator that yields where the loop may breathe."""

Steps = Generator[None, None, T]

BATCH = 512
"""Operations in one transaction at most, so that the first of them does not wait long for the last."""

SWITCH_S = 0.0005
"""The interpreter's switch interval while a store is open; see `_writer`. It is the whole process's."""

_log = logging.getLogger("rollyard.store")

Queued = tuple[Operation[Any], asyncio.Future[Any]]
Told = tuple[asyncio.Future[Any], Any, Exception | None]
"""A future, and what it is to get: a result, or an error."""


class BatchedWrite(ABC, Generic[T]):
    """An operation that can be done together with its neighbours of the same kind: where a statement is a way to a
    server and back, a hundred of them then cost as much as one. It is an `Operation` by itself, too."""

    __slots__ = ()

    @property
    @abstractmethod
    def ids(self) -> Sequence[str]:
        """The rollouts that it is about; operations that are done together have none in common."""

    @classmethod
    @abstractmethod
    def together(cls, connection: Connection, joint: Sequence[Any]) -> list[T | Exception]:
        """Each one's result, or the error with which it failed alone, having written nothing. What it raises concerns
        all of them: then each has to be done by itself."""

    def __call__(self, connection: Connection) -> Any:
        (result,) = self.together(connection, [self])
        if isinstance(result, Exception):
            raise result
        return result


class Fenced(Exception):
    """Raised by a guard: this store is no longer ours to write. `as_error` makes what each operation gets."""

    def __init__(self, reason: str, as_error: Callable[[str], Exception]) -> None:
        super().__init__(reason)
        self.as_error = as_error


class WriteQueue(ABC):
    """See the module. A subclass says how a batch is committed, how a failed one is undone, and how it all ends."""

    def __init__(self, on_commit: Callable[[float, int], None]) -> None:
        """`on_commit` gets each commit's seconds and operations. To be made on the loop that it lives on."""
        self._on_commit = on_commit
        self._queue: list[Queued] = []
        self._wake = asyncio.Event()
        self._is_closing = False
        self._broken: str | None = None
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._task = asyncio.create_task(self._main(), name="rollyard-store-writer")

    @abstractmethod
    async def transact(self, batch: list[Queued]) -> list[Told]:
        """Commits a batch; what its futures are to get. Raises what concerns all of it."""

    @abstractmethod
    async def undo(self) -> None:
        """Rolls a failed transaction back, if the database can still be told so."""

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
        """Nothing is begun any more; what is queued fails. The first reason stays."""
        if self._broken is None:
            self._broken = reason
            _log.error("the store can no longer be written", extra={"reason": reason})

    async def close(self) -> None:
        """Commits what is queued, then ends. Idempotent."""
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
        finally:  # also when the loop is torn down with the store still open
            self._is_closing = True
            try:
                await self.end()
            finally:
                doubt = "the store was closed while this was written: it may be in the store, or not"
                _fail(batch, StoreUnusable, doubt)
                _fail(self._queue, StoreUnusable, "the store was closed before this was written")

    async def _commit(self, batch: list[Queued]) -> None:
        if self._broken is not None:
            _fail(batch, StoreUnusable, self._broken)
            return
        started = time.perf_counter()
        try:
            told = await self.transact(batch)
        except Fenced as error:
            self.break_down(str(error))
            await self.undo()
            _fail(batch, error.as_error, str(error))
        except Exception as error:  # the disk, the file, the server, or a bug: nothing of this may be acknowledged
            reason = f"the store failed and was stopped: {type(error).__name__}: {error}"
            self.break_down(reason)
            await self.undo()
            _fail(batch, StoreUnusable, self._broken or reason)
        else:
            for future, result, failure in told:
                _resolve(future, result, failure)
            try:
                self._on_commit(time.perf_counter() - started, len(batch))
            except Exception:  # who only watches must not stop what is written
                _log.exception("a commit could not be reported")


def _fail(batch: list[Queued], as_error: Callable[[str], Exception], reason: str) -> None:
    for _, future in batch:
        _resolve(future, None, as_error(reason))


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # its caller was cancelled, or it has been told
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
