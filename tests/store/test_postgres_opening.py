"""Servers and databases that cannot be used: each is refused with the cause and what to do, without any secret."""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from contextlib import suppress
from pathlib import Path

import asyncpg
import pytest

from bench.postgres import PASSWORD, PgServer
from bench.store_leases import measure_leases
from rollyard.core import Ending, Outcome, Run
from rollyard.core.failure import InternalError
from rollyard.store import SqliteStore, StoreUnusable, open_store
from rollyard.store.codec import to_json
from rollyard.store.opening import shown
from rollyard.store.postgres.address import Address
from rollyard.store.postgres.connection import PgConnection, in_greenlet
from rollyard.store.postgres.server import SETTINGS, check_server_version, connect, migrate
from rollyard.store.postgres.store import PostgresStore
from rollyard.store.sql.schema import MIGRATIONS
from rollyard.testing.store_conformance import completed, submission
from tests.store.conftest import AnyOpener, PostgresOpener

pytestmark = pytest.mark.slow


async def _refused(url: str) -> str:
    with pytest.raises(StoreUnusable) as caught:
        await PostgresStore.open(url)
    assert caught.value.__context__ is None or caught.value.__suppress_context__  # its cause is not printed
    return str(caught.value)


async def test_a_refusal_contains_the_cause_and_what_to_do(postgres: PgServer) -> None:
    assert "createdb --encoding UTF8 nosuch" in await _refused(postgres.url.removesuffix("yard") + "nosuch")
    assert "the password is wrong" in await _refused(postgres.url.replace("s3cr3t", "guess"))
    assert "the password is wrong" in await _refused(postgres.url.replace("yard:", "nobody:"))
    assert "no PostgreSQL server answers" in await _refused("postgresql://u:pw@127.0.0.1:1/db")
    assert "CREATE SCHEMA" in await _refused(f"{postgres.url}?search_path=nowhere")
    latin = postgres.create_database("latin", "--encoding", "LATIN1", "--template", "template0", "--locale", "C")
    assert "encoding LATIN1" in await _refused(latin)
    with pytest.raises(StoreUnusable, match="is PostgreSQL 11; Rollyard needs version 12"):
        check_server_version(11, Address.parse(postgres.url))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hun/ter2@127.0.0.1/db",
        "postgresql://u:1/ter2@127.0.0.1/db",
        "postgresql://u:hun#ter2@127.0.0.1/db",
        "postgresql://u:1#ter2@127.0.0.1/db",
        "postgresql://u:hun?ter2@127.0.0.1/db",
        "postgresql://u:1?ter2@127.0.0.1/db",
        "postgresql://u:1?a=ter2@127.0.0.1/db",
        "postgresql://u:hun@ter2@127.0.0.1/db",
        "postgresql://u:ter2@127.0.0.1:port/db",
        "postgresql://u:ter2@[127.0.0.1/db",
    ],
)
async def test_an_invalid_url_is_not_shown(url: str) -> None:
    error = await _refused(url)
    assert "the store's URL is invalid" in error and "ter2" not in error and "hun" not in error


async def test_a_password_is_never_shown(postgres: PgServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = PASSWORD.split("/")[0]
    error = await _refused(postgres.url.removesuffix("yard") + "nosuch")
    opener = PostgresOpener(postgres)
    async with await opener() as store:
        await opener.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
        with pytest.raises(StoreUnusable) as caught:
            while True:
                await store.put_run(Run("run"), {})
    logged = [str(record.__dict__) for record in caplog.records]
    assert any("was lost" in text for text in logged)
    for text in (error, str(caught.value), repr(Address.parse(opener.url)), shown(opener.url), caplog.text, *logged):
        assert secret not in text
    assert shown(postgres.url) == f"postgresql://yard@127.0.0.1:{postgres.port}/yard"
    assert shown(Path("x.db")) == "x.db"


@pytest.mark.parametrize("url", ["mysql://u:ter2@h/db", "sqlite:///ter2.db", "PostgreSQL://u:ter2@h/db"])
async def test_a_url_of_another_scheme_is_not_used_as_a_path(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreUnusable, match="this URL is neither") as opened:
        await open_store(url)
    with pytest.raises(StoreUnusable, match="this URL is neither") as refused:
        shown(url)
    assert "ter2" not in f"{opened.value}{refused.value}" and not list(tmp_path.iterdir())


async def test_the_session_that_locks_the_tables_of_a_store_is_named(
    open_postgres: PostgresOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await open_postgres()).close()
    monkeypatch.setitem(SETTINGS, "lock_timeout", "100ms")
    other = await asyncpg.connect(open_postgres.url, server_settings={"application_name": "a person's psql"})
    async with other.transaction():
        await other.execute("UPDATE meta SET value = value WHERE key = 'epoch'")
        error = await _refused(open_postgres.url)
        pid = other.get_server_pid()
    await other.close()
    assert f"locked for 30 s, by a person's psql (from 127.0.0.1, server process {pid})" in error
    assert "pg_terminate_backend" in error
    await (await open_postgres()).close()


async def test_the_stores_own_settings_override_those_of_the_database(postgres: PgServer) -> None:
    expected = {"default_transaction_isolation": "read committed", "idle_in_transaction_session_timeout": "1min"}
    url = postgres.create_database("strict")
    other = await asyncpg.connect(url)
    await other.execute("ALTER DATABASE strict SET default_transaction_isolation = 'serializable'")
    await other.execute("ALTER DATABASE strict SET idle_in_transaction_session_timeout = 0")
    await other.close()
    async with await PostgresStore.open(url) as store:
        connection = store._writer._connection  # type: ignore[attr-defined]
        assert {name: await connection.raw.fetchval(f"SHOW {name}") for name in expected} == expected
        assert await connection.raw.fetchval("SHOW tcp_user_timeout") == "25000"


async def test_a_rejected_certificate_is_reported(tmp_path: Path) -> None:
    for name in ("theirs", "ours"):
        files = ("-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.pem")
        argv = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", *files)
        process = await create_subprocess_exec(*argv, stderr=PIPE)
        await process.communicate()
        assert process.returncode == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "theirs.pem", tmp_path / "theirs.key")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Acts as a PostgreSQL server with TLS, whose client then disconnects."""
        await reader.readexactly(8)
        writer.write(b"S")
        with suppress(OSError):
            await writer.start_tls(context)
        writer.close()
        hung_up.set()

    hung_up = asyncio.Event()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"postgresql://u:ter2@127.0.0.1:{port}/db?sslmode=verify-ca&sslrootcert={tmp_path}"
        error = await _refused(f"{url}/ours.pem")
        assert (
            "no TLS connection could be made" in error and "CERTIFICATE_VERIFY_FAILED" in error and "ter2" not in error
        )
        await hung_up.wait()
        error = await _refused(f"{url}/none.pem")
        assert "that sslrootcert, sslcert or sslkey names" in error and "ter2" not in error
        error = await _refused(f"postgresql://u:ter2@127.0.0.1:{port}/db?sslmode=nonsense")
        assert "an option of its URL" in error and "verify-full" in error and "ter2" not in error


async def test_tables_of_another_program_are_refused(postgres: PgServer) -> None:
    for table in ("theirs (x int)", "meta (name text)", "meta (key text, value text)", "meta (key text, value int)"):
        opener = PostgresOpener(postgres)
        await opener.execute(f"CREATE SCHEMA {opener.schema}")
        await opener.execute(f"CREATE TABLE {opener.schema}.{table}")
        assert "tables of another program" in await _refused(opener.url)


async def test_a_newer_schema_is_refused(open_postgres: PostgresOpener) -> None:
    await (await open_postgres()).close()
    await open_postgres.execute("UPDATE meta SET value = 999 WHERE key = 'schema'")
    with pytest.raises(StoreUnusable, match=r"schema 999 .* newer version"):
        await open_postgres()


async def test_migrations_are_applied_once_and_a_failed_one_is_rolled_back(open_postgres: PostgresOpener) -> None:
    await open_postgres.execute(f"CREATE SCHEMA {open_postgres.schema}")
    address = Address.parse(open_postgres.url)
    raw = await connect(address)
    connection = PgConnection(raw)
    try:
        assert await in_greenlet(lambda: migrate(connection, address)) == len(MIGRATIONS)
        assert await in_greenlet(lambda: migrate(connection, address)) == 0
        with pytest.raises(Exception, match="nonsense"):
            more = (*MIGRATIONS, ("CREATE TABLE extra (x INTEGER)", "nonsense"))
            await in_greenlet(lambda: migrate(connection, address, more))
        more = (*MIGRATIONS, ("CREATE TABLE extra (x INTEGER)",))
        assert await in_greenlet(lambda: migrate(connection, address, more)) == 1
    finally:
        await raw.close()


async def test_the_results_of_older_records_are_migrated(open_postgres: PostgresOpener) -> None:
    await open_postgres.execute(f"CREATE SCHEMA {open_postgres.schema}")
    address = Address.parse(open_postgres.url)
    raw = await connect(address)
    connection = PgConnection(raw)
    try:
        await in_greenlet(lambda: migrate(connection, address, MIGRATIONS[:6]))
        await raw.execute("INSERT INTO runs (id, digest, record) VALUES ('run', '', $1)", to_json(Run("run")))
        lost = Ending(Outcome.FAILED, failure=InternalError("lost").failure("run"))
        for number, ending in enumerate((completed(0.5), lost), 1):
            await raw.execute(
                'INSERT INTO rollouts (id, run, state, attempt, "index", priority, ended_seq, created_at, updated_at, '
                "digest, ending) VALUES ($1, 'run', 'ended', 1, 0, 0, $2, 1, 1, '', $3)",
                *(str(number), number, to_json(ending)),
            )
        await raw.execute("INSERT INTO tombstones (id, detail, created_at) VALUES ('run~a', '', 1), ('old~a', '', 1)")
    finally:
        await raw.close()
    async with await open_postgres() as store:
        results = (await store.results_of())["run"]
        assert (results.rewarded, results.mean_reward, results.trainable) == (1, 0.5, 1)
    assert await open_postgres.execute("SELECT id, run FROM tombstones") == [("run~a", "run")]


async def test_commits_are_synchronous_even_if_the_server_has_it_off(caplog: pytest.LogCaptureFixture) -> None:
    with PgServer("-c", "synchronous_commit=off", "-c", "fsync=off") as server:
        async with await PostgresStore.open(server.url) as store:
            connection = store._writer._connection  # type: ignore[attr-defined]
            assert await connection.raw.fetchval("SHOW synchronous_commit") == "on"
    assert "synchronous_commit was off" in caplog.text and "fsync is off" in caplog.text


async def test_a_store_is_opened_by_its_name(open_any: AnyOpener) -> None:
    await (await open_any()).close()
    name = open_any.url if isinstance(open_any, PostgresOpener) else str(open_any.path)
    commits: list[int] = []
    async with await open_store(name, on_commit=lambda _, operations: commits.append(operations)) as store:
        assert isinstance(store, PostgresStore if isinstance(open_any, PostgresOpener) else SqliteStore)
        await store.put_run(Run("run"), {})
        await store.submit([submission("a")])
        assert sum(commits) == 2


async def test_without_its_packages_only_the_postgres_store_is_unavailable(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "sys.modules['asyncpg'] = None\n"
        "from rollyard.store import StoreUnusable, open_store\n"
        "async def main():\n"
        "    await (await open_store(sys.argv[1])).close()\n"
        "    try:\n"
        "        await open_store('postgresql://u:pw@127.0.0.1/db')\n"
        "    except StoreUnusable as error:\n"
        "        print(error)\n"
        "asyncio.run(main())\n"
    )
    process = await create_subprocess_exec(sys.executable, "-c", script, tmp_path / "x.db", stdout=PIPE)
    output, _ = await process.communicate()
    assert b"asyncpg: pip install 'rollyard[postgres]'" in output and process.returncode == 0


async def test_leases_are_measured(open_any: AnyOpener) -> None:
    async with await open_any() as store:
        rate = await measure_leases(store, 700)
        assert rate.count == 700 and (await store.counts())["init"] == 700
