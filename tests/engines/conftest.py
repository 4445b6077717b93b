from __future__ import annotations

from collections.abc import AsyncGenerator

import aiohttp
import pytest

from rollyard.engines import open_http
from rollyard.engines.clients.http import HttpPool


@pytest.fixture
async def http() -> AsyncGenerator[HttpPool, None]:
    """The HTTP connections of engines."""
    async with open_http() as connections:
        yield connections


@pytest.fixture
async def web() -> AsyncGenerator[aiohttp.ClientSession, None]:
    """An HTTP client for the test itself, for example as a trainer."""
    async with aiohttp.ClientSession() as session:
        yield session
