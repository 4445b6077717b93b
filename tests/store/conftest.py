"""Openers of one store, for the conformance suite: a SQLite file, and a schema of a PostgreSQL database.

`open_store` opens SQLite; `open_any` is each of them in turn. The tests start a real PostgreSQL server; if it is not
installed, its tests are skipped.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import asyncpg
import pytest

from bench.postgres import PgServer
from rollyard.store import PostgresStore, SqliteStore

_numbers = itertools.count(1)


class SqliteOpener:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "rollyard.db"
        self.read_clock = time.monotonic

    async def __call__(
        self, *, max_attempts: int = 3, is_forced: bool = False, keeps_leases: bool = False
    ) -> SqliteStore:
        if is_forced:
            self.path.with_name(self.path.name + ".lock").unlink()
        return await SqliteStore.open(
            self.path, max_attempts=max_attempts, keeps_leases=keeps_leases, read_clock=self.read_clock
        )


class PostgresOpener:
    def __init__(self, server: PgServer) -> None:
        self.server_url = server.url
        self.schema = f"t{next(_numbers)}"
        self.url = f"{server.url}?search_path={self.schema}"
        self.read_clock = time.monotonic

    async def __call__(
        self, *, max_attempts: int = 3, is_forced: bool = False, keeps_leases: bool = False
    ) -> PostgresStore:
        await self.execute(f"CREATE SCHEMA IF NOT EXISTS {self.schema}")
        if is_forced:
            await self.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
        return await PostgresStore.open(
            self.url, max_attempts=max_attempts, keeps_leases=keeps_leases, read_clock=self.read_clock
        )

    async def execute(self, sql: str) -> list[asyncpg.Record]:
        """Executes SQL in another session, beside the store."""
        connection = await asyncpg.connect(self.url)
        try:
            return await connection.fetch(sql)
        finally:
            await connection.close()


AnyOpener = SqliteOpener | PostgresOpener


@pytest.fixture
def open_store(tmp_path: Path) -> SqliteOpener:
    return SqliteOpener(tmp_path)


@pytest.fixture
def open_postgres(postgres: PgServer) -> PostgresOpener:
    return PostgresOpener(postgres)


@pytest.fixture(params=["sqlite", "postgres"])
def open_any(request: pytest.FixtureRequest) -> AnyOpener:
    return request.getfixturevalue({"sqlite": "open_store", "postgres": "open_postgres"}[request.param])
