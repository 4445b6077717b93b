"""The catalog follows the store, and costs the dashboard only when it fails."""

import asyncio
import logging
import sqlite3
import threading
from pathlib import Path

import pytest

from rollyard.catalog import Filter, Search
from rollyard.catalog import catalog as module
from rollyard.catalog.readers import MOST_WAITING
from rollyard.core import Blame, Ending, Failure, Outcome, Run, Score, State
from rollyard.core.failure import RateLimited
from rollyard.core.rollout import Summary
from tests.catalog.parts import catalog_of, caught_up, end, eventually, opened


def failed(code: str, blame: Blame = Blame.INFRA) -> Ending:
    return Ending(Outcome.FAILED, failure=Failure(code, blame, "why"))


async def test_rows_are_filtered_and_newest_first(tmp_path: Path):
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        await end(store, "a", versions=(3, 5))
        await end(store, "b", ending=failed("sandbox_lost"))
        await end(store, "c", run="other", ending=Ending(Outcome.COMPLETED, Score(0.25)))
        await caught_up(catalog)

        async def keys(**wanted: object) -> str:
            return "".join(row.key for row in (await catalog.page(Filter(**wanted))).rows)  # type: ignore[arg-type]

        assert await keys() == "cba"
        assert await keys(runs=("run",)) == "ba"
        assert await keys(runs=("run", "other")) == "cba"
        assert await keys(runs=()) == ""
        assert await keys(code="sandbox_lost") == await keys(outcome="failed") == "b"
        assert await keys(min_reward=0.25, max_reward=0.5) == "c"
        assert await keys(is_trainable=True) == "a"
        assert await keys(version=4) == "a"
        assert await keys(version=6) == await keys(version=2) == ""
        assert await keys(environment="shell", agent="native", policy="default") == "cba"
        assert await keys(environment="math") == ""
        (row,) = (await catalog.page(Filter(code="sandbox_lost"))).rows
        assert row.row["name"] == "do b" and row.row["blame"] == "infra" and row.row["reward"] is None


async def test_pages_follow_each_other(tmp_path: Path):
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        for number in range(7):
            await end(store, f"r{number}", "same words")
        await caught_up(catalog)
        for search in (None, Search.of("words")):
            keys, before = list[str](), None
            while True:
                page = await catalog.page(Filter(), search, before=before, limit=3)
                assert page.total == 7 and page.is_total_exact
                keys += [row.key for row in page.rows]
                if (before := page.next_seq) is None:
                    break
            assert keys == [f"r{number}" for number in reversed(range(7))]


async def test_texts_are_found_and_shown(tmp_path: Path):
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        await end(store, "a", "first line\nthe file src/main.py does not exist\nlast")
        await end(store, "b", "another file")
        await caught_up(catalog)
        page = await eventually(catalog, "a", search="src/main.py does")
        assert page.rows[0].row["match"] == {
            "before": "first line the file ",
            "hit": "src/main.py does",
            "after": " not exist last",
        }
        await eventually(catalog, "b", "a", search="FIL")
        await eventually(catalog, search="missing")


async def test_a_restart_continues_where_it_stopped(tmp_path: Path):
    async with opened(tmp_path) as store:
        await end(store, "a")
        async with catalog_of(tmp_path, store) as catalog:
            await caught_up(catalog)
        await end(store, "b")
        async with catalog_of(tmp_path, store) as catalog:
            await eventually(catalog, "b", "a", search="hello")


@pytest.mark.parametrize("what", ["missing", "garbage", "torn", "older", "another store"])
async def test_it_is_built_again(tmp_path: Path, what: str):
    path = tmp_path / module.FILE
    async with opened(tmp_path) as store:
        for number in range(3):
            await end(store, f"r{number}")
        async with catalog_of(tmp_path, store) as catalog:
            await caught_up(catalog)
        if what == "missing":
            path.unlink()
        elif what == "garbage":
            path.write_bytes(b"no database at all" * 1000)
        elif what == "torn":
            data = bytearray(path.read_bytes())
            data[4096:] = bytes(len(data) - 4096)
            path.write_bytes(data)
        else:
            with sqlite3.connect(path) as connection:
                connection.execute(
                    "PRAGMA user_version = 99" if what == "older" else "UPDATE rollouts SET id = 'x' WHERE seq = 3"
                )
            connection.close()
        async with catalog_of(tmp_path, store) as catalog:
            await eventually(catalog, "r2", "r1", "r0", search="hello")


async def test_a_broken_file_is_built_again_while_it_is_used(tmp_path: Path):
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        await end(store, "a")
        await caught_up(catalog)
        with sqlite3.connect(tmp_path / module.FILE) as connection:
            connection.execute("DROP TABLE records")
        connection.close()
        await end(store, "b")
        await eventually(catalog, "b", "a", search="hello")


async def test_a_locked_file_is_reported_once_and_followed_later(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "rollyard.catalog")
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        await end(store, "a")
        await caught_up(catalog)
        other = sqlite3.connect(tmp_path / module.FILE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        await end(store, "b")
        catalog.wake()
        while not caplog.records:
            await asyncio.sleep(0.02)
        page = await catalog.page(Filter())
        assert [row.key for row in page.rows] == ["a"] and page.behind == 1
        other.execute("ROLLBACK")
        other.close()
        await eventually(catalog, "b", "a")
    assert len(caplog.records) == 1


async def test_what_cannot_be_opened_costs_nothing_else(tmp_path: Path):
    (tmp_path / module.FILE).mkdir()
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        await end(store, "a")
        page = await catalog.page(Filter())
        assert not page.rows and page.behind == 1
        assert await catalog.failures(None, 0.0) == ()
        assert (await catalog.series("run", "time", 60)).x == []


async def test_deleted_rollouts_are_never_listed_and_leave_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CHECK_S", 0.05)
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        for number in range(4):
            await end(store, f"o{number}", "gone", run="other")
        await end(store, "kept", "gone")
        await caught_up(catalog)
        await store.delete_run("other")
        page = await catalog.page(Filter(), Search.of("gone"), limit=2)
        assert [row.key for row in page.rows] == ["kept"]
        async with asyncio.timeout(60):
            while (await catalog.page(Filter())).total > 1:
                await asyncio.sleep(0.02)
    with sqlite3.connect(tmp_path / module.FILE) as connection:
        for table in ("rollouts", "records", "texts"):
            assert connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (1,), table
        assert connection.execute("SELECT COUNT(*) FROM words WHERE words MATCH 'gone'").fetchone() == (1,)
    connection.close()


async def test_the_text_of_a_pruned_rollout_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CHECK_S", 0.05)
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        await end(store, "a", "acknowledged")
        await caught_up(catalog)
        await store.acknowledge("run", "e:1")
        await eventually(catalog, search="acknowledged")
        await eventually(catalog, "a")


async def test_a_run_of_the_same_name_does_not_bring_old_rows_back(tmp_path: Path):
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        await end(store, "a", "old")
        await caught_up(catalog)
        await store.delete_run("run")
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        await end(store, "a", "new")
        await caught_up(catalog)
        page = await eventually(catalog, "a")
        assert page.rows[0].seq == 2


async def test_a_new_run_has_no_figures_of_a_deleted_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        await end(store, "a", "secret", ending=failed("sandbox_lost"))
        await end(store, "b", "secret", versions=(1, 1))
        await end(store, "c", "common", run="other", ending=failed("setup_failed", Blame.TASK))
        await caught_up(catalog)
        assert (await catalog.series("run", "time", 60)).totals["count"] == 2
        with monkeypatch.context() as patch:
            patch.setattr(catalog, "_check_some", _nothing)  # rows stay in the file
            await store.delete_run("run")
            await catalog.forget_run("run")
            await store.put_run(Run("run", policy="new"), {})
            await end(store, "n", "common")
            await caught_up(catalog)
            for by in ("time", "version"):
                found = await catalog.series("run", by, 60)
                assert found.totals["count"] == 1 and found.totals["failures"] == []
            for runs in (("run",), ("run", "other")):
                page = await catalog.page(Filter(runs=runs), Search.of("secret"))
                assert (page.rows, page.total) == ((), 0)
            page = await catalog.page(Filter(runs=("run", "other")))
            assert [(row.key, row.row["policy"]) for row in page.rows] == [("n", "new"), ("c", "default")]
            assert page.total == 2
            assert [one.code for one in await catalog.failures(["run", "other"], 0.0)] == ["setup_failed"]
        catalog.wake()
        async with asyncio.timeout(60):
            while (await catalog.page(Filter())).total > 2:
                catalog.wake()
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("is_reported", [True, False])
async def test_a_run_that_was_deleted_before_a_restart_leaves_nothing_to_a_new_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reported: bool
) -> None:
    monkeypatch.setattr(module.Catalog, "_check_some", _nothing)  # rows stay in the file
    async with opened(tmp_path) as store:
        async with catalog_of(tmp_path, store) as catalog:
            for number in range(3):
                await end(store, f"r{number}", "secret", versions=(7, 7))
            await end(store, "c", run="other", versions=(3, 3))
            await caught_up(catalog)
            await store.delete_run("run")
            if is_reported:
                await catalog.forget_run("run")
        await store.put_run(Run("run"), {})
        await end(store, "n", versions=(1, 1))
        monkeypatch.setattr(module, "CHECKED", 2)
        async with catalog_of(tmp_path, store) as catalog:
            await caught_up(catalog)
            found = await catalog.series("run", "version", 60)
            assert (found.totals["count"], found.x, found.staleness) == (1, [1.0], [0.0])
            page = await catalog.page(Filter(runs=("run", "other")))
            assert ([row.key for row in page.rows], page.total) == (["n", "c"], 2)
            assert (await catalog.series("other", "version", 60)).totals["count"] == 1


async def test_the_marks_of_deleted_runs_and_their_versions_leave_with_their_rows(tmp_path: Path) -> None:
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        await end(store, "a", versions=(5, 5))
        await caught_up(catalog)
        await store.delete_run("run")
        await catalog.forget_run("run")
        async with asyncio.timeout(60):
            while catalog._deleted.among(["run"]):  # pyright: ignore[reportPrivateUsage]
                await asyncio.sleep(0.02)
    with sqlite3.connect(tmp_path / module.FILE) as connection:
        for table in ("rollouts", "runs"):
            assert connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (0,), table
    connection.close()


async def _nothing(*_: object) -> None: ...


async def test_a_callers_queries_run_one_after_the_other_and_delay_no_one_else(tmp_path: Path) -> None:
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        await end(store, "a")
        await caught_up(catalog)
        readers = catalog._readers  # pyright: ignore[reportPrivateUsage]
        goes_on = threading.Event()

        def slow(_: sqlite3.Connection) -> None:
            goes_on.wait()

        flood = [asyncio.create_task(readers.run(slow, caller="many")) for _ in range(MOST_WAITING)]
        try:
            await asyncio.sleep(0)  # all of them wait or run
            async with asyncio.timeout(60):
                page = await catalog.page(Filter(), caller="one")
            assert [row.key for row in page.rows] == ["a"]
            with pytest.raises(RateLimited):
                await catalog.page(Filter(), caller="many")
        finally:
            goes_on.set()
            await asyncio.gather(*flood)
        assert (await catalog.page(Filter(), caller="many")).total == 1


async def test_failures_are_counted_by_code_and_blame(tmp_path: Path):
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        for number in range(3):
            await end(store, f"r{number}", ending=failed("sandbox_lost" if number else "engine_timeout"))
        await end(store, "o", run="other", ending=failed("setup_failed", Blame.TASK))
        await caught_up(catalog)
        counts = [(one.code, one.blame, one.count) for one in await catalog.failures(None, 0.0)]
        assert counts[0] == ("sandbox_lost", "infra", 2) and len(counts) == 3
        assert [one.code for one in await catalog.failures(["other"], 0.0)] == ["setup_failed"]
        assert await catalog.failures(None, 4e9) == []


async def test_a_series_has_the_figures_of_each_bucket(tmp_path: Path):
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        for version in (1, 1, 3):
            await end(store, f"r{version}-{await store.last_ended()}", versions=(max(0, version - 1), version))
        zero = Ending(Outcome.COMPLETED, Score(0.0), summary=Summary(oldest_version=1, newest_version=3))
        await end(store, "zero", ending=zero)
        await end(store, "failed", ending=failed("sandbox_lost"))
        await caught_up(catalog)
        found = await catalog.series("run", "version", 60)
        assert found.x == [1.0, 3.0] and found.count == [2, 2]
        assert found.reward == found.pass_rate == [1.0, 0.5]
        assert found.staleness == [1.0, 1.5] and found.response_tokens == [30.0, 15.0]
        assert found.share["model"][0] == 0.4 and found.share["waiting"][0] == 0.1
        assert sum(share[0] or 0 for share in found.share.values()) == pytest.approx(1.0)
        assert found.totals["count"] == 5
        assert found.totals["failures"] == [{"code": "sandbox_lost", "blame": "infra", "count": 1}]
        over_time = await catalog.series("run", "time", 60)
        assert sum(over_time.count) == 5 and sum(over_time.failures[0].counts) == 1
        assert len(over_time.x) <= 60 and over_time.environments == ["shell"]
        assert (await catalog.series("nothing", "time", 60)).x == []


async def test_a_series_counts_a_code_by_its_blames(tmp_path: Path):
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        for number, blame in enumerate((Blame.POLICY, Blame.TASK, Blame.TASK)):
            await end(store, f"r{number}", ending=failed("run_deadline", blame))
        await caught_up(catalog)
        found = await catalog.series("run", "time", 60)
        assert [(one.code, one.blame, sum(one.counts)) for one in found.failures] == [
            ("run_deadline", "task", 2),
            ("run_deadline", "policy", 1),
        ]
        assert found.totals["failures"] == [
            {"code": "run_deadline", "blame": "task", "count": 2},
            {"code": "run_deadline", "blame": "policy", "count": 1},
        ]


async def test_every_rollout_is_in_it_once_after_many_ends(tmp_path: Path):
    async with opened(tmp_path) as store, catalog_of(tmp_path, store) as catalog:
        await asyncio.gather(*(end(store, f"r{number}") for number in range(150)))
        await caught_up(catalog)
        page = await catalog.page(Filter(), limit=200)
        listed = await store.list(state=State.ENDED, limit=200, is_newest_first=True)
        assert [row.key for row in page.rows] == [rollout.id for rollout in listed.rollouts]
