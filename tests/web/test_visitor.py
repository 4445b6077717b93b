"""The visitor of these tests notices what goes wrong on a page."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser

from tests.service.site import Site
from tests.web.visitor import Visitor

TROUBLES = {
    "an error in the console": ("() => console.error('wrong')", "console: wrong"),
    "a script error": ("() => setTimeout(() => { throw new Error('thrown'); })", "script error: thrown"),
    "an image of another origin": (
        "() => new Promise((done) => Object.assign(new Image(), { onerror: done, src: 'http://127.0.0.2/x' }))",
        "CSP: img-src",
    ),
    "a dialog": ("() => alert('hello')", "dialog: alert hello"),
    "a refused call": ("() => fetch('/v1/runs')", "401: GET"),
}


@pytest.mark.parametrize("name", TROUBLES)
async def test_a_test_fails_with_a_page_that_has(name: str, browser: Browser, world: Site) -> None:
    script, expected = TROUBLES[name]
    visitor = await Visitor.new(browser, world)
    page = await visitor.open("/runs")
    await page.evaluate(script)
    await page.evaluate("() => new Promise((done) => setTimeout(done))")
    with pytest.raises(AssertionError, match=expected):
        await visitor.close()
