"""Cases that only the PostgreSQL store has: a server that stops, lost connections, other sessions in its tables."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE

import asyncpg
import pytest

from bench.postgres import PgServer
from rollyard.core import Position, Run, State
from rollyard.core.failure import InvalidRequest, NotFound
from rollyard.store import PostgresStore, Stale, StoreLocked, StoreUnusable
from rollyard.store.postgres.server import SETTINGS
from rollyard.testing.store_conformance import INIT, QUEUED, READY, advance, completed, submission, trajectory
from tests.store.conftest import PostgresOpener
from tests.store.listing import all_rollouts
from tests.worker import free_port

pytestmark = pytest.mark.slow

LOCKS = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
WRITERS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'COMMIT' AND pid <> pg_backend_pid()"
READERS = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE query LIKE '%default_transaction_read_only%' AND pid <> pg_backend_pid()"""


async def broken(store: PostgresStore) -> str:
    """Returns why the store cannot be used, as soon as it is broken."""
    while store.broken is None:
        await asyncio.sleep(0)
    return store.broken


async def filled(store: PostgresStore, *ids: str) -> None:
    await store.put_run(Run("run"), {})
    await store.submit([submission(rollout_id) for rollout_id in ids])


async def test_a_locked_store_reports_its_holder(open_postgres: PostgresOpener) -> None:
    async with await open_postgres():
        with pytest.raises(
            StoreLocked, match=rf"rollyard pid {os.getpid()} on .* \(from 127.0.0.1, server process \d+"
        ):
            await open_postgres()


async def test_two_schemas_are_two_stores(postgres: PgServer) -> None:
    async with await PostgresOpener(postgres)() as one, await PostgresOpener(postgres)() as other:
        await filled(one, "a")
        with pytest.raises(NotFound):
            await other.get("a")


async def test_a_lost_lock_stops_the_store_at_once(open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await filled(store, "a")
        await open_postgres.execute(LOCKS)
        assert "that held the lock was lost" in await broken(store)
        for call in (store.get("a"), store.submit([submission("b")]), store.lease([("a", 1, "n")])):
            with pytest.raises(StoreUnusable, match="was lost"):
                await call


async def test_a_second_opener_fences_the_first_once_the_lock_is_lost(open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as old:
        await filled(old, "a", "b")
        await open_postgres.execute(LOCKS)
        async with await open_postgres() as new:
            with pytest.raises((Stale, StoreUnusable)):
                await old.end("a", QUEUED, completed())
            await new.end("a", QUEUED, completed(0.5))
        with pytest.raises(StoreUnusable):
            await old.get("a")
    async with await open_postgres() as again:
        ending = (await again.get("a")).ending
        assert ending is not None and ending.score is not None and ending.score.reward == 0.5


async def test_every_transaction_checks_the_epoch(open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await filled(store, "a")
        await open_postgres.execute("UPDATE meta SET value = value + 1 WHERE key = 'epoch'")
        calls = [store.end("a", QUEUED, completed()), store.request_cancel("a", "")]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [Stale, Stale]
        with pytest.raises(StoreUnusable, match="another server has opened this store"):
            await store.submit([submission("b")])
    async with await open_postgres() as again:
        assert (await again.get("a")).position == QUEUED


async def test_a_lost_connection_of_the_writer_stops_the_store(open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await filled(store, "a")
        await open_postgres.execute(WRITERS)
        assert "that wrote was lost" in await broken(store)
        with pytest.raises(StoreUnusable):
            await store.end("a", QUEUED, completed())


async def test_a_lost_connection_of_a_reader_is_replaced(open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await filled(store, "a")
        killed = await open_postgres.execute(READERS)
        assert len(killed) == 3
        rollouts = await asyncio.gather(*(store.get("a") for _ in range(9)))
        assert [one.id for one in rollouts] == ["a"] * 9 and store.broken is None


async def test_a_server_restart_loses_no_acknowledged_write() -> None:
    with PgServer(port=free_port()) as server:
        acknowledged: set[str] = set()
        store = await PostgresStore.open(server.url)
        await store.put_run(Run("run"), {})

        async def work(number: int) -> None:
            for i in range(1_000_000):
                rollout_id = f"w{number}-{i}"
                await store.submit([submission(rollout_id)])
                await store.end(rollout_id, QUEUED, completed(), trajectory(rollout_id))
                acknowledged.add(rollout_id)
                if len(acknowledged) == 50:
                    stopped.set()

        stopped = asyncio.Event()
        workers = asyncio.gather(*(work(number) for number in range(8)), return_exceptions=True)
        await stopped.wait()
        await asyncio.to_thread(server.stop)
        assert {type(result) for result in await workers} == {StoreUnusable}
        with pytest.raises(StoreUnusable):
            await store.counts()
        assert store.broken is not None
        await store.close()
        with pytest.raises(StoreUnusable, match="no PostgreSQL server answers"):
            await PostgresStore.open(server.url)
        await asyncio.to_thread(server.start)
        async with await PostgresStore.open(server.url) as again:
            ended = await all_rollouts(again, State.ENDED)
            assert acknowledged <= {rollout.id for rollout in ended}
            assert [await again.trajectory(one.id) for one in ended] == [trajectory(one.id) for one in ended]
            assert len(await again.submit([submission("later")])) == 1


async def test_a_lease_leaves_out_rows_that_another_transaction_has_locked(open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await filled(store, "a", "b", "c")
        other = await asyncpg.connect(open_postgres.url)
        async with other.transaction():
            await other.execute("SELECT 1 FROM rollouts WHERE id = 'b' FOR UPDATE")
            assert list(await store.lease([(rollout_id, 1, "n") for rollout_id in "abc"])) == ["a", "c"]
        await other.close()
        assert list(await store.lease([("b", 1, "n")])) == ["b"]


@pytest.mark.parametrize("refused", ["unknown", "nul\0"])  # unknown; invalid, so that the whole batch runs again
async def test_moves_that_are_written_together_fail_individually(refused: str, open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await filled(store, "a", "b", "c", "d")
        calls = [
            store.move("a", QUEUED, INIT),
            store.move("b", INIT, READY),  # it is queued
            store.move(refused, QUEUED, INIT),
            store.move("c", QUEUED, INIT),
            store.move("a", INIT, READY),
            store.move("d", QUEUED, INIT),
            store.move("a", INIT, READY),  # it was already moved
            store.move("a", READY, READY.to(State.RUN)),
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        refusal = Stale if refused == "unknown" else InvalidRequest
        assert [(number, type(result)) for number, result in enumerate(results) if result is not None] == [
            (1, Stale),
            (2, refusal),
            (6, Stale),
        ]
        states = [(await store.get(rollout_id)).state for rollout_id in "abcd"]
        assert states == [State.RUN, State.QUEUED, State.INIT, State.INIT]


async def test_text_that_postgres_cannot_store_is_an_invalid_request(open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await filled(store, "a")
        calls = [store.request_cancel("x", "fine"), store.request_cancel("a", "not\0fine")]
        good, bad = await asyncio.gather(*calls, return_exceptions=True)
        assert good is None and isinstance(bad, InvalidRequest) and "NUL" in str(bad)
        with pytest.raises(InvalidRequest, match="NUL"):
            await store.get("\0")
        with pytest.raises(InvalidRequest, match="NUL"):
            await store.get_many(["a", "\0"])
        assert (await store.get("a")).position == QUEUED


async def test_a_move_waits_for_a_row_that_another_transaction_has_locked(open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await filled(store, "a")
        other = await asyncpg.connect(open_postgres.url)
        async with other.transaction():
            await other.execute("SELECT 1 FROM rollouts WHERE id = 'a' FOR UPDATE")
            moved = store.move("a", QUEUED, INIT)
            assert (await store.get("a")).position == QUEUED  # reads continue
            assert not moved.done()
        await other.close()
        await moved
        assert (await store.get("a")).position == INIT


async def test_moves_are_retried_after_a_deadlock_with_another_session(
    open_postgres: PostgresOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "deadlock_timeout", "4s")  # the server looks once, after this time
    async with await open_postgres() as store:
        await filled(store, "a", "b")
        other = await asyncpg.connect(open_postgres.url)
        async with other.transaction():
            await other.execute("SET LOCAL deadlock_timeout = '1min'")  # so that the store's session detects it
            await other.execute("SELECT 1 FROM rollouts WHERE id = 'b' FOR UPDATE")
            moves = [store.move("a", QUEUED, INIT), store.move("b", QUEUED, INIT)]
            while not await open_postgres.execute("SELECT 1 FROM pg_locks WHERE NOT granted"):
                pass
            await other.execute("SELECT 1 FROM rollouts WHERE id = 'a' FOR UPDATE")
        await other.close()
        await asyncio.gather(*moves)
        assert [(await store.get(rollout_id)).position for rollout_id in "ab"] == [INIT, INIT]


async def test_reads_during_a_close_return_or_raise_store_unusable(open_postgres: PostgresOpener) -> None:
    store = await open_postgres()
    await filled(store, "a")
    reads = [asyncio.ensure_future(store.get("a")) for _ in range(20)]
    await asyncio.sleep(0)
    await store.close()
    results = await asyncio.gather(*reads, return_exceptions=True)
    assert all(isinstance(result, StoreUnusable) or getattr(result, "id", None) == "a" for result in results)


async def test_a_cancelled_read_leaves_its_connection_usable(open_postgres: PostgresOpener) -> None:
    async with await open_postgres() as store:
        await filled(store, "a")
        for _ in range(9):
            reading = asyncio.ensure_future(store.queued())
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        assert [row.id for row in await store.queued()] == ["a"]


async def test_another_head_opens_the_store_of_a_killed_head(open_postgres: PostgresOpener) -> None:
    """The first head is killed while its rollout is leased to a node; the second one finds the lease."""
    await (await open_postgres()).close()
    script = (
        "import asyncio, os, sys\n"
        "from rollyard.core import Run\n"
        "from rollyard.store import open_store\n"
        "from rollyard.testing.store_conformance import submission\n"
        "async def main():\n"
        "    store = await open_store(sys.argv[1])\n"
        "    await store.put_run(Run('run'), {})\n"
        "    await store.submit([submission('a'), submission('b')])\n"
        "    await store.lease([('a', 1, 'n1')])\n"
        "    print('leased', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    first = await asyncio.create_subprocess_exec(sys.executable, "-c", script, open_postgres.url, stdout=PIPE)
    assert first.stdout is not None and await first.stdout.readline() == b"leased\n"
    with pytest.raises(StoreLocked, match=f"rollyard pid {first.pid} on "):
        await open_postgres()
    first.kill()
    await first.wait()
    async with await open_postgres(keeps_leases=True) as second:
        assert [(one.id, one.node) for one in second.recovered.leased] == [("a", "n1")]
        assert [row.id for row in await second.queued()] == ["b"]
        at = await advance(second, "b", State.RUN)
        await second.end("b", at, completed())
        await second.end("a", Position(State.INIT), completed())
