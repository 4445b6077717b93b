"""Pages that stay open for long: replies that never come or come late, other tabs, updates of the service, and large or
hostile data. Replies are replaced where a service would need hours to give them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

from playwright.async_api import Error, Page, Route, expect

from tests.service.site import Site
from tests.web.conftest import NewVisitor
from tests.web.results import Results
from tests.web.visitor import Visitor

MANY = 4096

DEEP = """async (depth) => {
  const { callsOf } = await import("/assets/js/rollout/data.js");
  const { jsonText } = await import("/assets/js/format.js");
  const nested = `${"[".repeat(depth)}${"]".repeat(depth)}`;
  const given = [`{"a": ${nested}}`, JSON.parse(`{"a": ${"[".repeat(500)}${"]".repeat(500)}}`)];
  const calls = callsOf({ tool_calls: given.map((one) => ({ function: { name: "x", arguments: one } })) });
  return { calls: calls.map((call) => typeof call.given), text: jsonText(JSON.parse(nested)).length,
    flat: jsonText({ a: { b: 1 } }) };
}"""


async def changed(page: Page, address: str, change: Any) -> list[str]:
    """Changes the replies of an address by a function. Returns the list of the requests from now on."""
    seen: list[str] = []

    async def answer(route: Route) -> None:
        seen.append(route.request.url)
        with contextlib.suppress(Error):  # the page was closed meanwhile
            reply = await route.fetch()
            await route.fulfill(response=reply, json=change(await reply.json()))

    await page.route(address, answer)
    return seen


async def test_a_connection_that_never_answers_is_reported_and_used_again(visitor: Visitor) -> None:
    page, is_silent = visitor.page, True
    await page.clock.install()
    await visitor.open("/runs")
    asked = asyncio.Event()

    async def silent(route: Route) -> None:
        asked.set()
        if not is_silent:
            await route.continue_()

    await page.route("**/v1/runs?*", silent)
    await page.clock.run_for(10_000)  # the view reads again
    await asyncio.wait_for(asked.wait(), 60)
    await expect(page.locator(".banner")).to_have_count(0)
    await page.clock.run_for(31_000)
    await expect(page.locator(".banner")).to_contain_text("does not answer")
    is_silent = False
    async with asyncio.timeout(60):
        while await page.locator(".banner").count():
            await page.clock.run_for(1000)


async def test_a_group_that_has_ended_is_not_read_again(visitor: Visitor) -> None:
    page = visitor.page
    await page.clock.install()
    seen = await changed(page, "**/v1/groups/mixed?*", lambda group: {**group, "state": "delivered"})
    await visitor.open("/groups/default/mixed")
    await expect(page.locator(".badge", has_text="delivered").first).to_be_visible()
    for _ in range(60):
        await page.clock.run_for(1000)
    assert len(seen) <= 3


async def test_a_cancelled_group_is_read_until_its_members_have_ended(visitor: Visitor) -> None:
    page, end = visitor.page, {"state": "run", "outcome": None, "code": None, "reward": None}

    def cancelled(group: dict[str, Any]) -> dict[str, Any]:
        first, *others = group["members"]
        return {**group, "state": "cancelled", "members": [{**first, **end}, *others]}

    await page.clock.install()
    seen = await changed(page, "**/v1/groups/mixed?*", cancelled)
    await visitor.open("/groups/default/mixed")
    outcome = page.locator("table.members tbody tr").first.locator("td").nth(2)
    await expect(outcome).to_contain_text("run")
    await page.clock.run_for(10_000)
    end |= {"state": "ended", "outcome": "cancelled"}
    async with asyncio.timeout(60):
        while "cancelled" not in await outcome.inner_text():
            await page.clock.run_for(1000)
    quiet_s, count = 0, len(seen)
    async with asyncio.timeout(60):
        while quiet_s < 60:  # a read that is in progress may be followed by one more
            await page.clock.run_for(1000)
            quiet_s, count = (quiet_s + 1 if len(seen) == count else 0), len(seen)


async def test_a_group_of_thousands_shows_some_members_and_how_many_there_are(visitor: Visitor) -> None:
    def many(group: dict[str, Any]) -> dict[str, Any]:
        one = {**group["members"][0], "state": "ended", "is_member": True}
        members = [{**one, "index": index, "reward": float(index % 100 == 0)} for index in range(MANY)]
        return {**group, "state": "complete", "size": MANY, "members": members}

    page = visitor.page
    await changed(page, "**/v1/groups/mixed?*", many)
    await visitor.open("/groups/default/mixed")
    await expect(page.locator("table.members tbody tr")).to_have_count(100)
    await page.get_by_role("button", name="Show more (3,996 left)").click()
    await expect(page.locator("table.members tbody tr")).to_have_count(200)
    assert await page.locator(".spread-count").all_inner_texts() == ["41", "4,055"]
    spread = page.locator(".spread")
    assert len(await spread.get_attribute("aria-label") or "") < 200
    assert await spread.locator(".spread-dot").count() <= 26


async def test_two_evaluations_of_which_one_is_too_large_are_compared_as_far_as_both_are_read(visitor: Visitor) -> None:
    page, pages = visitor.page, list[int]()

    def part(body: dict[str, Any]) -> dict[str, Any]:
        pages.append(1)
        return {"tasks": body["tasks"][:1] if len(pages) == 1 else [], "next": f"t:{len(pages)}"}

    await changed(page, "**/v1/evals/e2/tasks?*", part)
    await visitor.open("/evals/compare?a=e1/e1&b=e2/e2")
    await expect(page.locator(".notice")).to_contain_text("only the first 1 tasks of B are compared")
    await expect(page.locator(".stat", has_text="Missing in one").locator(".value")).to_have_text("0")
    await expect(page.locator("table.data tbody tr")).to_have_count(1)


async def test_deeply_nested_arguments_stay_small(visitor: Visitor) -> None:
    page = await visitor.open("/")
    found = await page.evaluate(DEEP, 2000)
    assert found == {"calls": ["string", "string"], "text": 4000, "flat": '{\n  "a": {\n    "b": 1\n  }\n}'}


async def test_a_part_that_fails_does_not_take_the_page_with_it(visitor: Visitor) -> None:
    def broken(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "trajectory": {**record["trajectory"], "messages": [None]}}

    page = visitor.page
    await changed(page, re.compile(r"/v1/rollouts/mixed-0\?include=trajectory"), broken)  # type: ignore[arg-type]
    await visitor.open("/rollouts/default/mixed-0")
    await expect(page.get_by_role("alert")).to_contain_text("This part cannot be shown")
    await page.get_by_role("tab", name="Record").click()
    await expect(page.get_by_role("alert")).to_have_count(0)
    await expect(page.get_by_role("tabpanel")).to_contain_text("Task")


async def test_a_late_page_of_old_rows_is_not_added_below_new_ones(visitor: Visitor) -> None:
    page, results, release, held = visitor.page, Results(1000), asyncio.Event(), asyncio.Event()

    async def answer(route: Route) -> None:
        if "after=" in route.request.url and not release.is_set():
            held.set()
            await release.wait()
        await results(route)

    await page.route("**/v1/results*", answer)
    await visitor.open("/rollouts")
    await expect(page.get_by_role("row", name=re.compile(r"task 999\b"))).to_be_visible()
    await page.keyboard.press("End")
    await page.evaluate("() => document.querySelector('.rows-frame').scrollTo(0, 1e6) || scrollTo(0, 1e6)")
    await asyncio.wait_for(held.wait(), 60)
    results.count = 2000  # more new rows than a page has
    await page.get_by_role("button", name=re.compile("new")).click()
    await expect(page.get_by_role("row", name=re.compile(r"task 1999\b"))).to_be_attached()
    release.set()
    await page.wait_for_timeout(300)
    for top in range(0, 6000, 300):
        await page.evaluate("(top) => document.querySelector('.rows-frame').scrollTo(0, top) || scrollTo(0, top)", top)
        await page.wait_for_timeout(20)
        names = await page.locator(".rows-space .name a").all_inner_texts()
        assert not [name for name in names if len(name) < len("task 1000")], "rows between are missing"


async def test_an_open_question_does_not_become_another_one(visitor: Visitor) -> None:
    page = visitor.page
    node = {"name": "n1", "host": "h", "version": "1", "state": "up", "live": 0, "ended": 0, "wants": 0}
    node |= {"pools": {}, "engines": {}, "heard_s_ago": 0.1}

    async def nodes(route: Route) -> None:
        await route.fulfill(json={"nodes": [node]})

    await page.route("**/v1/nodes", nodes)
    await visitor.open("/nodes")
    await page.get_by_role("button", name="Drain").click()
    await expect(page.get_by_role("button", name="Drain the node")).to_be_visible()
    node["state"] = "draining"  # another admin has drained it
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await expect(page.get_by_role("button", name="Resume")).to_be_visible()


async def test_a_view_of_another_version_says_that_the_page_must_be_reloaded(visitor: Visitor) -> None:
    page = visitor.page
    await visitor.open("/")
    script = 'import { notThere } from "../api.js"; export default notThere;'
    await page.route(
        "**/assets/js/views/engines.js", lambda route: route.fulfill(content_type="text/javascript", body=script)
    )
    await page.get_by_role("link", name="Engines").first.click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("Reload this page")
    await page.unroute("**/assets/js/views/engines.js")
    await page.get_by_role("button", name="Reload").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(re.compile("Engines"))


async def test_a_link_that_is_pasted_into_an_open_page_signs_in(world: Site, new_visitor: NewVisitor) -> None:
    visitor = await new_visitor(world)
    visitor.expect_status(401)
    page = visitor.page
    await page.goto(world.url)
    await expect(page.get_by_label("Token")).to_be_visible()
    code = (await world.post("/v1/login/codes")).body["code"]
    await page.evaluate("(code) => { location.hash = `code=${code}`; }", code)
    await expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    assert "code=" not in page.url


async def test_a_tab_shows_nothing_of_the_person_who_signed_out_in_another_one(
    world: Site, new_visitor: NewVisitor
) -> None:
    visitor = await new_visitor(world)
    visitor.expect_status(401, 403)
    page = await visitor.open("/rollouts/default/mixed-0")
    await expect(page.locator(".access")).to_have_text("admin")
    other = await visitor.context.new_page()
    await other.goto(world.url)
    reader = (await world.post("/v1/tokens", {"access": "reader", "name": "visitor", "runs": ["e1"]})).body["token"]
    await other.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_label("Token")).to_be_visible()
    await other.get_by_label("Token").fill(reader)
    await other.get_by_role("button", name="Sign in").click()
    await expect(page.locator(".access")).to_have_text("reader")
    await expect(page.locator("main")).to_contain_text("Not allowed")


async def test_typing_while_the_address_follows_loses_no_letter(visitor: Visitor) -> None:
    page = visitor.page
    await page.route("**/v1/results*", Results(10))
    await visitor.open("/rollouts")
    field = page.get_by_label("Search in messages and tool output")
    await field.press_sequentially("many words in a row", delay=302)  # just after the address
    await expect(field).to_have_value("many words in a row")
    await page.wait_for_url("**search=many+words+in+a+row*")


async def test_the_pages_of_a_list_keep_the_focus(visitor: Visitor) -> None:
    page, batch = visitor.page, {"want": 1, "delivered": 1, "is_open": False, "is_last": False, "reason": None}

    async def batches(route: Route) -> None:
        number = 90 if "after=" not in route.request.url else 30
        rows = [{**batch, "number": number - at, "figures": {}, "acked": True, "created_at": 1.7e9} for at in range(3)]
        await route.fulfill(json={"batches": [{**row, "closed_at": 1.7e9} for row in rows], "next": f"b:{number - 2}"})

    await page.route("**/v1/draws/d/batches?*", batches)
    await visitor.open("/draws/default/d")
    older = page.get_by_label("Pages of batches").get_by_role("button", name="Older")
    await older.focus()
    await page.keyboard.press("Enter")
    await page.wait_for_url("**batches=*")
    await expect(page.get_by_role("region", name="Batches")).to_contain_text("30")
    await expect(older).to_be_focused()
    assert json.dumps(await page.evaluate("document.activeElement.textContent")) == '"Older"'
