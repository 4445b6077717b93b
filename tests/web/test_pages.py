"""Every view of the dashboard in a real browser: it opens, is live, keeps its state in the address, and says what is
wrong with an address."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from rollyard.service.routes.pages import VIEWS
from tests.service.site import Site
from tests.web.conftest import NewVisitor
from tests.web.visitor import Visitor
from tests.web.world import ADDRESSES

HEADINGS = {
    "/": "Overview",
    "/runs": "Runs",
    "/runs/{run}": "default",
    "/rollouts": "Rollouts",
    "/rollouts/{run}/{id}": "mixed-0",
    "/groups/{run}/{id}": "mixed",
    "/draws": "Draws",
    "/draws/{run}/{id}": "d",
    "/evals": "Evals",
    "/evals/compare": "Compare",
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


async def test_the_navigation_reaches_every_list(visitor: Visitor) -> None:
    page = await visitor.open("/")
    navigation = page.get_by_role("navigation", name="Views")
    for name in ("Runs", "Rollouts", "Draws", "Evals", "Engines", "Nodes", "Overview"):
        await navigation.get_by_role("link", name=name).click()
        await expect(page.get_by_role("heading", level=1)).to_contain_text(name)
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


HAS_OUTLINE = """() => {
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
            assert await page.evaluate("() => document.activeElement !== document.body") or view != path


UNREACHABLE = """() => [...document.querySelectorAll("main a, main button, main [role=button], main [onclick]")]
  .filter((e) => e.checkVisibility() && !e.disabled && e.tabIndex < 0 && !e.closest("[role=tablist],[role=grid]"))
  .map((e) => e.outerHTML.slice(0, 200))"""


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
