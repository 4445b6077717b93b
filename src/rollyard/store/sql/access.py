"""Tokens, sign-ins, the owners of policies, and the audit log in the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollyard.core.access import AuditEntry, LoginRecord, TokenRecord
from rollyard.store.codec import from_json
from rollyard.store.sql.dialect import Connection

AUDIT_ENTRIES = 100_000
"""The number of entries that the audit log keeps: about 20 MB."""


def put_token(connection: Connection, token_id: str, record: str) -> None:
    connection.execute(
        "INSERT INTO tokens VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET record = excluded.record", (token_id, record)
    )


def tokens(connection: Connection) -> tuple[TokenRecord, ...]:
    records = [from_json(row[0], TokenRecord) for row in connection.execute("SELECT record FROM tokens").fetchall()]
    return tuple(sorted(records, key=lambda record: (record.created_at, record.id)))


def delete_token(connection: Connection, token_id: str) -> None:
    connection.execute("DELETE FROM tokens WHERE id = ?", (token_id,))


def put_login(connection: Connection, digest: str, record: str) -> None:
    connection.execute("INSERT INTO logins VALUES (?, ?)", (digest, record))


def logins(connection: Connection) -> tuple[LoginRecord, ...]:
    records = [from_json(row[0], LoginRecord) for row in connection.execute("SELECT record FROM logins").fetchall()]
    return tuple(sorted(records, key=lambda record: (record.created_at, record.digest)))


def delete_logins(connection: Connection, digests: Sequence[str]) -> None:
    for digest in digests:
        connection.execute("DELETE FROM logins WHERE digest = ?", (digest,))


def put_owner(connection: Connection, policy: str, owner: str | None) -> None:
    connection.execute("DELETE FROM policy_owners WHERE policy = ?", (policy,))
    if owner is not None:
        connection.execute("INSERT INTO policy_owners VALUES (?, ?)", (policy, owner))


def owners(connection: Connection) -> dict[str, str]:
    return {row[0]: row[1] for row in connection.execute("SELECT policy, owner FROM policy_owners").fetchall()}


def add_audit(connection: Connection, record: str) -> None:
    (seq,) = connection.execute("INSERT INTO audit (record) VALUES (?) RETURNING seq", (record,)).fetchone()
    connection.execute("DELETE FROM audit WHERE seq <= ?", (seq - AUDIT_ENTRIES,))


def audit(connection: Connection, before: int | None, limit: int) -> tuple[AuditEntry, ...]:
    where, values = ("WHERE seq < ?", (before,)) if before is not None else ("", ())
    rows = connection.execute(
        f"SELECT seq, record FROM audit {where} ORDER BY seq DESC LIMIT ?", (*values, limit)
    ).fetchall()
    return tuple(replace(from_json(row[1], AuditEntry), seq=row[0]) for row in rows)
