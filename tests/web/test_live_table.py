"""The table of rollouts while its list changes, in Chromium: which rows are marked as ended, and which are new."""

from __future__ import annotations

import asyncio
import re

import pytest
from playwright.async_api import Page, Route, expect

from tests.service.site import Site
from tests.web.conftest import NewVisitor
from tests.web.results import LiveResults, Results
from tests.web.visitor import Theme, Visitor

LEFT = ".rows-space .row.left"


async def live_table(visitor: Visitor, results: LiveResults) -> Page:
    await visitor.page.route("**/v1/results*", results)
    page = await visitor.open("/rollouts?state=live")
    await expect(page.get_by_role("grid")).to_be_visible()
    return page


async def scrolled_to(page: Page, number: int) -> None:
    """Scrolls until this row, of those that are loaded, is an element."""
    await page.get_by_role("grid").evaluate("(grid) => { grid.scrollTop = grid.scrollHeight; }")
    await expect(page.get_by_role("row", name=re.compile(rf"task {number}\b"))).to_be_visible()


async def test_new_rollouts_do_not_mark_others_as_ended(visitor: Visitor) -> None:
    results = LiveResults(range(1000, 1100))
    page = await live_table(visitor, results)
    results.numbers |= set(range(1100, 1110))
    await expect(page.get_by_role("button", name="10 new")).to_be_visible()
    await scrolled_to(page, 1000)
    await expect(page.locator(LEFT)).to_have_count(0)


async def test_rows_that_move_up_are_not_new(visitor: Visitor) -> None:
    results = LiveResults(range(800, 1100))
    page = await live_table(visitor, results)
    await expect(page.get_by_role("row", name=re.compile(r"task 1099\b"))).to_be_visible()
    results.numbers -= {1099, 1097}  # 899 and 898 are now on the first page
    results.numbers |= {1100}
    await expect(page.get_by_role("button", name="1 new")).to_be_visible()
    await expect(page.locator(LEFT)).to_have_count(2)
    for number in (1099, 1097):
        await expect(page.get_by_role("row", name=re.compile(rf"task {number}\b"))).to_contain_text("ended")
    await page.get_by_role("button", name="1 new").click()
    await expect(page.get_by_role("row", name=re.compile(r"task 1100\b"))).to_be_in_viewport()
    await expect(page.locator(LEFT)).to_have_count(0)


async def test_all_rows_are_marked_when_all_rollouts_have_ended(visitor: Visitor) -> None:
    results = LiveResults(range(1000, 1005))
    page = await live_table(visitor, results)
    await expect(page.locator(".rows-space .row")).to_have_count(5)
    results.numbers = set()
    await expect(page.locator(LEFT)).to_have_count(5)
    results.numbers = {900, 1004}  # 900 is older than all that are loaded
    await expect(page.locator(LEFT)).to_have_count(4)
    await expect(page.locator(".fresh")).to_have_count(0)


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_rows_that_have_ended_can_be_read(world: Site, new_visitor: NewVisitor, axe: str, theme: Theme) -> None:
    visitor = await new_visitor(world, theme=theme)
    await visitor.context.add_init_script(axe)
    results = LiveResults(range(1000, 1005))
    page = await live_table(visitor, results)
    results.numbers -= {1004, 1002}
    await expect(page.locator(LEFT)).to_have_count(2)
    found = await page.evaluate(
        """async () => {
          const { violations } = await axe.run(document.querySelector(".rows-space"), { runOnly: ["color-contrast"] });
          return violations.flatMap(({ nodes }) => nodes.map((node) => node.failureSummary));
        }"""
    )
    assert found == []


async def test_the_table_goes_on_after_back_although_a_page_was_being_read(visitor: Visitor) -> None:
    visitor.expect_status(404)
    results, held = Results(1000), asyncio.Event()

    async def answer(route: Route) -> None:
        if "after=" in route.request.url and not held.is_set():
            held.set()  # never answered: the view is left before
            return
        await results(route)

    page = visitor.page
    await page.route("**/v1/results*", answer)
    await visitor.open("/rollouts")
    await page.get_by_role("grid").evaluate("(grid) => { grid.scrollTop = grid.scrollHeight; }")
    await held.wait()
    await page.get_by_role("row", name=re.compile(r"task 900\b")).click()
    await page.wait_for_url("**/rollouts/default/r900")
    await page.go_back()
    await expect(page.get_by_role("row", name=re.compile(r"task 900\b"))).to_be_in_viewport()
    await page.wait_for_function("document.querySelector('.rows-space').style.height === '7200px'")  # 200 rows


async def test_the_next_person_sees_no_row_of_the_one_who_signed_out(world: Site, new_visitor: NewVisitor) -> None:
    visitor = await new_visitor(world)
    results, held = Results(50), asyncio.Event()
    page = visitor.page
    await page.route("**/v1/results*", results)
    await visitor.open("/rollouts")
    await expect(page.get_by_role("row", name=re.compile(r"task 49\b"))).to_be_visible()
    await page.get_by_role("button", name="Sign out").click()

    async def hold(route: Route) -> None:
        held.set()  # never answered

    await page.route("**/v1/results*", hold)
    await page.get_by_label("Token").fill(world.token)
    await page.get_by_role("button", name="Sign in").click()
    await held.wait()
    await expect(page.get_by_role("heading", level=1)).to_have_text("Rollouts")
    await expect(page.locator("main .loading")).to_be_visible()
    await expect(page.get_by_role("grid")).to_have_count(0)
