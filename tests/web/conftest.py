"""Real Chromium against a real service. All tests here share one browser and one event loop, on one worker.

    async def test_runs_are_listed(visitor: Visitor) -> None:
        page = await visitor.open("/runs")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Runs")

`visitor` is a signed-in page of the service `world`, which has data for every view; the tests of a file share it.
`new_visitor(site, width=390, theme="dark")` makes others. At the end, each fails the test if its page had errors
(`tests/web/visitor.py`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from bench._chromium import NoChromium, chromium
from tests.service.site import Site
from tests.web.visitor import Visitor
from tests.web.world import open_world

NewVisitor = Callable[..., Awaitable[Visitor]]

HERE = Path(__file__).parent
AXE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollyard" / "axe-core" / "axe.min.js"


@pytest.hookimpl(tryfirst=True)  # before tests/conftest.py sorts the tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            item.add_marker(pytest.mark.xdist_group("chromium"))
            item.add_marker(pytest.mark.slow)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncGenerator[Browser, None]:
    """One Chromium for all tests of the dashboard."""
    async with AsyncExitStack() as stack:
        try:
            started = await stack.enter_async_context(chromium())
        except NoChromium as error:
            pytest.skip(str(error))
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    """A service with data for every view. Tests may add to it, but not change what is there."""
    async with open_world(tmp_path_factory.mktemp("world")) as site:
        yield site


@pytest_asyncio.fixture(loop_scope="session")
async def new_visitor(browser: Browser) -> AsyncGenerator[NewVisitor, None]:
    """Makes visitors of a service: `await new_visitor(site, width=390, theme="dark")`."""
    visitors: list[Visitor] = []

    async def new(site: Site, **options: Any) -> Visitor:
        visitors.append(await Visitor.new(browser, site, **options))
        return visitors[-1]

    yield new
    async with AsyncExitStack() as stack:
        for visitor in visitors:
            stack.push_async_callback(visitor.close)


@pytest_asyncio.fixture(loop_scope="session")
async def visitor(browser: Browser, world: Site) -> AsyncGenerator[Visitor, None]:
    """A person with an admin's rights, 1280 pixels wide, in light mode. The first `open` signs in."""
    made = await Visitor.new(browser, world)
    yield made
    await made.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, the checker for accessibility."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: scripts/real-parts does it")
    return AXE.read_text()
