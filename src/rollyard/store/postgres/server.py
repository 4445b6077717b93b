"""Connections to a PostgreSQL server, the lock of a store, and its tables.

A store has its own schema in a database: the first of the connection's search_path (`public` unless the URL has
`?search_path=…`). The lock is an advisory lock, held by a separate connection for as long as the store is open; the
server releases it with that connection. TCP keepalives detect a head whose machine has disappeared: they are set so
that the server releases its lock within half a minute. A head that is only frozen keeps the lock until its process is
ended.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import zlib
from collections.abc import Callable, Sequence
from typing import Self

import asyncpg

from rollyard.store.base import StoreLocked, StoreUnusable
from rollyard.store.postgres.address import Address, refuse_url
from rollyard.store.postgres.connection import SERVER_ERRORS, PgConnection
from rollyard.store.postgres.writer import hang_up
from rollyard.store.sql.schema import APPLICATION_ID, MIGRATIONS, check_version, for_postgres

OLDEST = 12
"""The oldest supported major version of PostgreSQL."""

CONNECT_S = 10
ANSWER_S = 60.0
"""How long the server may take for one statement, including waits for locks, before the store gives up."""

BUSY_S = 30.0
"""How long another session (such as a person's psql) may hold a lock that the store needs before the store gives up."""

PATIENCE_S = 1.0
"""How long an opening waits for the lock: the server needs a moment to detect that a process was killed."""

ASK_EVERY_S = 10.0
"""How often the lock's connection is checked; the server must answer within the same time. The connection has no other
traffic, so a broken network path would not be noticed otherwise."""

SETTINGS = {
    "default_transaction_isolation": "read committed",  # the guard must read what was committed while it waited
    "lock_timeout": f"{BUSY_S:g}s",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "60000",  # ms: a frozen head releases its row locks
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25000",  # ms: as long as the keepalives, for an unacknowledged response of the server
}


async def connect(address: Address) -> asyncpg.Connection:
    """Raises `StoreUnusable` with the cause and what to do about it."""
    name = f"rollyard pid {os.getpid()} on {socket.gethostname()}"
    try:
        return await asyncpg.connect(
            address.url,
            timeout=CONNECT_S,
            command_timeout=ANSWER_S,
            statement_cache_size=0,  # PgConnection keeps its own
            server_settings=SETTINGS | {"application_name": name[:63]},
        )
    except asyncpg.InvalidCatalogNameError:
        what = f"there is no such database; create it: createdb --encoding UTF8 {address.database or 'NAME'}"
    except asyncpg.InvalidPasswordError:
        what = "the password is wrong or missing; put it into the URL or into ~/.pgpass"
    except asyncpg.InvalidAuthorizationSpecificationError as error:
        what = f"the server rejects this user ({error}); see its pg_hba.conf"
    except asyncpg.TooManyConnectionsError as error:
        what = f"the server has no connection left ({error}); raise its max_connections, or free some"
    except asyncpg.PostgresError as error:
        what = f"{error}"
    except ssl.SSLError as error:  # before ValueError: a rejected certificate is a ValueError, too
        what = (
            f"no TLS connection could be made ({error}); with ?sslmode=verify-ca or verify-full, the server's "
            "certificate must be signed by that in ?sslrootcert=FILE, or in ~/.postgresql/root.crt"
        )
    except asyncpg.ClientConfigurationError as error:
        what = f"an option of its URL, or of the environment, is invalid: {error.args[0]}"
    except (asyncpg.InterfaceError, ValueError):  # it may contain parts of the URL
        refuse_url()
    except TimeoutError:
        what = f"no response within {CONNECT_S} s; check the address and the firewalls on the way"
    except FileNotFoundError as error:
        what = f"{error}: the server's socket, or a file that sslrootcert, sslcert or sslkey names, does not exist"
    except OSError as error:
        what = f"no PostgreSQL server answers there ({error}); check that it runs and listens at that address"
    raise StoreUnusable(f"{address.shown} cannot be opened: {what}") from None


async def check_server(connection: asyncpg.Connection, address: Address) -> list[str]:
    """Raises `StoreUnusable` if this server or database cannot be used. Returns warnings."""
    check_server_version(connection.get_server_version().major, address)
    row = await connection.fetchrow(
        "SELECT current_setting('server_encoding'), current_schema(), pg_is_in_recovery(), "
        "current_setting('synchronous_commit'), current_setting('fsync')"
    )
    assert row is not None
    encoding, schema, is_standby, commits, fsync = row
    if encoding != "UTF8":
        raise StoreUnusable(
            f"{address.shown} has the encoding {encoding}, which cannot hold every text; create a database with UTF8: "
            "createdb --encoding UTF8 --template template0 NAME"
        )
    if schema is None:
        raise StoreUnusable(f"{address.shown}: the schema in its search_path does not exist; create it: CREATE SCHEMA")
    if is_standby:
        raise StoreUnusable(f"{address.shown} is a standby, which cannot be written; use the primary")
    doubts = list[str]()
    if commits == "off":
        doubts.append("synchronous_commit was off on this server: it is on for this store")
    if fsync == "off":
        doubts.append("fsync is off on this server: acknowledged writes may be lost when its machine fails")
    return doubts


def check_server_version(major: int, address: Address) -> None:
    if major < OLDEST:
        raise StoreUnusable(f"{address.shown} is PostgreSQL {major}; Rollyard needs version {OLDEST} or later")


class PgLock:
    """An exclusive lock on a store, held by its own connection."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def take(cls, connection: asyncpg.Connection, address: Address) -> Self:
        """Raises `StoreLocked` with the holder; the caller must then close the connection."""
        schema = str(await connection.fetchval("SELECT current_schema()"))
        key = (APPLICATION_ID, zlib.crc32(schema.encode()) - 2**31)  # two signed numbers of 32 bits
        if not await connection.fetchval("SELECT pg_try_advisory_lock($1::int, $2::int)", *key):
            try:
                await connection.execute(f"SET lock_timeout = '{int(PATIENCE_S * 1000)}ms'")
                await connection.fetchval("SELECT pg_advisory_lock($1::int, $2::int)", *key)
            except asyncpg.LockNotAvailableError:
                holder = await _holder(connection, key)
                raise StoreLocked(
                    f"{address.shown} is already open, in {holder}; stop that process first. If its machine is gone, "
                    "the server detects it within half a minute; if it hangs, kill it, or end its server process "
                    "(pg_terminate_backend)"
                ) from None
        return cls(connection)

    def watch(self, on_silence: Callable[[str], None]) -> None:
        """Checks the connection until `release`. Calls `on_silence` once, with the cause, if the server stops
        answering."""
        self._watch = asyncio.create_task(self._ask(on_silence), name="rollyard-store-lock")

    async def release(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await hang_up(self.connection)

    async def _ask(self, on_silence: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            try:
                await self.connection.execute("SELECT 1", timeout=ASK_EVERY_S)
            except SERVER_ERRORS as error:
                on_silence(str(error) or type(error).__name__)
                return


async def blocked(connection: asyncpg.Connection, address: Address) -> str:
    """Returns the message for an opening that waited BUSY_S for a lock: possible holders, and what to do."""
    rows = await connection.fetch(
        "SELECT a.application_name, a.client_addr, a.pid FROM pg_stat_activity a JOIN pg_locks l USING (pid) "
        "JOIN pg_class c ON c.oid = l.relation "
        "WHERE l.granted AND a.pid <> pg_backend_pid() AND a.datname = current_database() "
        "AND c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema()) "
        # A session that only reads blocks nothing but a change of the tables.
        "GROUP BY 1, 2, 3 ORDER BY bool_and(l.mode = 'AccessShareLock'), min(a.xact_start) LIMIT 3"
    )
    who = ", ".join(_named(*row) for row in rows) or "a session that has ended"
    return (
        f"{address.shown} cannot be opened: its tables were locked for {BUSY_S:g} s, by {who}. Try again when that "
        "transaction has ended, or end it: SELECT pg_terminate_backend(SERVER PROCESS)"
    )


async def _holder(connection: asyncpg.Connection, key: tuple[int, int]) -> str:
    row = await connection.fetchrow(
        "SELECT a.application_name, a.client_addr, l.pid FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid) "
        "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND l.classid = $1::bigint::oid "
        "AND l.objid = $2::bigint::oid "
        "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        key[0],
        key[1] % 2**32,
    )
    if row is None:
        return "a process that has just ended"
    return _named(*row)


def _named(name: str | None, client: object, pid: int) -> str:
    return f"{name or 'an unknown program'} ({f'from {client}, ' if client else ''}server process {pid})"


def migrate(connection: PgConnection, address: Address, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> int:
    """Applies missing migrations; returns their number. For use inside `in_greenlet`, with the lock held."""
    tables = {
        row[0]
        for row in connection.execute(
            "SELECT relname::text FROM pg_class WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = "
            "current_schema()) AND relkind IN ('r', 'p', 'v', 'm', 'f')"
        ).fetchall()
    }
    version = 0
    if tables:
        meta = dict[str, int]()
        if "meta" in tables:
            try:
                meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
            except asyncpg.SyntaxOrAccessError:
                pass  # another program's table of that name
        if meta.get("application_id") != APPLICATION_ID:
            raise StoreUnusable(
                f"{address.shown} contains tables of another program; give Rollyard its own database, or its own "
                "schema: CREATE SCHEMA rollyard, and ?search_path=rollyard at the end of the URL"
            )
        version = meta["schema"]
    check_version(version, len(migrations))
    for number, statements in enumerate(migrations[version:], version + 1):
        connection.control("BEGIN")
        try:
            for statement in for_postgres(number, statements):
                connection.control(statement)
            mark = f"('application_id', {APPLICATION_ID}), ('schema', {number})"
            connection.control(f"INSERT INTO meta VALUES {mark} ON CONFLICT (key) DO UPDATE SET value = excluded.value")
        except asyncpg.InsufficientPrivilegeError as error:
            connection.control("ROLLBACK")
            raise StoreUnusable(
                f"{address.shown}: {error}; its user must own the database, or be granted: GRANT CREATE ON SCHEMA …"
            ) from None
        except BaseException:
            connection.control("ROLLBACK")
            raise
        connection.commit()
    return len(migrations) - version
