from __future__ import annotations

from collections.abc import AsyncGenerator

import aiohttp
import pytest

from rollyard.engines import open_http


@pytest.fixture
async def http() -> AsyncGenerator[aiohttp.ClientSession, None]:
    async with open_http() as session:
        yield session
