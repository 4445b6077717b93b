"""A Ray cluster in its own process, a node that only says hello, and the head that receives it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web

from rollyard.fleet.ray_host import RayHost

ENTRY = "tests.fleet.inside.ray_parts:run_node"
RAY_TOKEN = "0123456789abcdef" * 4
WITHIN_S = 60.0


class Cluster:
    """`ray_cluster.py`, in a process whose environment has Ray's token."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fleet.inside.ray_cluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._line()["address"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # what it started ends with this namespace
        self._process.communicate()

    def do(self, what: str, **how: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **how}) + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()) and not line.startswith("{"):
            pass  # Ray prints, too
        return json.loads(line)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Like the service's own."""

    name: str
    head_url: str
    token: str
    data_dir: Path
    init_slots: int | None = None
    run_slots: int | None = None
    eval_slots: int | None = None
    ready_slots: int | None = None
    head: Callable[[], tuple[str, str]] | None = None
    plain_http: bool = False


async def run_node(options: NodeOptions, stop: asyncio.Event) -> None:
    """Says hello to its head, which holds the request; reads the head's address again when it cannot be reached."""
    async with asyncio.TaskGroup() as group:
        greeting = group.create_task(_greet(options))
        await stop.wait()
        greeting.cancel()
    (options.data_dir / "ended in good order").touch()


async def _greet(options: NodeOptions) -> None:
    assert options.head is not None
    url, token = options.head_url, options.token
    hello = {"name": options.name, "pid": os.getpid(), "run_slots": options.run_slots, "folder": str(options.data_dir)}
    async with aiohttp.ClientSession() as http:
        while True:
            try:
                headers = {"Authorization": f"Bearer {token}"}
                async with http.post(f"{url}/hello", json=hello, headers=headers) as answer:
                    if answer.status == 200:
                        raise RuntimeError(await answer.text())
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
            url, token = options.head()


class Front:
    """The head's HTTP API, as far as these nodes need it: it holds every hello until it closes, or breaks the node."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.url = ""
        self.hellos: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.breaks = asyncio.Event()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/hello", self._hello)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def hello(self) -> dict[str, Any]:
        """Returns the next node that says hello."""
        async with asyncio.timeout(WITHIN_S):
            return await self.hellos.get()

    async def _hello(self, request: web.Request) -> web.Response:
        if request.headers["Authorization"] != f"Bearer {self.token}":
            return web.Response(status=401)
        self.hellos.put_nowait(await request.json())
        await self.breaks.wait()
        return web.Response(text="break, said the head")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():
            await asyncio.sleep(0.05)


async def wait_for_exit(pidfd: int) -> None:
    """Returns when that process has ended."""
    ready, _, _ = await asyncio.to_thread(select.select, [pidfd], [], [], WITHIN_S)
    os.close(pidfd)
    assert ready, "the process still runs"


def host_of(address: str | None, front: Front, **settings: int) -> RayHost:
    return RayHost(address, front.url, front.token, node_settings=settings, entry=ENTRY)


def alive(host: RayHost) -> set[str]:
    return {node.name for node in host.nodes() if node.is_alive}
