"""Debian's Chromium, driven by Playwright: for the dashboard's tests, its benchmark and the pictures of the docs."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.async_api import Browser

ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
"""The sandbox of Chromium needs a user other than root; its pages are only ours."""

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser")
"""The same browser without its own user interface comes first: it needs half the CPU time."""

START_MS = 120_000.0


class NoChromium(Exception):
    """Chromium or Playwright is not installed. The text says what to install."""


def find_chromium() -> str:
    """Returns the path of the program. Raises `NoChromium`."""
    for path in (os.environ.get("ROLLYARD_CHROMIUM"), *map(shutil.which, PROGRAMS)):
        if path:
            return path
    raise NoChromium(f"Chromium is not installed: apt-get install {PROGRAMS[0]} (`make setup` does it when root)")


@asynccontextmanager
async def chromium() -> AsyncGenerator[Browser, None]:
    """A headless browser. Raises `NoChromium`."""
    path = find_chromium()
    try:
        from playwright.async_api import async_playwright
    except ImportError as error:
        raise NoChromium("Playwright is not installed: pip install playwright (`make setup` does it)") from error
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS], timeout=START_MS)
        try:
            yield browser
        finally:
            await browser.close()
