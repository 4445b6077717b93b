"""SQLite with a limit of 1 MiB for one text, instead of 10⁹ bytes, and small pages."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from rollyard.store.sql import reads
from rollyard.store.sqlite import store as sqlite_module

LIMIT_BYTES = 1 << 20
PAGE_BYTES = 400_000


def lower_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite_module._connect

    def limited(*args: Any, **fields: Any) -> Any:
        connection = connect(*args, **fields)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LIMIT_BYTES)
        return connection

    monkeypatch.setattr(sqlite_module, "_connect", limited)
    monkeypatch.setattr(reads, "PAGE_BYTES", PAGE_BYTES)
