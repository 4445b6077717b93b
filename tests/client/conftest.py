from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from rollyard.client import AsyncClient
from tests.client.served import Yard, served


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncGenerator[Yard, None]:
    async with served(tmp_path) as running:
        yield running


@pytest.fixture
async def client(pipeline: Yard) -> AsyncGenerator[AsyncClient, None]:
    async with AsyncClient(pipeline.url, pipeline.token, timeout_s=20) as opened:
        yield opened
