"""Real runtimes, each in its own folder."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from rollyard.sandbox import BubblewrapRuntime, LocalRuntime
from rollyard.sandbox.runtimes.launched import LaunchedRuntime
from tests.sandbox.runtimes import RUNTIMES


@pytest.fixture
async def bubblewrap(tmp_path: Path) -> AsyncGenerator[BubblewrapRuntime, None]:
    async with BubblewrapRuntime(root=tmp_path / "bubblewrap") as runtime:
        yield runtime


@pytest.fixture
async def local(tmp_path: Path) -> AsyncGenerator[LocalRuntime, None]:
    async with LocalRuntime(root=tmp_path / "local") as runtime:
        yield runtime


Opened = Callable[[str], Awaitable[LaunchedRuntime]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Opened, None]:
    """Runtimes by name, each opened once for a whole module."""
    runtimes: dict[str, LaunchedRuntime] = {}
    async with AsyncExitStack() as stack:

        async def open_once(name: str) -> LaunchedRuntime:
            if name not in runtimes:
                runtime = RUNTIMES[name](root=tmp_path_factory.mktemp(name) / "root")
                runtimes[name] = await stack.enter_async_context(runtime)
            return runtimes[name]

        yield open_once


@pytest_asyncio.fixture(loop_scope="module")
async def runtime(request: pytest.FixtureRequest, opened: Opened) -> LaunchedRuntime:
    """The runtime of that name; parametrize it indirectly. A fixture of module scope would be created again for each
    test, because each is another parameter."""
    return await opened(request.param)
