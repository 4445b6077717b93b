"""Exported pages in Chromium, from file://, without a network: the rollout view works, and nothing in them runs."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from rollyard.cli._exporting import write_rollouts
from rollyard.client import AsyncClient
from rollyard.exports.html import ENTRY, write_page
from rollyard.exports.modules import join_modules
from rollyard.exports.reading import read_rollouts
from rollyard.exports.replies import from_record
from tests.exports.rollouts import rollout
from tests.service.site import Site
from tests.web.visitor import TIMEOUT_MS, Visitor

HOSTILE = (
    "</script><script>globalThis.executed = 1</script><img src=x onerror='executed=1'>"
    "<svg onload='executed=1'> javascript:executed=1 \x1b]0;title\x07\x1b[31mred\x1b[0m \u202egnp.exe \u2028 <!--"
    "\ud800"
)


@asynccontextmanager
async def opened(browser: Browser, file: Path) -> AsyncGenerator[Page, None]:
    """A page of a file. Raises `AssertionError` at the end if it had errors, or requested anything but the file."""
    context = await browser.new_context(offline=True)
    context.set_default_timeout(TIMEOUT_MS)
    troubles: list[str] = []
    await context.add_init_script(
        "globalThis.troubles = []; addEventListener('securitypolicyviolation', (event) =>"
        " troubles.push(`CSP: ${event.effectiveDirective} ${event.blockedURI}`));"
    )
    page = await context.new_page()
    page.on("pageerror", lambda error: troubles.append(f"script error: {error}"))
    page.on("console", lambda message: troubles.append(f"console: {message.text}"))
    page.on("dialog", lambda dialog: troubles.append(f"dialog: {dialog.message}"))
    page.on("popup", lambda popup: troubles.append(f"window: {popup.url}"))
    url = file.as_uri()
    context.on("request", lambda request: troubles.append(f"request: {request.url}") if request.url != url else None)
    try:
        await page.goto(url)
        yield page
        troubles += await page.evaluate("() => globalThis.troubles")
        assert not await page.evaluate("() => globalThis.executed")
    finally:
        await context.close()
    assert not troubles, "\n".join(troubles)


async def open_tabs(page: Page) -> None:
    """Shows each tab of the rollout view, if it has tabs."""
    for tab in await page.get_by_role("tab").all():
        await tab.click()
        await expect(page.locator("main .loading")).to_have_count(0)


async def test_a_page_of_a_service_works_without_it(browser: Browser, world: Site, tmp_path: Path):
    async with AsyncClient(world.url, world.token) as client:
        records = [record for record in (await client.list(state="ended", limit=5)).rollouts if record.outcome]
        await write_rollouts(client, records, tmp_path / "page.html")
    async with opened(browser, tmp_path / "page.html") as page:
        await expect(page.get_by_role("heading", level=1)).to_have_text("Rollouts")
        links = page.locator("main table a")
        await expect(links).to_have_count(len(records))
        await links.first.click()
        await expect(page.get_by_role("heading", level=1)).not_to_have_text("Rollouts")
        assert re.search(r"#/rollouts/[^/]+/[^/]+$", page.url)
        await open_tabs(page)
        await page.get_by_role("link", name="Rollyard").click()
        await expect(links).to_have_count(len(records))
        await page.goto(page.url.partition("#")[0] + "#/engines")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Not in this file")


async def test_a_page_of_one_rollout_begins_with_it(browser: Browser, tmp_path: Path):
    write_page(tmp_path / "page.html", [from_record(rollout(text="something to find"))])
    async with opened(browser, tmp_path / "page.html") as page:
        heading = page.locator("main h1")
        await expect(heading).not_to_have_text("Rollouts")
        shown = await heading.text_content() or ""
        await open_tabs(page)
        await page.evaluate("() => { location.hash = '#message-1'; }")  # as a link to a place within the view does
        await page.evaluate("() => new Promise((resolve) => setTimeout(resolve))")
        await expect(heading).to_have_text(shown)


async def test_hostile_contents_stay_text(browser: Browser, tmp_path: Path):
    path = tmp_path / "page.html"
    write_page(path, [from_record(rollout("one", text=HOSTILE)), from_record(rollout("two", text=HOSTILE))])
    write_page(tmp_path / "again.html", read_rollouts(path))
    for file in (path, tmp_path / "again.html"):
        async with opened(browser, file) as page:
            first = page.locator("main table a").first
            await expect(page.locator("main table")).to_contain_text("<img src=x")
            await first.click()
            await open_tabs(page)
            assert not await page.locator("main img, main iframe, main a[href^='javascript']").count()


async def test_all_that_the_view_of_a_service_reads_is_recorded(visitor: Visitor, world: Site):
    async with AsyncClient(world.url, world.token) as client:
        (record, *_) = (await client.list(state="ended", limit=1)).rollouts
        raw = await client.get_json(f"/rollouts/{record.id}", include="trajectory", run=record.run)
    visitor.expect_status(404, 410)
    requested: set[str] = set()
    visitor.page.on("request", lambda request: requested.add(request.url.removeprefix(world.url)))
    page = await visitor.open(f"/rollouts/{record.run}/{record.id}")
    await open_tabs(page)
    read = {address for address in requested if address.startswith("/v1/") and "/v1/login" not in address}
    assert read <= from_record(raw).replies.keys()


async def test_modules_export_in_the_page_what_they_export_in_the_service(visitor: Visitor):
    folder = files("rollyard.web")
    _, modules = join_modules(ENTRY, lambda path: folder.joinpath(path).read_text())
    page = await visitor.open("/")
    for path, names in modules.items():
        if path != ENTRY:  # it would replace the page
            assert {*await page.evaluate(f"async () => Object.keys(await import('/assets/{path}'))")} == names, path


@pytest.mark.parametrize("width", [390, 1600])
async def test_a_list_of_many_rollouts_is_shown_in_parts(browser: Browser, tmp_path: Path, width: int):
    write_page(tmp_path / "page.html", (from_record(rollout(f"r{number}")) for number in range(450)))
    async with opened(browser, tmp_path / "page.html") as page:
        await page.set_viewport_size({"width": width, "height": 800})
        rows = page.locator("main tbody tr")
        await expect(rows).to_have_count(200)
        await page.get_by_role("button", name="Show more (250 left)").click()
        await expect(rows).to_have_count(450)
        assert await page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
