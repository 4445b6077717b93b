"""A person at the dashboard: one browser profile with one page, and everything that went wrong on it.

A test fails at its end if its pages had a script error, an error in the console, a violation of the content security
policy, a dialog, a download, a request to another origin, or a reply with an error status that the test did not expect.
"""

from __future__ import annotations

import os
import re
from typing import Any, Literal
from urllib.parse import urlsplit

from playwright.async_api import Browser, BrowserContext, Page, Request, Response, expect

from tests.service.site import Site

TIMEOUT_MS = float(os.environ.get("ROLLYARD_BROWSER_TIMEOUT_MS", "60000"))
"""A guard against hangs: a busy machine is slow."""

expect.set_options(timeout=TIMEOUT_MS)

Theme = Literal["light", "dark"]

INIT = """
globalThis.troubles = [];
addEventListener("securitypolicyviolation", (event) =>
  troubles.push(`CSP: ${event.effectiveDirective} ${event.blockedURI} ${event.sample} ${event.sourceFile}`));
"""

GO = """(to) => new Promise((done) => {
  history.pushState(null, "", to);
  dispatchEvent(new Event("popstate"));
  requestAnimationFrame(() => requestAnimationFrame(done));  // the old view is gone
})"""

IS_SETTLED = "() => document.querySelector('main h1') && !document.querySelector('main .loading')"
"""The view has its heading, and no part of it says that it loads."""

_STATUS = re.compile(r"Failed to load resource: .* status of \d{3}")
"""The browser's message about a reply with an error status, which `_on_response` judges."""

ABSENT = ("/v1/nodes",)
"""Addresses that answer 404 if a service has no such part; their views say so."""


class Visitor:
    """One page in its own browser profile. `open` signs in on its first call."""

    def __init__(self, site: Site, context: BrowserContext, page: Page) -> None:
        self.site = site
        self.context = context
        self.page = page
        self.troubles: list[str] = []
        self._expected: set[int] = set()
        self._is_loss_expected = False
        self._is_signed_in = False
        page.on("pageerror", lambda error: self._on_error(error.message, error.stack or ""))
        page.on("console", lambda message: self._on_console(message.type, message.text))
        page.on("dialog", self._on_dialog)
        page.on("download", lambda download: self.troubles.append(f"download: {download.url}"))
        page.on("popup", lambda popup: self.troubles.append(f"window: {popup.url}"))
        context.on("request", self._on_request)
        context.on("response", self._on_response)

    @classmethod
    async def new(cls, browser: Browser, site: Site, *, width: int = 1280, theme: Theme = "light") -> Visitor:
        context = await browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,
            reduced_motion="reduce",
            permissions=["clipboard-read", "clipboard-write"],
        )
        context.set_default_timeout(TIMEOUT_MS)
        await context.add_init_script(INIT)
        return cls(site, context, await context.new_page())

    def expect_status(self, *statuses: int) -> None:
        """Replies with these statuses are what the test is about."""
        self._expected.update(statuses)

    def expect_loss(self) -> None:
        """The service goes away during this test."""
        self._is_loss_expected = True

    async def sign_in(self, path: str = "/", *, token: str | None = None) -> None:
        """Opens a link with a new code of this token's owner (the admin's by default)."""
        answer = await self.site.post("/v1/login/codes", token=token)
        assert answer.status == 201, answer.body
        await self.page.goto(f"{self.site.url}{path}#code={answer.body['code']}")
        self._is_signed_in = True
        await self.settled()

    async def open(self, path: str) -> Page:
        """Opens an address and returns the page once its view is shown."""
        if not self._is_signed_in:
            await self.sign_in(path)
        else:
            await self.page.goto(self.site.url + path)
            await self.settled()
        return self.page

    async def go(self, path: str) -> None:
        """Changes to another view inside the page, as a link does, and returns when it is shown."""
        await self.page.evaluate(GO, path)
        await self.settled()

    async def settled(self) -> None:
        await self.page.wait_for_function(IS_SETTLED)

    async def close(self) -> None:
        """Closes the page. Raises `AssertionError` with the troubles that it had."""
        try:
            if not self.page.is_closed() and self.page.url.startswith(self.site.url):
                self.troubles += await self.page.evaluate("() => globalThis.troubles || []")
        finally:
            await self.context.close()
        assert not self.troubles, "\n".join(dict.fromkeys(self.troubles))

    def _on_error(self, message: str, stack: str) -> None:
        self.troubles.append(f"script error: {message} at {self.page.url} {stack[:600]}")

    def _on_console(self, kind: str, text: str) -> None:
        if kind != "error":
            return
        if _STATUS.search(text):
            return
        if self._is_loss_expected and ("net::ERR_" in text or "Failed to fetch" in text):
            return
        self.troubles.append(f"console: {text}")

    async def _on_dialog(self, dialog: Any) -> None:
        self.troubles.append(f"dialog: {dialog.type} {dialog.message[:200]}")
        await dialog.dismiss()

    def _on_request(self, request: Request) -> None:
        if urlsplit(request.url)[:2] != urlsplit(self.site.url)[:2]:
            self.troubles.append(f"request to another origin: {request.url[:200]}")

    def _on_response(self, response: Response) -> None:
        is_absent = response.status == 404 and urlsplit(response.url).path in ABSENT
        if response.status >= 400 and response.status not in self._expected and not is_absent:
            self.troubles.append(f"{response.status}: {response.request.method} {response.url}")
