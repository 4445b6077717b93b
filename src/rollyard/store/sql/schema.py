"""The tables, as numbered migrations that are applied when a store is opened.

A store records which migrations it has had (in SQLite `PRAGMA user_version`, in PostgreSQL a row of `meta`) and that it
belongs to Rollyard (`application_id`, likewise). The statements are for SQLite; `for_postgres` translates them. Each
migration is one transaction. A store with more migrations than this version has was written by a newer Rollyard: it is
refused, because an older one would silently break its invariants.

Invariants. A released migration is never edited; a change is a new migration at the end. The row of a rollout is small,
since every move rewrites it: its task (immutable, and shared with others) and its trajectory (large) have their own
tables.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from rollyard.store.base import StoreUnusable

APPLICATION_ID = 0x526C5964  # "RlYd"

V1 = (
    # epoch: incremented by each opening. ended_seq: the last number used in the terminal order; it is stored apart from
    # the rows because retention deletes rows, and a number must never be used twice.
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "INSERT INTO meta VALUES ('epoch', 0), ('ended_seq', 0)",
    """CREATE TABLE runs (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        digest TEXT NOT NULL,
        record TEXT NOT NULL,
        acked INTEGER NOT NULL DEFAULT 0)""",
    """CREATE TABLE rollouts (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        run TEXT NOT NULL REFERENCES runs (id),
        state TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        "group" TEXT,
        "index" INTEGER NOT NULL,
        priority INTEGER NOT NULL,
        excused INTEGER NOT NULL DEFAULT 0,
        evals_lost INTEGER NOT NULL DEFAULT 0,
        ended_seq INTEGER,
        cancel_detail TEXT,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        digest TEXT NOT NULL,
        lost TEXT NOT NULL DEFAULT '[]',
        ending TEXT,
        scores TEXT NOT NULL DEFAULT '[]',
        CHECK ((state = 'ended') = (ending IS NOT NULL)),
        CHECK ((state = 'ended') = (ended_seq IS NOT NULL)))""",
    "CREATE INDEX rollouts_state ON rollouts (state, seq)",
    "CREATE INDEX rollouts_run ON rollouts (run, ended_seq)",
    'CREATE INDEX rollouts_group ON rollouts ("group") WHERE "group" IS NOT NULL',
    "CREATE UNIQUE INDEX rollouts_ended ON rollouts (ended_seq) WHERE ended_seq IS NOT NULL",
    "CREATE INDEX rollouts_age ON rollouts (updated_at) WHERE ended_seq IS NOT NULL",
    "CREATE INDEX rollouts_cancel ON rollouts (seq) WHERE cancel_detail IS NOT NULL AND ended_seq IS NULL",
    """CREATE TABLE tasks (
        seq INTEGER PRIMARY KEY REFERENCES rollouts (seq) ON DELETE CASCADE,
        task TEXT NOT NULL)""",
    # info is NULL if the trajectory came with the ending, not from save_run.
    """CREATE TABLE trajectories (
        seq INTEGER PRIMARY KEY REFERENCES rollouts (seq) ON DELETE CASCADE,
        sampled_tokens INTEGER NOT NULL,
        info TEXT,
        trajectory BLOB NOT NULL)""",
    """CREATE TABLE tombstones (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        detail TEXT NOT NULL,
        created_at REAL NOT NULL)""",
    "CREATE TABLE engines (id TEXT PRIMARY KEY, record TEXT NOT NULL)",
    # Rollouts whose artifacts must be deleted. A sweep returns them, and the next one removes them from this table:
    # after a crash between the two they are returned again, and no file is left behind.
    "CREATE TABLE leavings (id TEXT PRIMARY KEY) WITHOUT ROWID",
)

V2 = (
    # is_held: its rollouts are kept at any age, because it is open, waits for a batch, or was not acknowledged.
    """CREATE TABLE groups (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        run TEXT NOT NULL,
        draw TEXT,
        state TEXT NOT NULL,
        batch INTEGER,
        place INTEGER,
        is_held INTEGER NOT NULL,
        digest TEXT NOT NULL,
        updated_at REAL NOT NULL,
        record TEXT NOT NULL)""",
    "CREATE INDEX groups_open ON groups (seq) WHERE state IN ('open', 'complete')",
    "CREATE INDEX groups_run ON groups (run)",
    "CREATE UNIQUE INDEX groups_place ON groups (draw, place) WHERE place IS NOT NULL",
    "CREATE INDEX groups_age ON groups (updated_at)",
    """CREATE TABLE draws (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        run TEXT NOT NULL,
        digest TEXT NOT NULL,
        is_active INTEGER NOT NULL,
        record TEXT NOT NULL)""",
    "CREATE INDEX draws_run ON draws (run)",
    # The tasks of a list, or those that a client pushed; `name` is set by the client, so that each is pushed once.
    """CREATE TABLE draw_items (
        draw TEXT NOT NULL,
        item INTEGER NOT NULL,
        name TEXT,
        task TEXT NOT NULL,
        PRIMARY KEY (draw, item)) WITHOUT ROWID""",
    "CREATE UNIQUE INDEX draw_items_name ON draw_items (draw, name) WHERE name IS NOT NULL",
    """CREATE TABLE batches (
        draw TEXT NOT NULL,
        number INTEGER NOT NULL,
        record TEXT NOT NULL,
        PRIMARY KEY (draw, number)) WITHOUT ROWID""",
    """CREATE TABLE evals (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        run TEXT NOT NULL,
        digest TEXT NOT NULL,
        record TEXT NOT NULL)""",
    # The state of a policy's weights, and its pause.
    "CREATE TABLE policies (name TEXT PRIMARY KEY, record TEXT NOT NULL)",
)

V3 = (
    # The node that it is leased to, or NULL. Only a live rollout is leased.
    "ALTER TABLE rollouts ADD COLUMN node TEXT CHECK (node IS NULL OR state IN ('init', 'ready', 'run', 'eval'))",
    # The order in which they were added: only SQLite has a rowid.
    "ALTER TABLE engines ADD COLUMN seq INTEGER NOT NULL DEFAULT 0",
    "UPDATE engines SET seq = rowid",
)

V4 = (
    # A task is stored once, however many rollouts have it. `bytes` precedes it, so that reading the size of a large
    # task reads no more. Older rollouts have theirs in `tasks`.
    """CREATE TABLE bodies (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        digest TEXT NOT NULL UNIQUE,
        bytes INTEGER NOT NULL,
        task TEXT NOT NULL)""",
    "ALTER TABLE rollouts ADD COLUMN body INTEGER REFERENCES bodies (id)",
    "CREATE INDEX rollouts_body ON rollouts (body) WHERE body IS NOT NULL",
    # It is being deleted: no rollout of it is started any more.
    "ALTER TABLE runs ADD COLUMN is_deleting INTEGER NOT NULL DEFAULT 0",
)

V5 = (
    # Tokens that administrators created, by their digests.
    "CREATE TABLE tokens (id TEXT PRIMARY KEY, record TEXT NOT NULL)",
    # The owner of each policy, who may change its weights.
    "CREATE TABLE policy_owners (policy TEXT PRIMARY KEY, owner TEXT NOT NULL)",
    "CREATE TABLE audit (seq INTEGER PRIMARY KEY AUTOINCREMENT, record TEXT NOT NULL)",
)

V6 = (
    # kept_from: when its retention started, by the store's own clock (`_clock`), which is in meta in milliseconds. Rows
    # of an older store are kept as if they had ended when it was migrated.
    "INSERT INTO meta VALUES ('clock_ms', 0)",
    "ALTER TABLE rollouts ADD COLUMN kept_from REAL NOT NULL DEFAULT 0",
    "DROP INDEX rollouts_age",
    "CREATE INDEX rollouts_kept ON rollouts (kept_from, seq) WHERE ended_seq IS NOT NULL",
    "ALTER TABLE groups ADD COLUMN kept_from REAL NOT NULL DEFAULT 0",
    "DROP INDEX groups_age",
    "CREATE INDEX groups_kept ON groups (kept_from, seq)",
    "CREATE INDEX groups_draw ON groups (draw) WHERE draw IS NOT NULL",
    "ALTER TABLE draws ADD COLUMN kept_from REAL NOT NULL DEFAULT 0",
    # The last batch that the trainer has acknowledged.
    "ALTER TABLE draws ADD COLUMN acked INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE batches ADD COLUMN kept_from REAL NOT NULL DEFAULT 0",
    "CREATE INDEX batches_kept ON batches (kept_from)",
    "ALTER TABLE evals ADD COLUMN kept_from REAL NOT NULL DEFAULT 0",
    "ALTER TABLE evals ADD COLUMN is_active INTEGER NOT NULL DEFAULT 1",
    'UPDATE evals SET is_active = 0 WHERE record NOT LIKE \'%"state":"running"%\'',
    "CREATE INDEX evals_run ON evals (run)",
    "ALTER TABLE runs ADD COLUMN kept_from REAL NOT NULL DEFAULT 0",
    "ALTER TABLE tombstones ADD COLUMN kept_from REAL NOT NULL DEFAULT 0",
)

V7 = (
    # Of an ended rollout, also in its `ending`: the results of a run are sums over its index, without reading a row.
    "ALTER TABLE rollouts ADD COLUMN reward REAL",
    "ALTER TABLE rollouts ADD COLUMN is_trainable INTEGER NOT NULL DEFAULT 0",
    "UPDATE rollouts SET reward = json_extract(ending, '$.score.reward'), "
    "is_trainable = COALESCE(json_extract(ending, '$.is_trainable'), 0) WHERE ending IS NOT NULL",
    "DROP INDEX rollouts_run",
    "CREATE INDEX rollouts_run ON rollouts (run, ended_seq, reward, is_trainable)",
)

V8 = (
    # Browsers that are signed in to the dashboard, by the digests of their cookies.
    "CREATE TABLE logins (digest TEXT PRIMARY KEY, record TEXT NOT NULL)",
)

V9 = (
    # What EVAL printed, as JSON. Not a column of `trajectories`: writing it there would write the tokens again.
    """CREATE TABLE evidence (
        seq INTEGER PRIMARY KEY REFERENCES rollouts (seq) ON DELETE CASCADE,
        evidence BLOB NOT NULL)""",
)

V10 = (
    # The run of a tombstone: it is deleted with the run. Those of runs that no longer exist are deleted now.
    "ALTER TABLE tombstones ADD COLUMN run TEXT NOT NULL DEFAULT ''",
    "UPDATE tombstones SET run = CASE WHEN instr(id, '~') > 0 THEN substr(id, 1, instr(id, '~') - 1) "
    "ELSE 'default' END",
    "DELETE FROM tombstones WHERE run NOT IN (SELECT id FROM runs)",
    "CREATE INDEX tombstones_run ON tombstones (run)",
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (V1, V2, V3, V4, V5, V6, V7, V8, V9, V10)


POSTGRES_ALSO: dict[int, tuple[str, ...]] = {
    1: (
        # Tokens do not compress: trying to compress 100 KB of them costs the server more than writing them.
        "ALTER TABLE trajectories ALTER COLUMN trajectory SET STORAGE EXTERNAL",
        "ALTER TABLE rollouts SET (fillfactor = 80)",  # a move rewrites the row: this leaves room on the same page
    ),
    7: (
        # For prefixes of ids: in other collations, the ids with one prefix are not next to each other.
        'CREATE INDEX rollouts_bytewise ON rollouts (id COLLATE "C")',
        'CREATE INDEX groups_bytewise ON groups (id COLLATE "C")',
    ),
}
"""Additional statements of PostgreSQL, by the number of the migration that they follow."""

_POSTGRES_REPLACEMENTS = (
    ("INTEGER PRIMARY KEY AUTOINCREMENT", "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"),
    ("INTEGER", "BIGINT"),
    ("REAL", "DOUBLE PRECISION"),
    ("BLOB", "BYTEA"),
    (" WITHOUT ROWID", ""),
    ("= rowid", "= seq"),  # of an empty table: no PostgreSQL store is older than that migration
    ("instr(id", "strpos(id"),
    ("json_extract(ending, '$.score.reward')", "(ending::json #>> '{score,reward}')::double precision"),
    ("json_extract(ending, '$.is_trainable')", "(ending::json ->> 'is_trainable')::boolean::int"),
)


def for_postgres(number: int, statements: Sequence[str]) -> list[str]:
    """Translates a migration to PostgreSQL."""
    translated: list[str] = []
    for statement in statements:
        for sqlite_text, postgres_text in _POSTGRES_REPLACEMENTS:
            statement = statement.replace(sqlite_text, postgres_text)
        translated.append(statement)
    return [*translated, *POSTGRES_ALSO.get(number, ())]


def check_version(version: int, supported: int) -> None:
    """Raises `StoreUnusable` if a store has more migrations than this version."""
    if version > supported:
        raise StoreUnusable(
            f"this store has schema {version} and this Rollyard supports up to {supported}: "
            "it was written by a newer version; install that version, or start with an empty store"
        )


def migrate(connection: sqlite3.Connection, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> int:
    """Applies missing migrations; returns their number. Raises `StoreUnusable` if the file is not a store."""
    application = _pragma(connection, "application_id")
    version = _pragma(connection, "user_version")
    if application != APPLICATION_ID:
        has_tables = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if application or version or has_tables:
            raise StoreUnusable("this SQLite file belongs to another program; give Rollyard its own file")
    check_version(version, len(migrations))
    for number, statements in enumerate(migrations[version:], version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
    return len(migrations) - version


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
