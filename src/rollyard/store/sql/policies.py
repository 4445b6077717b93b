"""Policies in the store: one row each, with the newest record."""

from __future__ import annotations

from rollyard.core.policy import PolicyRecord
from rollyard.store.codec import from_json
from rollyard.store.sql.dialect import Connection


def put_policy(connection: Connection, name: str, record: str) -> None:
    connection.execute(
        "INSERT INTO policies VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET record = excluded.record", (name, record)
    )


def policies(connection: Connection) -> tuple[PolicyRecord, ...]:
    """Ordered by name."""
    rows = connection.execute("SELECT name, record FROM policies").fetchall()  # databases differ in how they sort text
    return tuple(from_json(record, PolicyRecord) for _, record in sorted(map(tuple, rows)))
