"""An opener of one SQLite store, as the conformance suite wants it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.store import SqliteStore


class SqliteOpener:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "rollyard.db"

    async def __call__(self, *, max_attempts: int = 3, is_forced: bool = False) -> SqliteStore:
        if is_forced:
            self.path.with_name(self.path.name + ".lock").unlink()
        return await SqliteStore.open(self.path, max_attempts=max_attempts)


@pytest.fixture
def open_store(tmp_path: Path) -> SqliteOpener:
    return SqliteOpener(tmp_path)
