from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from rollyard.client import AsyncClient
from tests.client.served import RunningService, served


@pytest.fixture
async def service(tmp_path: Path) -> AsyncGenerator[RunningService, None]:
    async with served(tmp_path) as running:
        yield running


@pytest.fixture
async def client(service: RunningService) -> AsyncGenerator[AsyncClient, None]:
    async with AsyncClient(service.url, service.token, timeout_s=20) as opened:
        yield opened
