"""Many large tasks: read in pages of limited size, stored once, and never in texts longer than SQLite allows."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from rollyard.core import Group, Rollout, Run, State, Task
from rollyard.sampling.open_group import rollouts_of
from rollyard.store import SqliteStore, Submission
from tests.store.small_texts import lower_limits


@pytest.fixture(autouse=True)
def small_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[SqliteStore, None]:
    async with await SqliteStore.open(tmp_path / "store.db") as store:
        await store.put_run(Run("run"), {})
        yield store


def large(text: str = "x", size: int = 150_000) -> Task:
    return Task("shell", {"instruction": text * size})


def members(task: Task, count: int, group: str = "g") -> list[Submission]:
    rollouts = [Rollout(f"{group}-{index}", "run", task, group=group, index=index) for index in range(count)]
    return [Submission(rollout, {"id": rollout.id}) for rollout in rollouts]


async def bodies(store: SqliteStore) -> list[int]:
    def sizes(connection: Any) -> list[int]:
        return [row[0] for row in connection.execute("SELECT bytes FROM bodies").fetchall()]

    return await store._read(sizes)


async def test_a_group_larger_than_one_sqlite_text_is_read_completely(store: SqliteStore) -> None:
    await store.submit(members(large(), 40))
    rollouts = await rollouts_of(store, Group("g", "run", 40, started=40))
    assert [rollout.index for rollout in rollouts] == list(range(40))
    assert all(rollout.task == large() for rollout in rollouts)


async def test_a_page_has_as_many_rollouts_as_fit_and_a_cursor_for_the_next(store: SqliteStore) -> None:
    await store.submit([new for n in range(9) for new in members(large(str(n)), 1, group=f"g{n}")])
    ids: list[str] = []
    after: str | None = None
    while True:
        page = await store.list(runs=["run"], after=after, limit=1000)
        assert 1 <= len(page.rollouts) <= 2, "two tasks of 150 kB fit into a page of 400 kB"
        ids += [rollout.id for rollout in page.rollouts]
        after = page.next_cursor
        if after is None:
            break
    assert ids == [f"g{n}-0" for n in range(9)]


async def test_a_rollout_larger_than_a_page_is_a_page_of_its_own(store: SqliteStore) -> None:
    await store.submit(members(large(size=900_000), 2))
    page = await store.list(runs=["run"], limit=10)
    assert len(page.rollouts) == 1 and page.next_cursor is not None


async def test_many_rollouts_are_read_by_their_ids(store: SqliteStore) -> None:
    await store.submit([new for n in range(20) for new in members(large(str(n % 10)), 1, group=f"g{n}")])
    ids = [f"g{n}-0" for n in reversed(range(20))]
    rollouts = await store.get_many([*ids, "unknown"])
    assert [rollout.id for rollout in rollouts] == ids
    assert [rollout.task for rollout in rollouts] == [large(str(n % 10)) for n in reversed(range(20))]


async def test_a_task_is_stored_once_and_deleted_with_its_last_rollout(store: SqliteStore) -> None:
    task = large()
    await store.submit(members(task, 30))
    await store.submit(members(large(), 5, group="h"))  # the same task, submitted later
    assert len(await bodies(store)) == 1
    await store.put_run(Run("other"), {})
    await store.submit([Submission(Rollout("o-0", "other", task), {})])
    for rollout_id in [*(f"g-{n}" for n in range(30)), *(f"h-{n}" for n in range(5))]:
        await store.request_cancel(rollout_id, "enough")
    await store.delete_run("run")
    assert len(await bodies(store)) == 1, "another run's rollout has it"
    await store.request_cancel("o-0", "enough")
    await store.delete_run("other")
    assert await bodies(store) == []


async def test_records_that_exceed_one_sqlite_text_are_read_row_by_row(store: SqliteStore) -> None:
    groups = [(Group(f"g{n}", "run", size=1), {"n": n}) for n in range(4000)]
    await store.put_groups(groups, [])
    assert len(await store.unfinished_groups()) == 4000
    await store.submit([Submission(Rollout(f"r{n}", "run", Task("shell")), {"n": n}) for n in range(15_000)])
    assert len(await store.queued()) == 15_000


async def test_tasks_of_an_older_store_are_still_read(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    async with await SqliteStore.open(path) as store:
        await store.put_run(Run("run"), {})
        await store.submit(members(large(), 3))
    with sqlite3.connect(path) as connection:  # as an older schema stored them
        connection.execute("INSERT INTO tasks SELECT r.seq, b.task FROM rollouts r JOIN bodies b ON b.id = r.body")
        connection.execute("UPDATE rollouts SET body = NULL")
        connection.execute("DELETE FROM bodies")
    connection.close()
    async with await SqliteStore.open(path) as store:
        assert [one.task for one in await rollouts_of(store, Group("g", "run", 3, started=3))] == [large()] * 3
        assert (await store.get("g-1")).state is State.QUEUED
        await store.request_cancel("g-1", "enough")
