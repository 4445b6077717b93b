"""The tables of the catalog, and the opening of its file.

`rollouts` has what filters and figures need, `records` the row as the API returns it, `texts` the compressed text, and
`words` the full-text index. `words` has no content of its own: to delete an entry, FTS5 needs its text again, which is
in `texts` (SQLite can delete without it only from 3.43 on).

There are no migrations: a file of another version is deleted and built again.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

APPLICATION_ID = 0x526C4361  # "RlCa"
VERSION = 1

TABLES = (
    # cursor: the last number of the terminal order that is in the catalog.
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "INSERT INTO meta VALUES ('cursor', 0)",
    # seq: the number in the terminal order. lag: by how many versions its oldest token is older than the newest one
    # that its run had sampled with. size: characters of its text; 0: it has none, or the store has deleted it.
    """CREATE TABLE rollouts (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL,
        run TEXT NOT NULL,
        environment TEXT NOT NULL,
        agent TEXT NOT NULL,
        policy TEXT NOT NULL,
        outcome TEXT NOT NULL,
        code TEXT,
        blame TEXT,
        "group" TEXT,
        is_trainable INTEGER NOT NULL,
        reward REAL,
        oldest_version INTEGER NOT NULL,
        newest_version INTEGER NOT NULL,
        lag INTEGER,
        ended_at REAL NOT NULL,
        turns INTEGER NOT NULL,
        sampled_tokens INTEGER NOT NULL,
        model_s REAL NOT NULL,
        tool_s REAL NOT NULL,
        waiting_s REAL NOT NULL,
        total_s REAL NOT NULL,
        size INTEGER NOT NULL)""",
    "CREATE INDEX by_run ON rollouts (run)",
    "CREATE INDEX by_environment ON rollouts (environment)",
    "CREATE INDEX by_agent ON rollouts (agent)",
    "CREATE INDEX by_policy ON rollouts (policy)",
    'CREATE INDEX by_group ON rollouts ("group") WHERE "group" IS NOT NULL',
    "CREATE INDEX by_code ON rollouts (code) WHERE code IS NOT NULL",
    "CREATE INDEX by_run_and_environment ON rollouts (run, environment)",
    "CREATE INDEX by_run_and_code ON rollouts (run, code) WHERE code IS NOT NULL",
    "CREATE INDEX by_outcome ON rollouts (outcome)",
    "CREATE INDEX by_failure ON rollouts (ended_at, run, code, blame) WHERE code IS NOT NULL",
    "CREATE TABLE records (seq INTEGER PRIMARY KEY, record TEXT NOT NULL)",
    "CREATE TABLE texts (seq INTEGER PRIMARY KEY, text BLOB NOT NULL)",
    # The newest version that a rollout of the run was sampled with.
    "CREATE TABLE runs (run TEXT PRIMARY KEY, newest_version INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE VIRTUAL TABLE words USING fts5(text, content='', columnsize=0, tokenize='unicode61', prefix='2 3')",
)


class OtherVersion(Exception):
    """The file has other tables than this version: it must be deleted."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Opens the catalog, and creates it if it is missing. Raises `OtherVersion`, `sqlite3.Error` or `OSError`."""
    connection = _open(path)
    try:
        if _pragma(connection, "application_id") == APPLICATION_ID and _pragma(connection, "user_version") == VERSION:
            return connection
        if _pragma(connection, "schema_version"):
            raise OtherVersion(f"{path} is not a catalog of version {VERSION}")
        connection.execute("BEGIN IMMEDIATE")
        for statement in TABLES:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Opens an existing catalog."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=0.1, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA cache_size = -8192")  # KiB
    return connection


def delete(path: Path) -> None:
    """Deletes the file and its write-ahead log. Readers that have it open must open it again."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _open(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite gives its WAL the same mode
    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA page_size = 16384")  # before the first table: texts of some kilobytes fill pages
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # likewise
        connection.execute("PRAGMA journal_mode = WAL")
        # Nothing of it must survive a power failure, but the file must stay valid: one fsync per checkpoint.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA journal_size_limit = 16777216")
        connection.execute("PRAGMA cache_size = -16384")  # KiB
    except BaseException:
        connection.close()
        raise
    return connection


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
