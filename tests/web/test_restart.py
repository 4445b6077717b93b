"""kill -9 of the service under an open page: the page says so, reconnects, and shows the new state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from playwright.async_api import expect

from rollyard.testing.script import Reply
from tests import worker
from tests.service.site import Site, engine_table, finish, scripted, shell, task
from tests.service.test_server import process
from tests.web.conftest import NewVisitor

LOST = "The service does not answer"


async def test_a_page_survives_a_killed_service(
    tmp_path_factory: pytest.TempPathFactory, new_visitor: NewVisitor
) -> None:
    folder = tmp_path_factory.mktemp("killed")
    async with (
        scripted(shell("echo hello"), Reply(finish(), latency_s=3600)) as engine,
        aiohttp.ClientSession() as http,
    ):
        values = {"ROLLYARD_ENGINES": json.dumps([engine_table(engine)]), "ROLLYARD_PORT": str(worker.free_port())}
        async with process(folder, **values) as (child, _):
            site = _site(folder, http)
            limits = {"init_s": 60, "run_s": 3600, "eval_s": 60, "model_s": 3600}
            await site.submit("r1", task=task(limits=limits))
            await engine.busy()
            rollout, overview = await new_visitor(site), await new_visitor(site)
            for visitor in (rollout, overview):
                visitor.expect_loss()
            page = await rollout.open("/rollouts/default/r1")
            await expect(page.locator("main")).not_to_contain_text("completed")
            await overview.open("/")
            for visitor in (rollout, overview):
                await visitor.page.evaluate("() => { globalThis.isSamePage = true; }")
            child.kill()
            await child.wait()
            for visitor in (rollout, overview):
                await expect(visitor.page.get_by_role("alert").first).to_contain_text(LOST)
            await expect(page.get_by_role("heading", level=1)).to_contain_text("r1")  # the last known state

        engine.script = lambda turn: finish()
        async with process(folder, **values):
            await site.ended("r1")
            await expect(page.locator("main")).to_contain_text("completed")
            for visitor in (rollout, overview):
                await expect(visitor.page.get_by_role("alert").filter(has_text=LOST)).to_have_count(0)
                await expect(visitor.page.get_by_role("button", name="Sign out")).to_be_visible()
                assert await visitor.page.evaluate("() => globalThis.isSamePage")
                await visitor.page.goto("about:blank")  # before the service goes away again


def _site(folder: Path, http: aiohttp.ClientSession) -> Site:
    url, token = ((folder / "data" / name).read_text().strip() for name in ("url", "token"))
    return Site(url, token, http, cast(Any, None))
