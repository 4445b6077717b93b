"""Readers: a few read-only connections, each used by one thread of a small pool at a time.

In WAL mode a reader reads the last commit before its query started; it never waits for the writer, nor the writer for
it. More than a few readers would only contend for the interpreter lock.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rollyard.store.sql.dialect import SqliteConnection

T = TypeVar("T")


class Readers:
    def __init__(self, connect: Callable[[], SqliteConnection], count: int) -> None:
        self._all = [connect() for _ in range(count)]
        self._idle: queue.SimpleQueue[SqliteConnection] = queue.SimpleQueue()
        for connection in self._all:
            self._idle.put(connection)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="rollyard-store-reader")

    async def run(self, query: Callable[[SqliteConnection], T]) -> T:
        """Runs a query in the pool. Further queries wait in the pool's queue: one entry per waiting caller."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._with_connection, query)

    def _with_connection(self, query: Callable[[SqliteConnection], T]) -> T:
        connection = self._idle.get()  # never waits: there is one per thread
        try:
            return query(connection)
        finally:
            self._idle.put(connection)

    def close(self) -> None:
        """Waits for running queries. Blocks: call it in a thread."""
        self._pool.shutdown(cancel_futures=True)
        for connection in self._all:
            connection.close()
