"""Policies in the store: one row each, the newest record of it."""

from __future__ import annotations

import sqlite3

from rollyard.core.policy import PolicyRecord
from rollyard.store.codec import from_json


def put_policy(connection: sqlite3.Connection, name: str, record: str) -> None:
    connection.execute("INSERT OR REPLACE INTO policies VALUES (?, ?)", (name, record))


def policies(connection: sqlite3.Connection) -> tuple[PolicyRecord, ...]:
    rows = connection.execute("SELECT record FROM policies ORDER BY name").fetchall()
    return tuple(from_json(record, PolicyRecord) for (record,) in rows)
