"""Every view of the dashboard in a real browser: it opens, is live, keeps its state in the address, and says what is
wrong with an address."""

from __future__ import annotations

import asyncio
import re

import pytest
from playwright.async_api import expect

from rollyard.service.routes.pages import VIEWS
from tests.service.site import Site
from tests.web.conftest import NewVisitor
from tests.web.visitor import Visitor
from tests.web.world import ADDRESSES, graded

HEADINGS = {
    "/": "Overview",
    "/runs": "Runs",
    "/runs/{run}": "default",
    "/rollouts": "Rollouts",
    "/rollouts/{run}/{id}": "mixed-0",
    "/groups/{run}/{id}": "mixed",
    "/draws": "Draws",
    "/draws/{run}/{id}": "d",
    "/evals": "Evaluations",
    "/evals/compare": "Two evaluations",
    "/evals/{run}/{id}": "e1",
    "/engines": "Engines",
    "/nodes": "Nodes",
}


def test_every_view_is_in_these_tests() -> None:
    assert set(ADDRESSES) == set(HEADINGS) == set(VIEWS)


async def test_every_view_opens_by_its_address_and_by_a_change_inside_the_page(visitor: Visitor) -> None:
    for view, path in ADDRESSES.items():
        page = await visitor.open(path)
        await expect(page.get_by_role("heading", level=1)).to_contain_text(HEADINGS[view])
        assert await page.get_by_role("alert").count() == 0, view
    for view, path in ADDRESSES.items():
        await visitor.go(path)
        await expect(visitor.page.get_by_role("heading", level=1)).to_contain_text(HEADINGS[view])


async def test_the_window_is_named_after_the_view(visitor: Visitor) -> None:
    """The browser's tabs and its history show titles only."""
    page = await visitor.open("/")
    for view, path in ADDRESSES.items():
        await visitor.go(path)
        await expect(page).to_have_title(re.compile(rf"{HEADINGS[view]}.* – Rollyard$"))


async def test_on_a_narrow_screen_the_current_view_and_tab_are_in_sight(world: Site, new_visitor: NewVisitor) -> None:
    visitor = await new_visitor(world, width=390)
    page = await visitor.open("/nodes")
    await expect(page.get_by_role("link", name="Nodes")).to_be_in_viewport(ratio=0.9)
    await visitor.go("/")
    await expect(page.get_by_role("link", name="Overview")).to_be_in_viewport(ratio=0.9)
    await visitor.go(f"{ADDRESSES['/rollouts/{run}/{id}']}?tab=record")
    row, record = page.get_by_role("tablist"), page.get_by_role("tab", name="Record")
    await expect(record).to_have_attribute("aria-selected", "true")
    await page.wait_for_function(IS_INSIDE, arg=[await record.element_handle(), await row.element_handle()])
    assert await page.evaluate("scrollY") == 0  # the row moved, not the page


IS_INSIDE = """([part, row]) => {
  const [own, seen] = [part, row].map((element) => element.getBoundingClientRect());
  return own.left >= seen.left - 1 && own.right <= seen.right + 1;
}"""


async def test_what_one_jumps_to_is_not_under_the_bar_of_the_views(visitor: Visitor) -> None:
    page = await visitor.open("/runs/default")
    await page.set_viewport_size({"width": 1280, "height": 400})
    await page.get_by_role("link", name="Groups", exact=True).click()
    assert await page.locator("#groups").evaluate(IS_BELOW_BAR)
    await visitor.go("/rollouts/default/mixed-0?message=2")
    await expect(page.locator("#message-2")).to_be_focused()
    assert await page.locator("#message-2").evaluate(IS_BELOW_BAR)


IS_BELOW_BAR = """(part) => {
  const bar = document.querySelector("header.top").getBoundingClientRect();
  return scrollY > 0 && part.getBoundingClientRect().top >= bar.bottom;
}"""


async def test_the_navigation_reaches_every_list(visitor: Visitor) -> None:
    page = await visitor.open("/")
    navigation = page.get_by_role("navigation", name="Views")
    for name in ("Runs", "Rollouts", "Draws", "Evals", "Engines", "Nodes", "Overview"):
        await navigation.get_by_role("link", name=name).click()
        path = "/" if name == "Overview" else f"/{name.lower()}"
        await expect(page.get_by_role("heading", level=1)).to_contain_text(HEADINGS[path])
        await expect(navigation.locator("[aria-current=page]")).to_have_text(name)


@pytest.mark.parametrize(
    "path", ["/runs/nope", "/rollouts/default/nope", "/groups/default/nope", "/draws/default/nope", "/evals/nope/nope"]
)
async def test_an_unknown_id_gets_a_page_that_says_so(visitor: Visitor, path: str) -> None:
    visitor.expect_status(404)
    page = await visitor.open(path)
    alert = page.get_by_role("alert").first
    await expect(alert).to_contain_text("Not found")
    await expect(alert).to_contain_text("nope")


async def test_an_unknown_address_gets_a_page_that_says_so(visitor: Visitor) -> None:
    await visitor.open("/")
    await visitor.go("/runs/a/b/c")
    await expect(visitor.page.get_by_role("heading", level=1)).to_have_text("Not found")
    await visitor.page.get_by_role("link", name="Go to the overview").click()
    await expect(visitor.page.get_by_role("heading", level=1)).to_have_text("Overview")


async def test_a_rollout_is_followed_from_the_queue_to_its_end(world: Site, visitor: Visitor) -> None:
    await world.hold()
    try:
        await world.submit("followed", task=graded("count the moons"))
        page = await visitor.open("/rollouts/default/followed")
        await expect(page.locator("main")).to_contain_text("queued")
        await page.evaluate("() => { globalThis.isSamePage = true; }")
    finally:
        assert (await world.call("PATCH", "/v1/pools", json={"init": 8})).status == 200
    await world.ended("followed")
    main = page.locator("main")
    await expect(main).to_contain_text("completed")
    await expect(main.locator(".conversation")).to_contain_text("looking")
    assert await page.evaluate("() => globalThis.isSamePage")


async def test_the_overview_counts_what_is_queued_now(world: Site, visitor: Visitor) -> None:
    page = await visitor.open("/")
    await world.hold()
    try:
        await world.submit("w1", "w2", "w3")
        await expect(page.locator("main")).to_contain_text(re.compile(r"Queued?\D*3", re.I))
    finally:
        assert (await world.call("PATCH", "/v1/pools", json={"init": 8})).status == 200


async def test_new_rollouts_are_announced_in_the_table(world: Site, visitor: Visitor) -> None:
    page = await visitor.open("/rollouts")
    row = page.get_by_role("row").filter(has_text="quite new")
    await expect(page.get_by_role("row").filter(has_text="cannot start")).to_be_visible()
    await world.submit("fresh", task=graded("something quite new"))
    await world.ended("fresh")
    announced = page.get_by_role("button", name=re.compile("new", re.I))
    async with asyncio.timeout(60):
        while not await row.count():  # others of earlier tests may be announced before it
            await expect(announced.or_(row).first).to_be_visible()
            if not await row.count():
                await announced.click()
    await expect(row).to_be_visible()


async def test_filters_are_in_the_address_and_the_back_button_undoes_them(visitor: Visitor) -> None:
    page = await visitor.open("/rollouts")
    rows = page.get_by_role("row")
    failed, mixed = rows.filter(has_text="cannot start"), rows.filter(has_text="write a file").first
    await expect(failed).to_be_visible()
    await expect(mixed).to_be_visible()

    await page.locator("select[name=outcome]").select_option("failed")
    await expect(failed).to_be_visible()
    await expect(mixed).to_have_count(0)
    assert "outcome=failed" in page.url
    shared = page.url
    await page.locator("select[name=run]").select_option("e1")
    await expect(failed).to_have_count(0)
    assert "run=e1" in page.url

    await page.go_back()
    await expect(failed).to_be_visible()
    await expect(page.locator("select[name=run]")).to_have_value("")
    await page.go_back()
    await expect(mixed).to_be_visible()
    await page.go_forward()
    await expect(mixed).to_have_count(0)
    assert page.url == shared

    await failed.get_by_role("link").click()
    await expect(page.get_by_role("heading", level=1)).to_contain_text("cannot start")
    await page.go_back()
    await expect(failed).to_be_visible()
    assert page.url == shared


async def test_a_shared_link_shows_the_same_rows(world: Site, visitor: Visitor, new_visitor: NewVisitor) -> None:
    page = await visitor.open("/rollouts")
    await page.get_by_label(re.compile("Search")).fill("looking")
    await expect(page.locator("mark").first).to_have_text("looking")
    await expect(page).to_have_url(re.compile("search=looking"))
    other = await new_visitor(world)
    await other.open(page.url.removeprefix(world.url))
    await expect(other.page.locator("mark").first).to_have_text("looking")
    await expect(other.page.get_by_label(re.compile("Search"))).to_have_value("looking")


async def test_the_table_is_used_with_keys_alone(visitor: Visitor) -> None:
    page = await visitor.open("/rollouts?outcome=failed")
    await expect(page.get_by_role("row").filter(has_text="cannot start")).to_be_visible()
    await page.get_by_role("grid").focus()
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", level=1)).to_contain_text("cannot start")
    tabs = page.get_by_role("tab")
    await tabs.first.focus()
    await page.keyboard.press("End")
    await expect(tabs.last).to_be_focused()
    await expect(tabs.last).to_have_attribute("aria-selected", "true")
    await expect(page.get_by_role("tabpanel")).to_contain_text("echo no")


@pytest.mark.parametrize("width", [390, 1600])
async def test_no_view_scrolls_sideways(world: Site, new_visitor: NewVisitor, width: int) -> None:
    visitor = await new_visitor(world, width=width)
    await visitor.open("/")
    wide: dict[str, object] = {}
    for view, path in ADDRESSES.items():
        await visitor.go(path)
        extra = await visitor.page.evaluate(SIDEWAYS)
        if extra:
            wide[view] = extra
    assert wide == {}


SIDEWAYS = """() => {
  const root = document.documentElement;
  if (root.scrollWidth <= root.clientWidth) return null;
  const isWide = (element) => element.getBoundingClientRect().right > root.clientWidth + 1;
  const wide = [...document.querySelectorAll("body *")].filter(isWide).map((e) => `${e.localName}.${e.className}`);
  return [root.scrollWidth, ...wide.slice(0, 8)];
}"""


async def test_keys_alone_reach_the_content_and_every_link(visitor: Visitor) -> None:
    page = await visitor.open("/runs")
    await page.evaluate("() => document.activeElement.blur()")
    await page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to content")
    await expect(skip).to_be_focused()
    await expect(skip).to_be_in_viewport()
    await page.keyboard.press("Enter")
    await expect(page.locator("#main")).to_be_focused()

    await page.locator("a.brand").focus()
    order: list[str] = []
    for _ in range(7):
        await page.keyboard.press("Tab")
        order.append(await page.evaluate("() => document.activeElement.textContent"))
        assert await page.evaluate(HAS_OUTLINE), f"the focus on {order[-1]} is not visible"
    assert order == ["Overview", "Runs", "Rollouts", "Draws", "Evals", "Engines", "Nodes"]
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", level=1)).to_contain_text("Nodes")


async def test_the_heading_of_another_view_takes_the_focus(visitor: Visitor) -> None:
    """The link that had it is gone. What changes in the view, and its refreshes, leave the focus where it is."""
    page = await visitor.open("/runs")
    heading = page.get_by_role("heading", level=1)
    assert await page.evaluate("() => document.activeElement === document.body")  # the start of a page moves nothing
    await page.get_by_role("link", name="default", exact=True).press("Enter")
    await expect(page).to_have_url(re.compile("/runs/default$"))
    await expect(heading).to_contain_text("default")
    await expect(heading).to_be_focused()
    assert await page.evaluate(HAS_OUTLINE)
    await page.keyboard.press("Tab")
    await expect(
        page.get_by_role("link", name="Rollouts", exact=True).last
    ).to_be_focused()  # of the heading's controls

    versions = page.get_by_role("button", name="Over weight version")
    async with page.expect_response(lambda reply: "by=version" in reply.url):
        await versions.press("Enter")
    await expect(page.get_by_role("columnheader", name="weight version").first).to_be_attached()
    await expect(versions).to_be_focused()
    await page.go_back()
    await expect(versions).to_be_focused()
    await page.go_back()
    await expect(heading).to_have_text("Runs")
    await expect(heading).to_be_focused()


async def test_the_focus_goes_to_the_part_of_the_view_that_a_link_names(visitor: Visitor) -> None:
    page = await visitor.open("/runs/default")
    await page.get_by_role("link", name="Groups", exact=True).press("Enter")
    await expect(page.locator("#groups")).to_be_focused()
    await visitor.go("/rollouts/default/mixed-0?message=2")
    await expect(page.locator("#message-2")).to_be_focused()


HAS_OUTLINE = """() => {
  if (document.activeElement === document.body) return true;  // after the last one
  const { outlineStyle, outlineWidth, boxShadow } = getComputedStyle(document.activeElement);
  return (outlineStyle !== "none" && parseFloat(outlineWidth) > 0) || boxShadow !== "none";
}"""


async def test_keys_alone_reach_every_control_of_every_view(visitor: Visitor) -> None:
    """What a mouse can press has a place in the order of the keys, and the focus is never caught."""
    await visitor.open("/")
    page = visitor.page
    for view, path in ADDRESSES.items():
        await visitor.go(path)
        assert await page.evaluate(UNREACHABLE) == [], view
        await page.locator("#main").focus()
        for _ in range(4):
            await page.keyboard.press("Tab")
            assert await page.evaluate(HAS_OUTLINE), f"{view}: the focus is not visible"


UNREACHABLE = """() => [...document.querySelectorAll("main a, main button, main [role=button], main [onclick]")]
  .filter((e) => e.checkVisibility() && !e.disabled && e.tabIndex < 0 && !e.closest("[role=tablist],[role=grid]"))
  .map((e) => e.outerHTML.slice(0, 200))"""


async def test_a_text_is_folded_only_if_much_is_left(visitor: Visitor) -> None:
    page = await visitor.open("/runs")
    assert await page.evaluate(FOLDED, [40, 43, 60]) == [None, None, "Show more (100 B left)"]


FOLDED = """async (sizes) => {
  const { html, render } = await import("/assets/js/dom.js");
  const { LongText } = await import("/assets/js/text.js");
  return sizes.map((size) => {
    const box = document.createElement("div");
    render(html`<${LongText} text=${"line\\n".repeat(size)} />`, box);
    return box.querySelector("button")?.textContent ?? null;
  });
}"""


async def test_the_theme_follows_the_system_and_can_be_chosen(world: Site, new_visitor: NewVisitor) -> None:
    background = "() => getComputedStyle(document.body).backgroundColor"
    light, dark = await new_visitor(world), await new_visitor(world, theme="dark")
    shades = [await (await visitor.open("/runs")).evaluate(background) for visitor in (light, dark)]
    assert shades[0] != shades[1]
    button = light.page.get_by_role("button", name=re.compile("Theme"))
    await button.click()
    await button.click()
    await expect(button).to_have_text("Theme: dark")
    assert await light.page.evaluate(background) == shades[1]
    await light.page.reload()
    await light.settled()
    assert await light.page.evaluate(background) == shades[1]
