"""The page starts although its first requests fail: it says what is wrong, tries again, and is then as it should be."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect

from tests.service.site import Site, open_site
from tests.web.conftest import NewVisitor
from tests.web.visitor import Visitor

LIMITED = {"code": "rate_limited", "title": "Too many", "detail": "this token may make 5 calls a second", "status": 429}
BROKEN = {"code": "internal_error", "title": "Internal error", "detail": "the disk is full", "status": 500}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    """A service without work."""
    async with open_site(tmp_path_factory.mktemp("site")) as opened:
        yield opened


class Fault:
    """Answers the calls of an address with an error until it is over."""

    def __init__(self, body: dict[str, object] | None, status: int) -> None:
        self.body = body
        self.status = status
        self.is_over = False
        self.answered = 0

    async def __call__(self, route: Route) -> None:
        if self.is_over:
            await route.fallback()
            return
        self.answered += 1
        kind = "text/plain" if self.body is None else "application/problem+json"
        text = "Bad gateway" if self.body is None else json.dumps(self.body)
        await route.fulfill(status=self.status, body=text, content_type=kind, headers={"retry-after": "0.05"})


async def faulty(visitor: Visitor, pattern: str, body: dict[str, object] | None, status: int) -> Fault:
    fault = Fault(body, status)
    await visitor.page.route(pattern, fault)
    visitor.expect_status(status)
    return fault


async def link(site: Site) -> str:
    return f"{site.url}/runs#code={(await site.post('/v1/login/codes')).body['code']}"


@pytest.mark.parametrize(
    ("body", "status", "title", "text"),
    [
        (LIMITED, 429, "Too many calls", "this token may make 5 calls a second"),
        (BROKEN, 500, "The service has a problem", "the disk is full"),
        (None, 502, "The service has a problem", "Bad gateway"),  # of a proxy, without a problem document
    ],
)
async def test_a_refused_first_call_is_repeated(
    site: Site, new_visitor: NewVisitor, body: dict[str, object] | None, status: int, title: str, text: str
) -> None:
    """With a link, and of a browser that is signed in."""
    visitor: Visitor = await new_visitor(site)
    page = visitor.page
    for address in (await link(site), f"{site.url}/runs"):
        fault = await faulty(visitor, "**/v1/login", body, status)
        await page.goto("about:blank")
        await page.goto(address)
        alert = page.get_by_role("alert")
        await expect(alert.get_by_role("heading")).to_have_text(title)
        await expect(alert).to_contain_text(text)
        await expect(alert).to_contain_text("The page tries again by itself")
        await expect(page.get_by_label("Token")).to_have_count(0)  # the browser was not signed out
        fault.is_over = True
        await expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
        assert fault.answered >= 1


async def test_a_refused_first_call_that_is_final_shows_the_sign_in_page(site: Site, new_visitor: NewVisitor) -> None:
    visitor: Visitor = await new_visitor(site)
    await faulty(visitor, "**/v1/login", {"code": "foreign_host", "detail": "not this host", "status": 403}, 403)
    await visitor.page.goto(f"{site.url}/runs")
    await expect(visitor.page.get_by_role("alert")).to_contain_text("not this host")
    await expect(visitor.page.get_by_label("Token")).to_be_visible()


async def test_the_data_of_a_view_are_requested_again(site: Site, new_visitor: NewVisitor) -> None:
    visitor: Visitor = await new_visitor(site)
    fault = await faulty(visitor, "**/v1/runs?*", LIMITED, 429)
    page = await visitor.open("/runs")
    await expect(page.get_by_role("alert")).to_contain_text("Too many calls")
    fault.is_over = True
    await expect(page.get_by_role("alert")).to_have_count(0)
    await expect(page.locator("main")).to_contain_text("No run yet")


async def test_the_script_of_a_view_is_requested_again(site: Site, new_visitor: NewVisitor) -> None:
    """A module of its own, and one that it imports."""
    for pattern in ("**/js/views/engines.js", "**/js/chart.js"):
        visitor: Visitor = await new_visitor(site)
        fault = await faulty(visitor, pattern, BROKEN, 500)
        page = await visitor.open("/engines")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Not loaded yet")
        await expect(page.get_by_role("alert")).to_contain_text("The page tries again by itself")
        fault.is_over = True
        await expect(page.get_by_role("heading", level=1)).to_have_text("Engines and policies")


async def test_the_page_is_loaded_again_if_a_first_script_did_not_arrive(site: Site, new_visitor: NewVisitor) -> None:
    for pattern in ("**/js/main.js", "**/js/router.js"):
        visitor: Visitor = await new_visitor(site)
        page = visitor.page
        fault = await faulty(visitor, pattern, None, 503)
        await page.goto(await link(site))
        await expect(page.get_by_role("status")).to_contain_text("its files do not arrive")
        await expect(page.get_by_role("status")).to_be_visible()
        fault.is_over = True
        await expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
        assert await starts(page) == "0"


async def starts(page: Page) -> str:
    return await page.evaluate("sessionStorage.getItem('rollyard-starts')")
