"""`rollyard open`, and the link that `rollyard serve` prints on a terminal."""

import asyncio
import os
import re
import shlex
import stat
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import aiohttp
import pytest

from rollyard.client import AsyncClient
from tests.cli.conftest import Cli
from tests.client.served import RunningService
from tests.service.site import open_site

NO_DISPLAY = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")


async def signs_in(link: str) -> str | None:
    """The scope that the link gives, as its page would use it; None if it is refused."""
    page, _, code = link.partition("/#code=")
    async with aiohttp.ClientSession() as http, http.post(f"{page}/v1/login", json={"code": code}) as reply:
        return (await reply.json())["access"] if reply.status == 200 else None


@pytest.fixture
def no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NO_DISPLAY:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("options", [(), ("--print",)])
async def test_without_a_display_the_link_is_printed(
    cli: Cli, service: RunningService, no_display: None, options: tuple[str, ...]
):
    printed = await cli("open", *options)
    assert (printed.status, printed.err) == (0, "this link signs in once, within 15 minutes\n")
    link = printed.out.removesuffix("\n")
    assert re.fullmatch(re.escape(service.url) + r"/#code=[\w-]{32}", link)
    assert [await signs_in(link), await signs_in(link)] == ["admin", None]


async def test_json_has_the_link(cli: Cli, service: RunningService, no_display: None):
    (printed,) = (await cli("open", "--json")).json
    assert printed.keys() == {"link", "signs_in", "expires_s"}
    assert (printed["signs_in"], printed["expires_s"], await signs_in(printed["link"])) == (True, 900, "admin")


async def test_a_link_signs_in_as_the_token_that_was_given(cli: Cli, service: RunningService, no_display: None):
    reader = (await cli("access", "create", "reader")).out.strip()
    assert await signs_in((await cli("open", "--token", reader)).out.strip()) == "reader"


async def test_the_browser_gets_the_code_in_a_private_file_and_not_as_an_argument(
    service: RunningService, tmp_path: Path
):
    """Other users of the machine can read the arguments of its processes."""
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$*" > {shlex.quote(str(seen))}\n')
    browser.chmod(0o755)
    for _ in range(2):  # the file of the first is replaced
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollyard", "open"),
            env={**os.environ, **service.environ(), "HOME": str(tmp_path / "home"), "BROWSER": f"{browser} %s"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        said = f"opened {service.url}/; if the browser does not show it: rollyard open --print\n"
        assert (process.returncode, out, err.decode()) == (0, b"", said)
        address = urlsplit(seen.read_text())
        assert address.scheme == "file" and "#" not in seen.read_text()
        page = Path(unquote(address.path))
        assert stat.S_IMODE(page.stat().st_mode) == 0o600
        assert [entry.name for entry in page.parent.iterdir()] == ["open.html"]
        (link,) = re.findall(r'content="0;url=([^"]+)"', page.read_text())
        assert await signs_in(link) == "admin"


async def test_off_loopback_the_page_asks_for_a_token(cli: Cli, tmp_path: Path, no_display: None):
    admin = "an-admin-token-of-these-tests"
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "token").write_text(f"{admin}\n")
    async with open_site(tmp_path, host="0.0.0.0", admin_tokens=[admin]) as site:
        printed = await cli("open", "--url", site.url, "--token", admin)
        said = "this service is not on loopback: sign in on the page with a token\n"
        assert (printed.status, printed.out, printed.err) == (0, f"{site.url}/\n", said)
        (printed,) = (await cli("open", "--url", site.url, "--token", admin, "--json")).json
        assert printed == {"link": f"{site.url}/", "signs_in": False, "expires_s": None}


async def test_errors_are_one_line(cli: Cli, service: RunningService, unused_tcp_port: int, no_display: None):
    async with AsyncClient(service.url, service.token) as client:
        node = (await client.create_token("node"))["token"]
    for options, said in (
        (("--url", f"http://127.0.0.1:{unused_tcp_port}"), "start the service with `rollyard serve`"),
        (("--token", "wrong"), "rollyard: this token is unknown — give the service's token with --token"),
        (("--token", node), "rollyard: a node's token is valid only for /v1/fleet/ — use a token that allows this"),
    ):
        printed = await cli("open", *options)
        assert (printed.status, printed.out) == (1, ""), printed
        assert said in printed.err and printed.err.count("\n") == 1, printed


@pytest.mark.parametrize("log_format", ["console", "json"])
async def test_serve_prints_a_link_on_a_terminal_and_nowhere_else(tmp_path: Path, log_format: str):
    """Programs read the first line from a pipe, and log files may have other readers: neither gets a code."""
    terminal, stderr = os.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollyard", "serve", "--port", "0", "--data-dir", str(tmp_path / "data"),
        "--runtime", "local", "--log-format", log_format, "--log-level", "warning",
        env={**os.environ, "HOME": str(tmp_path)}, stderr=stderr, cwd=tmp_path,
    )  # fmt: skip
    os.close(stderr)
    try:
        async with asyncio.timeout(90):
            first = await asyncio.to_thread(read_line, terminal)
            found = re.fullmatch(r"rollyard \S+ at (http://127\.0\.0\.1:\d+), token in \S+/data/token", first)
            assert found, first
            if log_format == "console":
                second = await asyncio.to_thread(read_line, terminal)
                link, _, rest = second.removeprefix("dashboard: ").partition(" ")
                assert link.startswith(f"{found[1]}/#code=") and rest == "(works once, for 15 minutes)"
                assert [await signs_in(link), await signs_in(link)] == ["admin", None]
            process.terminate()
            assert await process.wait() == 0
            assert "#code=" not in await asyncio.to_thread(read_rest, terminal)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(terminal)


def read_line(terminal: int) -> str:
    data = b""
    while not data.endswith(b"\n"):
        data += os.read(terminal, 1)
    return data.decode().strip()


def read_rest(terminal: int) -> str:
    data = b""
    try:
        while chunk := os.read(terminal, 4096):
            data += chunk
    except OSError:  # EIO: no process has the other end open any more
        pass
    return data.decode()
