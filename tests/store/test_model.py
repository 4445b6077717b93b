from __future__ import annotations

import pytest

from tests.store.conftest import AnyOpener
from tests.store.model import ModelWalk

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(8))
async def test_the_store_agrees_with_a_plain_model(seed: int, open_any: AnyOpener) -> None:
    await ModelWalk(open_any, seed).go(steps=150)
