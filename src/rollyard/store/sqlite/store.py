"""The embedded store: one SQLite file in WAL mode with synchronous FULL, one writer, a few readers.

`sql.sql_store` implements the interface, `place` checks the location and has the lock, `writer` and `readers` have the
connections. This file opens and closes the store.

Invariant, beside those of the interface: a disk that is full or broken stops the store.

Measured (2 cores, aarch64, virtual disk, Python 3.11): a single move 0.25 ms, a single submit 0.42 ms (p50, as measured
by the caller). Batched: 40,000 moves a second, 9,000 submits one by one, 15,000 to 19,000 in bulk, 1,400 ends a second
with trajectories of 106 KB. Opening with 39,000 queued rollouts: 6 ms; with 19,000 live ones: 0.7 s.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from rollyard.store._clock import StoreClock
from rollyard.store.base import Recovery, StoreUnusable
from rollyard.store.sql.dialect import Connection, SqliteConnection
from rollyard.store.sql.recovery import recover
from rollyard.store.sql.retention import counted_s
from rollyard.store.sql.schema import migrate
from rollyard.store.sql.sql_store import SqlStore, guard
from rollyard.store.sqlite.place import Lock, refuse_network
from rollyard.store.sqlite.readers import Readers
from rollyard.store.sqlite.writer import OPERATION_ERRORS, Writer

T = TypeVar("T")

READERS = 3


class SqliteStore(SqlStore):
    """A store in a SQLite file. Created by `open`; `async with` closes it."""

    def __init__(
        self, lock: Lock, writer: Writer, readers: Readers, clock: StoreClock, epoch: int, recovered: Recovery
    ) -> None:
        super().__init__(writer, clock, epoch, recovered)
        self._lock = lock
        self._readers = readers

    @classmethod
    async def open(
        cls,
        path: Path | str,
        *,
        max_attempts: int = 3,
        can_reevaluate: Callable[[str], bool] = lambda _: True,
        keeps_leases: bool = False,
        on_commit: Callable[[float, int], None] = lambda _seconds, _operations: None,
        read_clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Opens, migrates and recovers a store. Raises `StoreLocked`, or `StoreUnusable` with what to do.

        A rollout is requeued while fewer than `max_attempts` attempts count. One in EVAL stays there if its saved info
        has `is_reevaluable` and `can_reevaluate` accepts its environment's name. With `keeps_leases`, leased rollouts
        stay leased. `on_commit` is called with each commit's seconds and number of operations. Retention uses
        `read_clock`.
        """
        path = Path(path)
        lock, connection, readers, epoch, recovered = await asyncio.to_thread(
            _open_files, path, max_attempts, can_reevaluate, keeps_leases, read_clock
        )
        writer = Writer(connection, guard=partial(guard, epoch), on_commit=on_commit)
        return cls(lock, writer, readers, connection.clock, epoch, recovered)

    async def _close(self) -> None:
        """Commits what is queued, merges the WAL into the file, and releases the lock."""
        try:
            await asyncio.to_thread(self._readers.close)
            await self._writer.close()
        finally:
            self._lock.release()

    async def _read(self, query: Callable[[Connection], T]) -> T:
        self._check_usable()
        try:
            return await self._readers.run(query)
        except OPERATION_ERRORS:
            raise
        except sqlite3.Error as error:
            raise self._unreadable(error) from error


def _open_files(
    path: Path,
    max_attempts: int,
    can_reevaluate: Callable[[str], bool],
    keeps_leases: bool,
    read_clock: Callable[[], float],
) -> tuple[Lock, SqliteConnection, Readers, int, Recovery]:
    """Does everything that blocks. After an error, nothing stays open."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        refuse_network(path.parent)
        lock = Lock(path)
        path.touch(mode=0o600)  # it contains engines' keys; SQLite gives its WAL the same mode
    except OSError as error:
        raise StoreUnusable(f"{path} cannot be opened: {error}") from error
    connection: SqliteConnection | None = None
    try:
        connection = _connect(path)
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreUnusable(f"{path.parent} does not allow WAL mode (SQLite reports {mode!r}); use a local disk")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA journal_size_limit = 67108864")  # bytes of WAL that are kept between bursts
        connection.execute("PRAGMA cache_size = -65536")  # KiB: the hot rows and their indexes stay in memory
        migrate(connection)
        connection.clock = StoreClock(counted_s(connection), read_clock)
        connection.execute("BEGIN IMMEDIATE")
        epoch, recovered = recover(connection, max_attempts, can_reevaluate, keeps_leases=keeps_leases)
        connection.execute("COMMIT")
        return lock, connection, Readers(partial(_connect, path, is_read_only=True), READERS), epoch, recovered
    except BaseException as error:
        if connection is not None:
            connection.close()
        lock.release()
        if isinstance(error, sqlite3.Error):
            raise StoreUnusable(f"{path} cannot be opened as a store: {error}") from error
        raise


def _connect(path: Path, *, is_read_only: bool = False) -> SqliteConnection:
    # One thread at a time uses a connection. No timeout: the writer, on the event loop, must not wait (see Writer).
    connection = sqlite3.connect(
        path,
        timeout=0,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
        factory=SqliteConnection,
    )
    if is_read_only:
        connection.execute("PRAGMA query_only = ON")
    return connection
