"""The shared store: a PostgreSQL database, for a head that must be able to start on another machine.

It passes the same conformance suite as the embedded store, with the same SQL: `sql.sql_store` implements the interface,
`connection` runs the SQL, `writer` commits, `server` has the connections, the lock and the tables. This
file opens and closes the store. It needs the packages of the extra `postgres`.

Invariants, beside those of the interface:
- One head has the store, by an advisory lock on its own connection. A head that loses this connection stops: another
  one may have the lock by then. Its transactions in progress are refused by the epoch, which every transaction checks
  and holds until its commit.
- A lost connection to the server stops the store, unless it only reads: its query is repeated on a new one, and the
  store stops if that fails too. The store must then be opened again, here or on another machine.
- The lock's connection is checked regularly: a server that cannot be reached may have released the lock.

It uses five connections: one for the lock, one for the writer, and three for readers. They must not go through a pooler
that shares connections between transactions (such as pgbouncer in transaction mode): the lock would not be exclusive.

Measured (PostgreSQL 15 and this process on the same 2 cores, x86-64, fsync on, with other load): a single move 0.7 to
1.3 ms, a single submit 1.4 to 2.3 ms (p50). Batched: 12,000 to 16,000 leases a second in batches of 256, 14,000 to
20,000 moves, 7,000 to 8,600 submits one by one, 3,800 to 6,900 ends with small trajectories. Opening with 53,000 live
rollouts: 4 s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Self, TypeVar

import asyncpg

from rollyard.store._clock import StoreClock
from rollyard.store.base import Recovery, StoreUnusable
from rollyard.store.postgres.address import Address
from rollyard.store.postgres.connection import SERVER_ERRORS, PgConnection, in_greenlet
from rollyard.store.postgres.server import PgLock, blocked, check_server, connect, migrate
from rollyard.store.postgres.writer import PgWriter, hang_up, is_servers
from rollyard.store.sql.dialect import Connection
from rollyard.store.sql.recovery import recover
from rollyard.store.sql.retention import counted_s
from rollyard.store.sql.sql_store import SqlStore, guard

T = TypeVar("T")

READERS = 3

_log = logging.getLogger("rollyard.store")


class PostgresStore(SqlStore):
    """A store in PostgreSQL. Created by `open`; `async with` closes it."""

    def __init__(
        self,
        address: Address,
        lock: PgLock,
        writer: PgWriter,
        readers: PgReaders,
        clock: StoreClock,
        epoch: int,
        recovered: Recovery,
    ) -> None:
        super().__init__(writer, clock, epoch, recovered)
        self._shown = address.shown
        self._lock = lock
        self._readers = readers

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        max_attempts: int = 3,
        can_reevaluate: Callable[[str], bool] = lambda _: True,
        keeps_leases: bool = False,
        on_commit: Callable[[float, int], None] = lambda _seconds, _operations: None,
        read_clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Opens, migrates and recovers a store; the arguments are those of `SqliteStore.open`. Raises `StoreLocked`, or
        `StoreUnusable` with what to do."""
        address = Address.parse(url)
        open_: list[asyncpg.Connection] = []
        try:
            open_.append(await connect(address))
            for doubt in await check_server(open_[0], address):
                _log.warning(doubt)
            lock = await PgLock.take(open_[0], address)
            open_.append(await connect(address))
            connection = PgConnection(open_[1])
            recovering = partial(recover, connection, max_attempts, can_reevaluate, keeps_leases=keeps_leases)
            epoch, recovered = await in_greenlet(partial(_prepare, connection, address, recovering, read_clock))
            readers = PgReaders(address)
            await readers.fill()
        except SERVER_ERRORS as error:
            try:
                reason = await _why_not(open_, address, error)
            finally:
                await _hang_up_all(open_)
            raise StoreUnusable(reason) from None
        except BaseException:
            await _hang_up_all(open_)
            raise
        writer = PgWriter(connection, guard=partial(guard, epoch), on_commit=on_commit)
        store = cls(address, lock, writer, readers, connection.clock, epoch, recovered)
        for one in open_:
            one.add_termination_listener(store._on_lost)
        if any(one.is_closed() for one in open_):  # lost before the listener was added
            await store.close()
            raise StoreUnusable(f"{address.shown} cannot be opened: the connection to it was lost; try again")
        lock.watch(store._on_silence)
        return store

    async def _close(self) -> None:
        """Commits what is queued, then releases the lock."""
        try:
            await self._readers.close()
            await self._writer.close()
        finally:
            await self._lock.release()

    async def _read(self, query: Callable[[Connection], T]) -> T:
        self._check_usable()
        try:
            return await self._readers.run(query)
        except (StoreUnusable, *SERVER_ERRORS) as error:
            if isinstance(error, StoreUnusable) or is_servers(error):
                raise self._unreadable(error) from None  # the cause may contain the URL
            raise

    def _on_lost(self, connection: asyncpg.Connection) -> None:
        which = "that held the lock" if connection is self._lock.connection else "that wrote"
        self._break_down(f"the connection to {self._shown} {which} was lost; restart when the server is available")

    def _on_silence(self, reason: str) -> None:
        self._break_down(
            f"{self._shown} does not answer on the connection that holds the lock ({reason}), and may have given the "
            "lock to another head; restart when the server is available"
        )

    def _break_down(self, reason: str) -> None:
        if not self._is_closed:
            self._writer.break_down(reason)


class PgReaders:
    """A few read-only connections. One that was lost, or on which the server failed, is replaced when it is needed: its
    failure does not stop the store as long as the server answers on a new one."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: asyncio.Queue[PgConnection] = asyncio.Queue()
        self._count = 0
        self._is_closed = False

    async def fill(self) -> None:
        try:
            for _ in range(READERS):
                self._idle.put_nowait(await self._connect())
                self._count += 1
        except BaseException:
            await self.close()
            raise

    async def run(self, query: Callable[[Connection], T]) -> T:
        """Waits, in order, until a connection is free. If the server fails, the query is repeated once on a new
        connection, since it changes nothing. Raises errors of the query itself, or those of the second try."""
        connection = await self._idle.get()
        try:
            if self._is_closed:
                raise StoreUnusable("the store is closed")
            if not connection.raw.is_closed():
                try:
                    return await in_greenlet(partial(query, connection))
                except SERVER_ERRORS as error:
                    if not is_servers(error):
                        raise
                    _log.warning("a read is tried again on a new connection", extra={"reason": str(error)})
                    if not connection.raw.is_closed():
                        connection.raw.terminate()
            connection = await self._connect()
            return await in_greenlet(partial(query, connection))
        finally:
            self._idle.put_nowait(connection)

    async def close(self) -> None:
        """Waits for running queries; callers that still wait for a connection get `StoreUnusable`."""
        self._is_closed = True
        for _ in range(self._count):
            await hang_up((await self._idle.get()).raw)

    async def _connect(self) -> PgConnection:
        raw = await connect(self._address)
        try:
            await raw.execute("SET default_transaction_read_only = on")
        except BaseException:
            raw.terminate()
            raise
        return PgConnection(raw)


def _prepare(
    connection: PgConnection,
    address: Address,
    recovering: Callable[[], tuple[int, Recovery]],
    read_clock: Callable[[], float],
) -> tuple[int, Recovery]:
    connection.control(  # other values than off stay: they may require more than the server's own disk
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )
    migrate(connection, address)
    connection.clock = StoreClock(counted_s(connection), read_clock)
    connection.control("BEGIN")
    recovered = recovering()
    connection.commit()
    return recovered


async def _why_not(connections: list[asyncpg.Connection], address: Address, error: Exception) -> str:
    """Returns the message for an error of an opening; the first connection, if there is one, is the lock's."""
    if isinstance(error, asyncpg.LockNotAvailableError) and connections:
        with suppress(*SERVER_ERRORS):
            return await blocked(connections[0], address)
    return f"{address.shown} cannot be opened as a store: {str(error) or type(error).__name__}"


async def _hang_up_all(connections: list[asyncpg.Connection]) -> None:
    for connection in connections:
        await hang_up(connection)
