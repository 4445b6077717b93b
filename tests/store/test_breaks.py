"""Full disks, files of other programs, and places where a store must not be."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import sys
from asyncio.subprocess import PIPE
from contextlib import closing
from pathlib import Path

import pytest

from rollyard.core import Group, IllegalMove, Position, Run, State
from rollyard.core.failure import InvalidRequest, NotFound
from rollyard.store import Recovery, SqliteStore, Stale, StoreLocked, StoreUnusable, encode_trajectory
from rollyard.store.codec import to_json
from rollyard.store.sql.schema import MIGRATIONS, migrate
from rollyard.store.sqlite.place import mount_of, refuse_network
from rollyard.testing.store_conformance import completed, submission, trajectory
from tests.store.conftest import AnyOpener, SqliteOpener


async def test_a_full_disk_stops_the_store_and_loses_no_acknowledged_write(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" "$3" "$1"'
    argv = ("unshare", "-Urm", "sh", "-c", script, "sh", tmp_path, sys.executable)
    process = await asyncio.create_subprocess_exec(*argv, Path(__file__).with_name("full_disk.py"), stdout=PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    report = json.loads(out)
    assert report["failures"] == ["StoreUnusable: the store failed and was stopped: OperationalError: " + _FULL]
    assert len(report["later"]) == 3 and all(_FULL in reason for reason in report["later"])
    assert len(report["acknowledged"]) > 10
    assert set(report["acknowledged"]) <= set(report["ended"]) and report["trajectories"] == len(report["ended"])
    assert report["works_again"] is True


_FULL = "database or disk is full"


async def test_a_locked_store_reports_its_holder(open_store: SqliteOpener) -> None:
    async with await open_store():
        with pytest.raises(StoreLocked, match=f"pid {os.getpid()} on "):
            await open_store()


async def test_the_files_of_a_store_are_readable_by_their_owner_only(open_store: SqliteOpener) -> None:
    async with await open_store():
        files = list(open_store.path.parent.iterdir())
        assert len(files) == 4  # the store, its lock, its WAL and the WAL's index
        assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


async def test_a_newer_schema_is_refused(open_store: SqliteOpener) -> None:
    async with await open_store():
        pass
    connection = sqlite3.connect(open_store.path)
    connection.execute("PRAGMA user_version = 999")
    connection.close()
    with pytest.raises(StoreUnusable, match=r"schema 999 .* newer version"):
        await open_store()


async def test_a_file_of_another_program_is_refused(tmp_path: Path, open_store: SqliteOpener) -> None:
    connection = sqlite3.connect(open_store.path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(StoreUnusable, match="another program"):
        await open_store()
    open_store.path.write_bytes(b"not a database at all, but long enough to look like one" * 50)
    with pytest.raises(StoreUnusable, match="not a database"):
        await open_store()
    with pytest.raises(StoreUnusable, match="cannot be opened"):
        await SqliteStore.open(tmp_path / "rollyard.db" / "below a file")


def test_migrations_are_applied_once_and_a_failed_one_is_rolled_back(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    assert migrate(connection) == len(MIGRATIONS)
    assert migrate(connection) == 0
    with pytest.raises(sqlite3.OperationalError):
        migrate(connection, (*MIGRATIONS, ("CREATE TABLE extra (x)", "nonsense")))
    assert migrate(connection, (*MIGRATIONS, ("CREATE TABLE extra (x)",))) == 1
    connection.close()


def test_engines_of_an_older_store_keep_their_order(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    migrate(connection, MIGRATIONS[:2])
    connection.executemany("INSERT INTO engines VALUES (?, '')", [("z",), ("a",), ("m",)])
    migrate(connection)
    assert connection.execute("SELECT id FROM engines ORDER BY seq").fetchall() == [("z",), ("a",), ("m",)]
    connection.close()


def test_tombstones_of_an_older_store_get_their_run(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    migrate(connection, MIGRATIONS[:9])
    connection.executemany("INSERT INTO runs (id, digest, record) VALUES (?, '', '')", [("default",), ("a",)])
    rows = [(key, "", 0.0) for key in ("one", "a~two", "deleted~three")]
    connection.executemany("INSERT INTO tombstones (id, detail, created_at) VALUES (?, ?, ?)", rows)
    migrate(connection)
    found = connection.execute("SELECT id, run FROM tombstones ORDER BY seq").fetchall()
    assert found == [("one", "default"), ("a~two", "a")]
    connection.close()


MOUNTINFO = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:40 / /home rw shared:7 master:2 - nfs4 filer:/export/home rw
31 30 0:41 / /home/local\040disk rw - xfs /dev/sdb1 rw
32 22 0:42 / /scratch rw - lustre mds@tcp:/scratch rw
33 22 0:43 / /twice rw - ext4 /dev/sdc1 rw
34 22 0:44 / /twice rw - fuse.sshfs user@host: rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/var/lib", "ext4"),
        ("/homework", "ext4"),
        ("/home", "nfs4"),
        ("/home/me/data", "nfs4"),
        ("/home/local disk/data", "xfs"),
        ("/scratch/x", "lustre"),
        ("/twice", "fuse.sshfs"),
    ],
)
def test_the_mount_of_a_path_is_found(path: str, kind: str) -> None:
    mount = mount_of(path, MOUNTINFO)
    assert mount is not None and mount.kind == kind


def test_network_file_systems_are_refused() -> None:
    refuse_network(Path("/var/lib"), MOUNTINFO)
    for folder in ("/home/me", "/scratch", "/twice"):
        with pytest.raises(StoreUnusable, match="network file system"):
            refuse_network(Path(folder), MOUNTINFO)


async def test_a_closed_store_raises_store_unusable(open_any: AnyOpener) -> None:
    store = await open_any()
    await store.put_run(Run("run"), {})
    assert len(await store.submit([submission("a")])) == 1
    await store.close()
    await store.close()
    with pytest.raises(StoreUnusable, match="closed"):
        await store.submit([submission("b")])
    with pytest.raises(StoreUnusable, match="closed"):
        await store.get("a")


async def test_close_commits_what_is_queued(open_any: AnyOpener) -> None:
    async with await open_any() as store:
        await store.put_run(Run("run"), {})
        await store.submit([submission("a")])
        moved = store.move("a", Position(), Position(State.INIT))
    assert moved.done()
    async with await open_any() as store:
        assert store.recovered.requeued == 1


async def test_cancelling_a_caller_does_not_cancel_its_write(open_any: AnyOpener) -> None:
    async with await open_any() as store:
        await store.put_run(Run("run"), {})
        caller = asyncio.create_task(store.submit([submission("a")]))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await store.submit([submission("b")])
        assert (await store.get("a")).id == "a"


async def test_the_failure_of_a_move_that_is_not_awaited_is_logged(
    open_any: AnyOpener, caplog: pytest.LogCaptureFixture
) -> None:
    async with await open_any() as store:
        await store.put_run(Run("run"), {})
        with caplog.at_level(logging.WARNING, "rollyard.store"):
            store.move("unknown", Position(), Position(State.INIT))
            await store.submit([submission("a")])
    assert [record.rollout for record in caplog.records if hasattr(record, "rollout")] == ["unknown"]  # type: ignore[attr-defined]


async def test_a_move_of_a_rollout_that_was_just_cancelled_logs_no_warning(
    open_any: AnyOpener, caplog: pytest.LogCaptureFixture
) -> None:
    async with await open_any() as store:
        await store.put_run(Run("run"), {})
        await store.submit([submission("a")])
        await store.request_cancel("a", "no need")
        with caplog.at_level(logging.WARNING, "rollyard.store"), pytest.raises(Stale):
            await store.move("a", Position(), Position(State.INIT))
    assert [record for record in caplog.records if hasattr(record, "rollout")] == []


async def test_illegal_moves_are_refused_at_once(open_any: AnyOpener) -> None:
    async with await open_any() as store:
        with pytest.raises(IllegalMove):
            store.move("a", Position(), Position(State.RUN))
        with pytest.raises(IllegalMove):
            store.move("a", Position(), Position(State.INIT, attempt=2))
        with pytest.raises(IllegalMove):
            store.move("a", Position(State.RUN), Position(State.EVAL))  # save_run does that
        with pytest.raises(IllegalMove):
            store.move("a", Position(State.RUN), Position(State.ENDED))  # end does that
        with pytest.raises(IllegalMove):
            await store.end("a", Position(State.ENDED), completed())


@pytest.mark.parametrize("body", [{"x": float("nan")}, {"x": "\ud800"}], ids=["nan", "surrogate"])
async def test_a_body_that_is_not_json_is_an_invalid_request(body: dict[str, object], open_any: AnyOpener) -> None:
    async with await open_any() as store:
        await store.put_run(Run("run"), {})
        new = submission("a")
        with pytest.raises(InvalidRequest):
            task = type(new.rollout.task)("shell", body)  # type: ignore[arg-type]
            rollout = type(new.rollout)("a", "run", task)
            await store.submit([type(new)(rollout, body)])  # type: ignore[arg-type]


async def test_the_store_waits_for_a_shell_that_holds_the_write_lock(open_store: SqliteOpener) -> None:
    async with await open_store() as store:
        await store.put_run(Run("run"), {})
        shell = sqlite3.connect(open_store.path, isolation_level=None)
        shell.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(store.submit([submission("a")]))
        for _ in range(50):  # the event loop keeps running
            await asyncio.sleep(0)
        assert not waiting.done()
        shell.execute("COMMIT")
        shell.close()
        assert len(await waiting) == 1


async def test_commits_are_reported_and_batched(tmp_path: Path) -> None:
    commits: list[tuple[float, int]] = []
    async with await SqliteStore.open(
        tmp_path / "x.db", on_commit=lambda seconds, operations: commits.append((seconds, operations))
    ) as store:
        await store.put_run(Run("run"), {})
        await asyncio.gather(*(store.submit([submission(f"r{i}")]) for i in range(100)))
    assert sum(operations for _, operations in commits) == 102  # including the clock, at the close
    assert len(commits) < 20


async def test_a_failing_on_commit_callback_does_not_stop_the_store(tmp_path: Path) -> None:
    async with await SqliteStore.open(tmp_path / "x.db", on_commit=lambda seconds, operations: 1 / 0) as store:  # type: ignore[arg-type]
        await store.put_run(Run("run"), {})
        assert len(await store.submit([submission("a")])) == 1 and store.broken is None


async def test_a_run_and_everything_in_it_are_deleted_in_one_commit(tmp_path: Path) -> None:
    commits: list[int] = []
    async with await SqliteStore.open(tmp_path / "x.db", on_commit=lambda _, n: commits.append(n)) as store:
        await store.put_run(Run("run"), {})
        await store.put_groups([(Group("g", "run", 2), {})], [submission("a", group="g")])
        await store.end("a", Position(), completed())
        commits.clear()
        await store.delete_run("run")
        assert commits == [1]
        with pytest.raises(NotFound):
            await store.get_group("g")


async def test_a_file_that_cannot_be_read_breaks_the_store(open_store: SqliteOpener) -> None:
    async with await open_store() as store:
        with closing(sqlite3.connect(open_store.path)) as shell:
            shell.execute("DROP TABLE policies")
        with pytest.raises(StoreUnusable, match="cannot be read: no such table"):
            await store.policies()
        assert store.broken is not None and "cannot be read: no such table" in store.broken


async def test_a_store_of_an_older_version_opens_with_rollouts_in_every_state(open_store: SqliteOpener) -> None:
    connection = sqlite3.connect(open_store.path, isolation_level=None)
    migrate(connection, MIGRATIONS[:2])
    connection.execute("INSERT INTO runs (id, digest, record) VALUES ('run', '', ?)", (to_json(Run("run")),))
    for number, state in enumerate(State, 1):
        ended = (1, to_json(completed())) if state is State.ENDED else (None, None)
        connection.execute(
            'INSERT INTO rollouts (seq, id, run, state, attempt, "index", priority, ended_seq, created_at, updated_at, '
            "digest, ending) VALUES (?, ?, 'run', ?, 1, 0, 0, ?, 1, 1, '', ?)",
            (number, state, state, *ended),
        )
        connection.execute("INSERT INTO tasks VALUES (?, ?)", (number, to_json(submission(state).rollout.task)))
        if state in (State.EVAL, State.ENDED):
            row = (number, 3, '{"is_reevaluable":true}', bytes(encode_trajectory(trajectory(state))))
            connection.execute("INSERT INTO trajectories VALUES (?, ?, ?, ?)", row)
    connection.execute("UPDATE meta SET value = 1 WHERE key = 'ended_seq'")
    connection.close()
    async with await open_store(keeps_leases=True) as store:
        assert store.recovered == Recovery(queued=1, requeued=3, evals=("eval",))
        assert {state: n for state, n in (await store.counts()).items() if n} == {"queued": 4, "eval": 1, "ended": 1}
        assert await store.trajectory("ended") == trajectory("ended")
        results = (await store.results_of())["run"]
        assert (results.rewarded, results.mean_reward, results.trainable) == (1, 1.0, 1), "of older records, too"
        assert await store.saved_run("eval") == (trajectory("eval"), {"is_reevaluable": True})
        assert list(await store.lease([("queued", 1, "n"), ("run", 2, "n")])) == ["queued", "run"]


async def test_clients_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard.store.sql.sql_store.ROOM", 3)
    sizes: list[int] = []
    async with await SqliteStore.open(tmp_path / "x.db", on_commit=lambda _, n: sizes.append(n)) as store:
        await store.put_run(Run("run"), {})
        await asyncio.gather(*(store.submit([submission(f"r{i}")]) for i in range(20)))
        assert max(sizes) <= 3
        moves = [store.move(f"r{i}", Position(), Position(State.INIT)) for i in range(20)]
        await asyncio.gather(*moves)
    assert max(sizes) == 20  # writes of the pipeline do not wait


async def test_a_stale_end_after_a_retry_reports_the_rollouts_position(open_any: AnyOpener) -> None:
    async with await open_any() as store:
        await store.put_run(Run("run"), {})
        await store.submit([submission("a")])
        with pytest.raises(Stale, match="queued, attempt 1; not in run, attempt 2"):
            await store.end("a", Position(State.RUN, 2), completed())
