"""The dashboard's page and files: open, without data, with strict headers, and nothing else from the disk."""

import asyncio
import gzip
import re
from collections.abc import AsyncGenerator
from importlib.resources import files
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from rollyard.service.routes.pages import CSP, HEADERS, VIEWS, assets, is_page
from tests.service.site import Site, open_site, task

MOST_BYTES = 300_000
"""Of all files, compressed: a page on a slow line still opens at once."""

WEB = Path(str(files("rollyard.web")))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    async with open_site(tmp_path_factory.mktemp("pages")) as running:
        await running.hold()
        created = await running.post("/v1/runs", {"id": "secret-run"})
        assert created.status == 201
        submitted = {"run": "secret-run", "id": "secret-rollout", "task": task("a secret instruction")}
        assert (await running.post("/v1/rollouts", submitted)).status == 202
        yield running


def addresses() -> list[str]:
    filled = [view.format(run="secret-run", id="secret-rollout") for view in VIEWS]
    return [*filled, *(f"{view}/" for view in filled if view != "/")]


def test_all_files_are_small() -> None:
    sizes = {name: len(asset.zipped) for name, asset in assets().items()}
    assert sum(sizes.values()) <= MOST_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:10]


@pytest.mark.asyncio(loop_scope="module")
async def test_every_view_is_the_same_page_and_needs_no_token(site: Site) -> None:
    page = (WEB / "index.html").read_bytes()
    for path in addresses():
        for headers in ({}, {"Sec-Fetch-Site": "cross-site"}, {"Cookie": "rollyard_login_1=x", "X-Rollyard-Page": "x"}):
            answer = await site.get(path, token="", headers=headers)
            assert (answer.status, answer.body) == (200, page), path
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert HEADERS.items() <= answer.headers.items()
        assert (await site.post(path, token="")).status == 405
        refused = await site.get(path, token="", headers={"Host": "evil.example"})
        assert (refused.status, refused.code) == (403, "foreign_host")


@pytest.mark.asyncio(loop_scope="module")
async def test_every_file_has_its_type_and_the_headers_and_no_data(site: Site) -> None:
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
    served = {path.relative_to(WEB).as_posix() for path in WEB.rglob("*") if path.suffix in kinds}
    assert served == set(assets()) and {"index.html", "app.css", "js/main.js", "vendor/preact.js"} <= served
    for name in served:
        answer = await site.get(f"/assets/{name}", token="")
        assert (answer.status, answer.body) == (200, (WEB / name).read_bytes()), name
        assert answer.headers["content-type"] == f"{kinds[Path(name).suffix]}; charset=utf-8"
        assert HEADERS.items() <= answer.headers.items()
        assert b"secret-" not in answer.body and site.token.encode() not in answer.body


def test_the_policy_allows_own_files_only() -> None:
    rules = {name: value for name, _, value in (rule.partition(" ") for rule in CSP.split("; "))}
    assert rules["default-src"] == "'none'"
    assert {rules[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert {rules[name] for name in ("base-uri", "form-action", "frame-ancestors", "trusted-types")} == {"'none'"}
    assert "unsafe" not in CSP
    assert (HEADERS["x-content-type-options"], HEADERS["x-frame-options"]) == ("nosniff", "DENY")


def test_the_page_names_only_files_that_exist_and_has_no_inline_code() -> None:
    page = (WEB / "index.html").read_text()
    names = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert names and all(name.removeprefix("/assets/") in assets() for name in names), names
    assert not re.search(r"<style|<script(?![^>]*\ssrc=)|\son\w+=|\sstyle=|https?:", page)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_file_is_sent_compressed_and_only_when_it_changed(site: Site) -> None:
    async with aiohttp.ClientSession(auto_decompress=False) as http:

        async def get(path: str, **headers: str) -> tuple[int, bytes, str | None, str]:
            sent = {"Accept-Encoding": "identity", **{name.replace("_", "-"): text for name, text in headers.items()}}
            async with http.get(site.url + path, headers=sent) as reply:
                assert reply.headers["vary"] == "accept-encoding" and HEADERS.items() <= reply.headers.items()
                return reply.status, await reply.read(), reply.headers.get("content-encoding"), reply.headers["etag"]

        for path in ("/", "/assets/js/main.js"):
            status, data, encoding, tag = await get(path)
            assert (status, encoding) == (200, None)
            assert (await get(path, Accept_Encoding="gzip;q=0"))[:3] == (200, data, None)
            status, zipped, encoding, same = await get(path, Accept_Encoding="br, gzip, deflate")
            assert (status, gzip.decompress(zipped), encoding, same) == (200, data, "gzip", tag)
            for known in (tag, f"W/{tag}", f'"other", {tag}'):
                assert (await get(path, If_None_Match=known))[:2] == (304, b"")
            for other in ('"other"', tag.strip('"'), "*x"):
                assert (await get(path, If_None_Match=other))[0] == 200


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "nothing.js",
            "js",
            "js/",
            "/etc/passwd",
            "__init__.py",
            "vendor/LICENSES.txt",
            "js/main.js/",
            "JS/main.js",
        ),
        *("../service/app.py", "js/../../service/app.py", "%2e%2e/service/app.py", "..%2fservice%2fapp.py"),
        *(
            "js/..%2f..%2fcore/json.py",
            "%2fetc%2fpasswd",
            "....//etc/passwd",
            "..\\..\\x.js",
            "%00",
            "js/main.js%00.css",
        ),
    ],
)
async def test_there_is_no_other_file(site: Site, name: str) -> None:
    """The path is sent as it is: no client has normalized it."""
    host, _, port = site.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET /assets/{name} HTTP/1.1\r\nHost: {site.url[7:]}\r\nConnection: close\r\n\r\n".encode())
        reply = await reader.read()
    finally:
        writer.close()
    status = int(reply.split(b" ", 2)[1])
    assert status in (400, 401, 404) and b"root:" not in reply and b"import " not in reply, reply


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", True),
        ("/runs", True),
        ("/rollouts/a/b", True),
        ("/assets/x/y/z", True),
        ("/rollouts/a/b/c", False),
        ("//", False),
        ("/v1/runs", False),
        ("/v1", False),
        ("/metrics", False),
        ("/runsx", False),
        ("", True),
        ("/status", False),
        ("/start", False),
    ],
)
def test_only_pages_and_files_are_open(path: str, expected: bool) -> None:
    assert is_page(path) is expected
