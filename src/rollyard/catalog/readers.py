"""Read-only connections to the catalog, each used by one thread of a small pool at a time.

Invariants. A query takes at most `QUERY_S`, whatever it searches for; then SQLite stops it. Of one caller, one query
runs at a time, and at most `MOST_WAITING` wait: a tenant that floods the catalog does not delay the others. While the
file is replaced, no connection to it is open: the last one to close would delete the write-ahead log of the new file.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition
from typing import TypeVar

from rollyard.catalog import schema
from rollyard.core.failure import RateLimited

T = TypeVar("T")

READERS = 2
QUERY_S = 2.0
MOST_WAITING = 64
STEPS = 20_000
"""Instructions of SQLite between two checks of the time: about 0.2 ms."""


class NotOpen(sqlite3.OperationalError):
    """The readers are paused."""


class Readers:
    """Runs queries in threads, from `resume` to `pause`."""

    def __init__(self, path: Path, count: int = READERS) -> None:
        self._path = path
        self._changed = Condition()
        self._is_paused = True
        self._running = 0
        self._idle: list[sqlite3.Connection] = []
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting = Counter[str]()
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="rollyard-catalog-reader")

    async def run(self, query: Callable[[sqlite3.Connection], T], *, caller: str = "") -> T:
        """Runs a query, after the caller's earlier ones. Raises `sqlite3.Error`, also if it takes too long or the
        readers are paused, and `RateLimited` if too many of the caller's queries wait."""
        if self._waiting[caller] >= MOST_WAITING:
            raise RateLimited(f"{MOST_WAITING} queries of this token wait for the catalog")
        self._waiting[caller] += 1
        try:
            async with self._turns.setdefault(caller, asyncio.Lock()):
                return await asyncio.get_running_loop().run_in_executor(self._pool, self._run, query)
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller], self._turns[caller]

    def pause(self) -> None:
        """Waits for running queries and closes all connections. Blocks: call it in a thread."""
        with self._changed:
            self._is_paused = True
            self._changed.wait_for(lambda: not self._running)
            while self._idle:
                self._idle.pop().close()

    def resume(self) -> None:
        with self._changed:
            self._is_paused = False

    def close(self) -> None:
        """Blocks: call it in a thread."""
        self._pool.shutdown(cancel_futures=True)
        self.pause()

    def _run(self, query: Callable[[sqlite3.Connection], T]) -> T:
        with self._changed:
            if self._is_paused:
                raise NotOpen("the catalog is not open")
            self._running += 1
            connection = self._idle.pop() if self._idle else None
        try:
            if connection is None:
                connection = schema.open_for_reading(self._path)
            ends_at = time.monotonic() + QUERY_S
            connection.set_progress_handler(lambda: time.monotonic() > ends_at, STEPS)
            found = query(connection)
        except BaseException:
            if connection is not None:
                connection.close()
            connection = None
            raise
        finally:
            with self._changed:
                self._running -= 1
                if connection is not None:
                    self._idle.append(connection)
                self._changed.notify_all()
        return found
