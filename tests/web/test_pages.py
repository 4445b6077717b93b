"""Every view of the dashboard in a real browser."""

from playwright.async_api import expect

from tests.web.visitor import Visitor


async def test_a_link_signs_in_and_shows_the_overview(visitor: Visitor) -> None:
    page = await visitor.open("/")
    await expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    assert "code" not in page.url
