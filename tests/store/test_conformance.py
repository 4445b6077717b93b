from __future__ import annotations

import pytest

from rollyard.testing.store_access import ACCESS_CHECKS
from rollyard.testing.store_conformance import CHECKS, Check
from rollyard.testing.store_groups import GROUP_CHECKS
from rollyard.testing.store_leases import LEASE_CHECKS
from tests.store.conftest import AnyOpener

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "check", [*CHECKS, *LEASE_CHECKS, *ACCESS_CHECKS, *GROUP_CHECKS], ids=lambda check: check.__name__
)
async def test_store(check: Check, open_any: AnyOpener) -> None:
    await check(open_any)
