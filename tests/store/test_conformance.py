from __future__ import annotations

import pytest

from rollyard.testing.store_conformance import CHECKS, Check
from rollyard.testing.store_groups import GROUP_CHECKS
from tests.store.conftest import SqliteOpener


@pytest.mark.parametrize("check", [*CHECKS, *GROUP_CHECKS], ids=lambda check: check.__name__)
async def test_sqlite(check: Check, open_store: SqliteOpener) -> None:
    await check(open_store)
