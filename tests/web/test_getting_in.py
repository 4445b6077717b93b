"""Signing in to the dashboard and out of it, in a real browser."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from aiohttp import web
from playwright.async_api import Browser, Page, expect

from tests.service.site import Site, open_site
from tests.web.conftest import NewVisitor


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    """A service without work."""
    async with open_site(tmp_path_factory.mktemp("site")) as opened:
        yield opened


async def sign_in_by_token(page: Page, token: str) -> None:
    await page.get_by_label("Token").fill(token)
    await page.get_by_role("button", name="Sign in").click()


async def test_a_link_signs_in_once(site: Site, new_visitor: NewVisitor) -> None:
    link = f"{site.url}/runs#code={(await site.post('/v1/login/codes')).body['code']}"
    first = await new_visitor(site)
    await first.page.goto(link)
    await expect(first.page.get_by_role("heading", level=1)).to_have_text("Runs")
    assert first.page.url == f"{site.url}/runs"  # the code is not in the history
    [cookie] = await first.context.cookies()
    assert cookie.get("httpOnly") and cookie.get("sameSite") == "Strict"
    assert await first.page.evaluate("() => document.cookie") == ""

    second = await new_visitor(site)
    second.expect_status(401)
    await second.page.goto(link)
    await expect(second.page.get_by_role("alert")).to_contain_text("this link has been used or has expired")
    await expect(second.page.get_by_role("alert")).to_contain_text("rollyard open")
    await expect(second.page.get_by_label("Token")).to_be_visible()


async def test_a_token_signs_in_and_the_address_that_was_opened_is_shown(site: Site, new_visitor: NewVisitor) -> None:
    visitor = await new_visitor(site)
    visitor.expect_status(401)
    await visitor.page.goto(f"{site.url}/engines")
    await expect(visitor.page.get_by_label("Token")).to_be_visible()
    assert await visitor.page.get_by_role("alert").count() == 0  # a first visit is no error
    await sign_in_by_token(visitor.page, site.token)
    await expect(visitor.page.get_by_role("heading", level=1)).to_have_text(re.compile("Engines"))
    await expect(visitor.page.get_by_role("heading", level=1)).to_be_focused()
    assert site.token not in await visitor.page.content()


async def test_a_wrong_token_and_one_without_the_scope_are_refused_with_a_reason(
    site: Site, new_visitor: NewVisitor
) -> None:
    node = await site.post("/v1/tokens", {"access": "node"})
    assert node.status == 201, node.body
    visitor = await new_visitor(site)
    visitor.expect_status(401, 403)
    await visitor.page.goto(site.url)
    for token, title, reason in (
        ("not-a-token-of-this-service", "Not signed in", "token"),
        (node.body["token"], "Not allowed", "a node's token cannot sign in to the dashboard"),
    ):
        await sign_in_by_token(visitor.page, token)
        alert = visitor.page.get_by_role("alert")
        await expect(alert.get_by_role("heading")).to_have_text(title)
        await expect(alert).to_contain_text(reason)
        assert await visitor.page.get_by_label("Token").input_value() == ""


async def test_signing_out_ends_the_session_for_the_back_button_too(site: Site, new_visitor: NewVisitor) -> None:
    visitor = await new_visitor(site)
    visitor.expect_status(401)
    page = await visitor.open("/")
    await visitor.go("/runs")
    [cookie] = await visitor.context.cookies()
    [key] = await page.evaluate("Object.values(localStorage)")
    kept = {"Cookie": f"{cookie.get('name')}={cookie.get('value')}", "x-rollyard-page": key}
    assert (await site.get("/v1/login", token="", headers=kept)).status == 200
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_label("Token")).to_be_visible()
    await page.go_back()
    await expect(page.get_by_label("Token")).to_be_visible()
    await page.reload()
    await expect(page.get_by_label("Token")).to_be_visible()
    assert await visitor.context.cookies() == []
    assert (await site.get("/v1/login", token="", headers=kept)).status == 401


async def test_an_expired_session_shows_the_sign_in_page(
    tmp_path_factory: pytest.TempPathFactory, new_visitor: NewVisitor
) -> None:
    async with open_site(tmp_path_factory.mktemp("short"), login_s=3) as short:
        visitor = await new_visitor(short)
        visitor.expect_status(401)
        await visitor.page.goto(f"{short.url}/#code={(await short.post('/v1/login/codes')).body['code']}")
        await expect(visitor.page.get_by_label("Token")).to_be_visible()  # its polling gets the refusal
        await expect(visitor.page.get_by_role("alert")).to_contain_text("rollyard open")


async def test_a_reader_looks_and_cannot_change(site: Site, new_visitor: NewVisitor) -> None:
    reader = await site.post("/v1/tokens", {"access": "reader"})
    assert reader.status == 201, reader.body
    visitor = await new_visitor(site)
    visitor.expect_status(401)
    await visitor.page.goto(site.url)
    await sign_in_by_token(visitor.page, reader.body["token"])
    await expect(visitor.page.locator(".access")).to_have_text("reader")
    for path in ("/", "/runs", "/rollouts", "/draws", "/evals", "/engines", "/nodes"):
        await visitor.go(path)
        assert await visitor.page.get_by_role("button", name=re.compile("drain|resume|pause|delete", re.I)).count() == 0
        assert await visitor.page.get_by_role("alert").count() == 0


async def test_a_token_that_may_not_read_a_run_is_told_what_it_reads(site: Site, new_visitor: NewVisitor) -> None:
    assert (await site.post("/v1/runs", {"id": "others"})).status == 201
    submitter = await site.post("/v1/tokens", {"access": "submitter", "runs": ["mine-*"]})
    assert submitter.status == 201, submitter.body
    for token, says in ((submitter.body["token"], "finds only its own runs and mine-*"), (site.token, "")):
        visitor = await new_visitor(site)
        visitor.expect_status(401, 403, 404)
        await visitor.page.goto(f"{site.url}/runs")
        await sign_in_by_token(visitor.page, token)
        if says:
            await expect(visitor.page.locator("main")).to_contain_text("No run yet: your token reads its own runs")
        for path in ("/runs/others-of-it", "/rollouts/others/r1", "/draws/others/d", "/groups/others/g"):
            await visitor.go(path)
            alert = visitor.page.get_by_role("alert")
            await expect(alert.get_by_role("heading")).to_have_text("Not found")
            assert ("Your token finds only" in await alert.inner_text()) == bool(says), path
            await expect(alert).to_contain_text(says)


EVIL = """<!doctype html><title>evil</title><iframe src="{url}/"></iframe><img src="{url}/v1/runs">
<form id="f" method="post" action="{url}/v1/pools" enctype="text/plain" target="t"><input name="a"></form>
<iframe name="t"></iframe>
"""

EVIL_CALLS = """async (url) => {
  const tried = [];
  for (const options of [
    { credentials: "include" },
    { credentials: "include", headers: { "x-rollyard-page": "1" } },
    { credentials: "include", method: "DELETE", headers: { "x-rollyard-page": "1" } },
    { credentials: "include", method: "POST", body: "{}", mode: "no-cors" },
  ]) {
    try { const reply = await fetch(`${url}/v1/login`, options); tried.push(`${reply.type} ${reply.status}`); }
    catch (error) { tried.push(error.name); }
  }
  document.getElementById("f").submit();
  return tried;
}"""


async def test_a_page_of_another_origin_of_this_host_can_do_nothing(site: Site, new_visitor: NewVisitor) -> None:
    """Another port is the same site: the browser sends it the cookie."""

    async def evil(_: web.Request) -> web.Response:
        return web.Response(text=EVIL.format(url=site.url), content_type="text/html")

    app = web.Application()
    app.router.add_get("/", evil)
    runner = web.AppRunner(app)
    await runner.setup()
    listening = web.TCPSite(runner, "127.0.0.1", 0)
    await listening.start()
    visitor = await new_visitor(site)
    page = await visitor.open("/")
    other = await visitor.context.new_page()
    statuses: list[int] = []
    other.on("response", lambda reply: statuses.append(reply.status) if "/v1/" in reply.url else None)
    try:
        await other.goto(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        assert await other.evaluate(EVIL_CALLS, site.url) == ["TypeError", "TypeError", "TypeError", "opaque 0"]
        await expect(other.locator("iframe").first).to_be_attached()
        assert await other.frames[1].locator("nav").count() == 0  # frame-ancestors 'none'
    finally:
        await other.close()
        await runner.cleanup()
    assert statuses and all(status in (401, 403) for status in statuses), statuses
    await page.reload()
    await expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    visitor.troubles.clear()  # they are the other page's
