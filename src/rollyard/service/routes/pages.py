"""The dashboard's page and its files. They contain no data: the page calls the API.

Every address of a view returns the same page, whose script shows the view. Files are read and compressed once, when
they are first requested. Only files of the package `rollyard.web` exist here: a name is looked up, never opened.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core.failure import NotFound

router = APIRouter(include_in_schema=False)

KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

VIEWS = (
    *("/", "/runs", "/runs/{run}", "/rollouts", "/rollouts/{run}/{id}", "/groups/{run}/{id}", "/draws"),
    *("/draws/{run}/{id}", "/evals", "/evals/compare", "/evals/{run}/{id}", "/engines", "/nodes"),
)
"""The addresses of views; `js/main.js` has the same."""

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)

HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",  # the browser asks whether its copy is current
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the dashboard."""

    data: bytes
    zipped: bytes
    kind: str
    tag: str


def is_page(path: str) -> bool:
    """Whether the path is a view or a file of the dashboard: those need no token."""
    first, *rest = path.removeprefix("/").split("/")
    if first == "assets":
        return True
    if not first:
        return not rest
    return first in _FIRST and len([part for part in rest if part]) <= 2


_FIRST = frozenset(view.split("/")[1] for view in VIEWS) - {""}


@cache
def assets() -> dict[str, Asset]:
    """All files, by their path below the package."""
    found: dict[str, Asset] = {}

    def add(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            name = prefix + entry.name
            kind = KINDS.get("." + entry.name.rpartition(".")[2])
            if entry.is_dir():
                add(entry, f"{name}/")
            elif kind is not None:
                data = entry.read_bytes()
                tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
                found[name] = Asset(data, gzip.compress(data, mtime=0), f"{kind}; charset=utf-8", tag)

    add(files("rollyard.web"), "")
    return found


async def _reply(request: Request, name: str) -> Response:
    asset = (assets() if assets.cache_info().currsize else await asyncio.to_thread(assets)).get(name)
    if asset is None:
        raise NotFound(f"the dashboard has no file {name[:100]!r}")
    headers = {**HEADERS, "etag": asset.tag, "vary": "accept-encoding"}
    if asset.tag in _items(request.headers.get("if-none-match", "").replace("W/", "")):
        return Response(status_code=304, headers=headers)
    if "gzip" in _items(request.headers.get("accept-encoding", "")):
        return Response(asset.zipped, headers={**headers, "content-encoding": "gzip"}, media_type=asset.kind)
    return Response(asset.data, headers=headers, media_type=asset.kind)


def _items(header: str) -> list[str]:
    """The items of a list in a header. One with a parameter, such as `gzip;q=0`, is not equal to its name."""
    return [item.strip() for item in header.split(",")]


@router.get("/assets/{name:path}")
async def asset(request: Request, name: str) -> Response:
    return await _reply(request, name)


async def page(request: Request) -> Response:
    return await _reply(request, "index.html")


for view in VIEWS:
    router.add_api_route(view, page, methods=["GET"])
    if view != "/":
        router.add_api_route(f"{view}/", page, methods=["GET"])
