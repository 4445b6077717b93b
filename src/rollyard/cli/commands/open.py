"""`rollyard open`: opens the dashboard in a browser, signed in where the service is on loopback."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from rollyard.cli._browser import open_in_browser
from rollyard.cli._console import AsJson, Token, Url, connect, note, print_json, run
from rollyard.core.failure import Forbidden
from rollyard.core.files import replacing
from rollyard.core.paths import data_home


def open_dashboard(
    is_printed: Annotated[
        bool, typer.Option("--print", help="Print the link on stdout instead of opening a browser.")
    ] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Open the dashboard in a browser.

    If the service listens on loopback, the link signs in as the token's owner, once, within 15 minutes. Elsewhere, the
    page asks for a token. Without a display, and with --json, the link is printed.
    """

    async def work() -> tuple[str, dict[str, Any] | None]:
        async with connect(url, token) as client:
            try:
                return client.url, await client.create_login_code()
            except Forbidden:
                await client.whoami()  # raises again if the token is refused, not only the code
                return client.url, None

    page, code = run(work())
    link = f"{page}/" if code is None else f"{page}/#code={code['code']}"
    if as_json:
        print_json({"link": link, "signs_in": code is not None, "expires_s": code and code["expires_s"]})
        return
    if is_printed or not _open(link, is_secret=code is not None):
        typer.echo(link)
        if code is not None:
            note(f"this link signs in once, within {code['expires_s'] / 60:.0f} minutes")
    else:
        note(f"opened {page}/; if the browser does not show it: rollyard open --print")
    if code is None:
        note("this service is not on loopback: sign in on the page with a token")


def _open(link: str, *, is_secret: bool) -> bool:
    """Opens the link. Returns False if there is no browser, or no place for a file."""
    try:
        return open_in_browser(_redirecting_file(link).as_uri() if is_secret else link)
    except OSError:
        return False


def _redirecting_file(link: str) -> Path:
    """A file, for this user only, that leads the browser to the link. All users of the machine can read the arguments
    of a browser, so the code must not be among them."""
    folder = data_home(os.environ)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "open.html"
    address = escape(link)
    with replacing(path, mode=0o600) as file:
        page = (
            '<!doctype html><meta charset="utf-8"><title>Rollyard</title>'
            f'<meta http-equiv="refresh" content="0;url={address}"><a href="{address}">Rollyard</a>\n'
        )
        file.write(page.encode())
    return path
