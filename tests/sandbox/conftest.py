"""Real runtimes, each in a folder of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from rollyard.sandbox import BubblewrapRuntime, LocalRuntime
from rollyard.sandbox._runtime import LaunchedRuntime
from tests.sandbox.runtimes import RUNTIMES


@pytest.fixture
async def bubblewrap(tmp_path: Path) -> AsyncGenerator[BubblewrapRuntime, None]:
    async with BubblewrapRuntime(root=tmp_path / "bubblewrap") as runtime:
        yield runtime


@pytest.fixture
async def local(tmp_path: Path) -> AsyncGenerator[LocalRuntime, None]:
    async with LocalRuntime(root=tmp_path / "local") as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[LaunchedRuntime, None]:
    """The runtime of that name, one for a whole module: parametrize it indirectly."""
    async with RUNTIMES[request.param](root=tmp_path_factory.mktemp(request.param) / "root") as runtime:
        yield runtime
