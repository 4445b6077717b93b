from __future__ import annotations

import pytest

from rollyard.testing.store_model import Walk
from tests.store.conftest import SqliteOpener


@pytest.mark.parametrize("seed", range(8))
async def test_the_store_agrees_with_a_plain_model_of_it(seed: int, open_store: SqliteOpener) -> None:
    await Walk(open_store, seed).go(steps=150)
