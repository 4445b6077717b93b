"""Losses of a PostgreSQL store while the server keeps running: one connection, one query, one lock."""

from __future__ import annotations

import asyncio
import os
import signal

import asyncpg
import pytest

from rollyard.core import Run
from rollyard.store import StoreUnusable
from rollyard.store.postgres import server as pg_server
from rollyard.store.postgres import store as pg_store
from rollyard.store.postgres.store import PgReaders
from rollyard.testing.store_conformance import INIT, QUEUED, submission
from tests.store.conftest import PostgresOpener
from tests.store.test_postgres import LOCKS, broken, filled


async def _end_who_waits(opener: PostgresOpener, how: str = "pg_terminate_backend") -> None:
    """Ends the query that waits for a lock, once there is one, and returns when it no longer waits."""
    waiting = list[asyncpg.Record]()
    while not waiting:
        waiting = await opener.execute(f"SELECT pid, {how}(pid) FROM pg_locks WHERE NOT granted")
    while await opener.execute(f"SELECT 1 FROM pg_locks WHERE NOT granted AND pid = {waiting[0]['pid']}"):
        pass


@pytest.mark.parametrize("how", ["pg_terminate_backend", "pg_cancel_backend"])
async def test_a_lost_read_is_repeated(how: str, open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await filled(store, "a")
        other = await asyncpg.connect(open_postgres.url)
        async with other.transaction():
            await other.execute("LOCK TABLE rollouts IN ACCESS EXCLUSIVE MODE")
            reading = asyncio.create_task(store.get("a"))
            await _end_who_waits(open_postgres, how)
            assert not reading.done()
        await other.close()
        assert (await reading).id == "a" and store.broken is None


async def test_a_read_that_is_lost_twice_breaks_the_store(open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await filled(store, "a")
        other = await asyncpg.connect(open_postgres.url)
        async with other.transaction():
            await other.execute("LOCK TABLE rollouts IN ACCESS EXCLUSIVE MODE")
            reading = asyncio.create_task(store.get("a"))
            await _end_who_waits(open_postgres)
            await _end_who_waits(open_postgres)
            with pytest.raises(StoreUnusable, match=r"cannot be read: .*terminating connection"):
                await reading
        await other.close()
        assert store.broken is not None and "cannot be read" in store.broken
        with pytest.raises(StoreUnusable, match="cannot be read"):
            await store.submit([submission("b")])


async def test_an_invalid_query_parameter_does_not_break_the_store(open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await filled(store, "a")
        with pytest.raises(asyncpg.DataError, match="out of int64 range"):
            await store.delivered_groups("d", 2**70, 1)
        assert store.broken is None and (await store.get("a")).id == "a"


async def test_an_id_that_is_too_long_for_an_index_fails_alone(open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await store.put_run(Run("run"), {})
        calls = [store.submit([submission("a")]), store.submit([submission(os.urandom(8000).hex())])]
        good, bad = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(bad, asyncpg.ProgramLimitExceededError) and not isinstance(good, BaseException)
        assert store.broken is None and (await store.get("a")).position == QUEUED


async def test_a_connection_that_is_lost_while_the_store_opens_is_detected(
    open_postgres: PostgresOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = list[asyncpg.Connection]()
    fill, connect = PgReaders.fill, pg_store.connect

    async def connect_and_keep(address: pg_store.Address) -> asyncpg.Connection:
        connections.append(await connect(address))
        return connections[-1]

    async def fill_and_lose_the_lock(readers: PgReaders) -> None:
        await fill(readers)
        await open_postgres.execute(LOCKS)
        while not connections[0].is_closed():
            await asyncio.sleep(0)

    monkeypatch.setattr(pg_store, "connect", connect_and_keep)
    monkeypatch.setattr(PgReaders, "fill", fill_and_lose_the_lock)
    with pytest.raises(StoreUnusable, match="the connection to it was lost"):
        await open_postgres()
    assert len(connections) == 5 and all(one.is_closed() for one in connections)


async def test_a_store_stops_if_the_server_does_not_answer_on_the_locks_connection(
    open_postgres: PostgresOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pg_server, "ASK_EVERY_S", 1.0)  # also how long a busy server may take to answer
    async with await open_postgres() as store:
        await filled(store, "a")
        assert store.broken is None
        locks = await open_postgres.execute("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted")
        pid = int(locks[0]["pid"])
        os.kill(pid, signal.SIGSTOP)
        try:
            assert "does not answer on the connection that holds the lock" in await broken(store)
        finally:
            os.kill(pid, signal.SIGCONT)
    async with await open_postgres() as again:
        assert (await again.get("a")).position == QUEUED


async def test_an_opening_waits_for_a_transaction_in_progress(open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await filled(store, "a")
        other = await asyncpg.connect(open_postgres.url)
        async with other.transaction():
            await other.execute("SELECT 1 FROM rollouts WHERE id = 'a' FOR UPDATE")
            moved = store.move("a", QUEUED, INIT)  # it has checked the epoch, and waits for the row
            while not await open_postgres.execute("SELECT 1 FROM pg_locks WHERE NOT granted"):
                pass
            with pytest.raises(asyncpg.LockNotAvailableError):
                await open_postgres.execute("SELECT 1 FROM meta WHERE key = 'epoch' FOR UPDATE NOWAIT")
        await other.close()
        await moved
        await open_postgres.execute("SELECT 1 FROM meta WHERE key = 'epoch' FOR UPDATE NOWAIT")


async def test_a_close_continues_if_its_caller_is_cancelled(open_postgres: PostgresOpener) -> None:
    store = await open_postgres()
    await filled(store, "a")
    other = await asyncpg.connect(open_postgres.url)
    async with other.transaction():
        await other.execute("SELECT 1 FROM rollouts WHERE id = 'a' FOR UPDATE")
        moved = store.move("a", QUEUED, INIT)
        closing = asyncio.create_task(store.close())
        while not await open_postgres.execute("SELECT 1 FROM pg_locks WHERE NOT granted"):
            pass
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    await other.close()
    await store.close()
    assert moved.done() and moved.exception() is None
    async with await open_postgres() as again:
        assert again.recovered.requeued == 1
