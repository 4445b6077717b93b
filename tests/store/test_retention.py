"""Retention: it uses a clock that cannot jump, and a store under a steady load stops growing."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from typing import Any, cast

import pytest

from rollyard.core import Batch, Group, GroupState, Rollout, Run, Task
from rollyard.core.draw import Draw, DrawConfig, DrawProgress, SourceKind, SourceSpec
from rollyard.core.failure import NotFound
from rollyard.store._clock import MOST_STEP_S
from rollyard.store.base import Decision, EvalRecord, Retention, Store, Submission, SweepResult, eval_items
from rollyard.store.codec import to_json
from rollyard.store.sql import retention
from rollyard.store.sql.queue import Operation, WriteQueue
from rollyard.store.sql.schema import MIGRATIONS, migrate
from rollyard.testing.store_conformance import QUEUED, completed, submission, trajectory
from tests.store.conftest import AnyOpener, PostgresOpener, SqliteOpener

HOUR_S = 3600.0
DAY = Retention(24 * HOUR_S)


class Clock:
    """A clock whose time is set by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def wait_for(store: Store, clock: Clock, seconds: float) -> None:
    """Simulates that much time, with one sweep per hour."""
    while seconds > 0:
        clock.now_s += min(seconds, MOST_STEP_S)
        seconds -= MOST_STEP_S
        await store.sweep(DAY)


async def one_ended(store: Store, name: str) -> None:
    await store.submit([submission(name)])
    await store.end(name, QUEUED, completed(), trajectory(name))


async def test_a_wall_clock_that_jumps_deletes_nothing(open_any: AnyOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    async with await open_any() as store:
        await store.put_run(Run("run"), {})
        await one_ended(store, "r")
        monkeypatch.setattr(time, "time", lambda: real() + 30 * 24 * HOUR_S)
        assert await store.sweep(DAY) == SweepResult()
    async with await open_any() as store:  # nor does a clock that was ahead before the service started
        await one_ended(store, "s")
        monkeypatch.setattr(time, "time", lambda: real() + 90 * 24 * HOUR_S)
        assert await store.sweep(DAY) == SweepResult()
        assert await store.trajectory("r") is not None and await store.trajectory("s") is not None


async def test_the_clock_counts_while_the_store_is_open_and_continues_after_a_restart(
    open_any: AnyOpener, caplog: pytest.LogCaptureFixture
) -> None:
    clock = open_any.read_clock = Clock()
    async with await open_any() as store:
        await store.put_run(Run("run"), {})
        await one_ended(store, "r")
        await wait_for(store, clock, 20 * HOUR_S)
    clock.now_s += 300 * 24 * HOUR_S  # while the store was closed
    async with await open_any() as store:
        await wait_for(store, clock, 2.5 * HOUR_S)
        assert await store.get("r")
        clock.now_s += 30 * 24 * HOUR_S  # a process that was stopped, or a clock that jumped: counts as one hour
        assert await store.sweep(DAY) == SweepResult()
        assert "time passed that retention does not count" in caplog.text
        await wait_for(store, clock, 1 * HOUR_S)
        with pytest.raises(NotFound):
            await store.get("r")


async def test_a_sweep_names_leavings_in_pieces(open_any: AnyOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "LEAVINGS", 7)
    sizes, names = list[int](), [f"r{number:02}" for number in range(30)]

    def count(result: object) -> None:
        sizes.append(len(cast(list[object], result)) if isinstance(result, list) else 0)

    async with await open_any() as store:
        await store.put_run(Run("run"), {})
        for name in names:
            await one_ended(store, name)
        await store.delete_run("run")
        put, read = WriteQueue.put, type(store)._read  # pyright: ignore[reportPrivateUsage]

        def counted_put(self: WriteQueue, operation: Operation[Any]) -> asyncio.Future[Any]:
            future: asyncio.Future[Any] = put(self, operation)
            future.add_done_callback(lambda done: count(done.result()))
            return future

        async def counted_read(self: Any, query: Operation[Any]) -> Any:
            found: Any = await read(self, query)
            count(found)
            return found

        monkeypatch.setattr(WriteQueue, "put", counted_put)
        monkeypatch.setattr(type(store), "_read", counted_read)
        assert list((await store.sweep(DAY)).rollouts) == names
        assert await store.sweep(DAY) == SweepResult()
    assert max(sizes) == 7


async def test_work_of_a_live_draw_is_kept_until_it_is_acknowledged_or_the_draw_ended_long_ago(
    open_any: AnyOpener,
) -> None:
    clock = open_any.read_clock = Clock()
    async with await open_any() as store:
        await store.put_run(Run("run"), {})
        await deliver(store, "d", 1)
        await wait_for(store, clock, 70 * HOUR_S)
        assert await store.trajectory("d.1-0") is not None
        await store.step(Decision(draw=draw_of("d", 1, is_active=False)))
        await wait_for(store, clock, 23.5 * HOUR_S)
        assert await store.trajectory("d.1-0") is not None, "a day from the end of its draw"
        await wait_for(store, clock, 1 * HOUR_S)
        for read in (store.get("d.1-0"), store.get_group("d.1"), store.get_draw("d"), store.get_run("run")):
            with pytest.raises(NotFound):
                await read


def draw_of(name: str, batch: int, *, is_active: bool = True) -> Draw:
    config = DrawConfig(SourceSpec(SourceKind.TASKS, size=1))
    return Draw(
        name, "run", config, is_active=is_active, progress=DrawProgress(batch=batch, acked=batch - 1, place=batch)
    )


async def deliver(store: Store, draw: str, number: int) -> None:
    """Delivers one batch of one group with two members."""
    if number == 1:
        await store.put_items(draw, 0, [{"n": "x" * 1000}])
        await store.put_draw(draw_of(draw, 0), {})
    name = f"{draw}.{number}"
    members = [Rollout(f"{name}-{k}", "run", Task("shell", {"at": name}), group=name, index=k) for k in range(2)]
    group = Group(name, "run", 2, draw=draw, state=GroupState.DELIVERED, batch=number, place=number, started=2)
    batch = Batch(draw, number, 1, 0, number - 1, delivered=1, is_open=False)
    await store.step(Decision(tuple(Submission(one, {}) for one in members), (group,), draw_of(draw, number), (batch,)))
    for one in members:
        await store.end(one.id, QUEUED, completed(), trajectory(one.id))


async def evaluate(store: Store, name: str) -> None:
    """Starts and completes an evaluation of one task."""
    await store.put_run(Run(name), {})
    await store.put_items(eval_items(name), 0, [{"n": "x" * 1000}])
    await store.put_eval(EvalRecord(name, name, "default", 1, tasks=1), {})
    sample = Rollout(f"{name}.0-0", name, Task("shell"), group=f"{name}.0")
    group = Group(f"{name}.0", name, 1, started=1)
    await store.put_groups([(group, {})], [Submission(sample, {})])
    await store.end(sample.id, QUEUED, completed(), trajectory(sample.id))
    await store.step(Decision(groups=(Group(f"{name}.0", name, 1, started=1, state=GroupState.COMPLETE),)))
    await store.put_eval(EvalRecord(name, name, "default", 1, state="done", tasks=1))


async def rows_of(open_any: AnyOpener) -> dict[str, int]:
    """Counts the rows of each table."""
    if isinstance(open_any, PostgresOpener):
        names = "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relnamespace = (SELECT oid FROM "
        tables = [row[0] for row in await open_any.execute(f"{names} pg_namespace WHERE nspname = current_schema())")]
        return {table: (await open_any.execute(f"SELECT COUNT(*) FROM {table}"))[0][0] for table in tables}
    connection = sqlite3.connect(open_any.path)
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    counts = {table: connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in tables}
    connection.close()
    return counts


@pytest.mark.slow
async def test_a_store_under_a_steady_load_stops_growing(open_any: AnyOpener) -> None:
    """Every hour short draws are created and ended, a long one gets a batch and its previous batch is acknowledged,
    evaluations and single rollouts end, and an unknown id is cancelled. The fourth day adds nothing to the second."""
    clock = open_any.read_clock = Clock()
    each = 5 if isinstance(open_any, SqliteOpener) else 1  # a commit of PostgreSQL costs ten times as much
    sizes: list[dict[str, int]] = []
    files: list[int] = []
    async with await open_any() as store:
        await store.put_run(Run("run"), {})
        for hour in range(24 * 4):
            await deliver(store, "long", hour + 1)
            await store.acknowledge_draw("long", hour)
            for few in range(each):
                name = f"short{hour}x{few}"
                await deliver(store, name, 1)
                await store.step(Decision(draw=draw_of(name, 1, is_active=False)))
                await evaluate(store, f"eval{hour}x{few}")
            for number in range(2 * each):
                await one_ended(store, f"lone{hour}-{number}")
            await store.request_cancel(f"unknown{hour}", "", run="run")
            clock.now_s += HOUR_S
            await store.sweep(DAY)
            if hour % 24 == 23:
                sizes.append(await rows_of(open_any))
                if isinstance(open_any, SqliteOpener):
                    await store.close()
                    files.append(open_any.path.stat().st_size)
                    store = await open_any()
        await store.close()
    assert sizes[0]["rollouts"] > 100 * each and sizes[0]["draws"] > 20 * each and sizes[0]["evals"] > 20 * each
    for table, count in sizes[-1].items():
        assert count <= sizes[1][table] + 2, (table, sizes)
    assert not files or files[-1] <= files[1] * 1.05, files


async def test_retention_of_an_older_store_starts_with_its_migration(open_store: SqliteOpener) -> None:
    clock = open_store.read_clock = Clock()
    connection = sqlite3.connect(open_store.path, isolation_level=None)
    migrate(connection, MIGRATIONS[:5])
    connection.execute("INSERT INTO runs (id, digest, record) VALUES ('run', '', ?)", (to_json(Run("run")),))
    for state in ("running", "done"):
        record = to_json(EvalRecord(state, "run", "default", 1, state=state))
        connection.execute("INSERT INTO evals (id, run, digest, record) VALUES (?, 'run', '', ?)", (state, record))
    connection.close()
    async with await open_store() as store:
        assert await store.sweep(DAY) == SweepResult()
        await wait_for(store, clock, 25 * HOUR_S)
        assert [one.id for one in await store.list_evals()] == ["running"]
