"""Real runtimes, each in a folder of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from rollyard.sandbox import BubblewrapRuntime, LocalRuntime


@pytest.fixture
async def bubblewrap(tmp_path: Path) -> AsyncGenerator[BubblewrapRuntime, None]:
    async with BubblewrapRuntime(root=tmp_path / "bubblewrap") as runtime:
        yield runtime


@pytest.fixture
async def local(tmp_path: Path) -> AsyncGenerator[LocalRuntime, None]:
    async with LocalRuntime(root=tmp_path / "local") as runtime:
        yield runtime
