"""A head with a real port and nodes that join it over HTTP: in this loop, where a test can disconnect them, or as
processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollyard.service.node import NodeOptions, run_node
from tests.service.site import Site, open_site

SIZES = {"init_slots": 2, "run_slots": 4, "eval_slots": 2, "ready_slots": 2}
NOWHERE = "http://127.0.0.1:9"


@asynccontextmanager
async def open_head(folder: Path, **values: Any) -> AsyncGenerator[Site, None]:
    """Opens a head; opening it again below the same folder is a restart."""
    chosen: dict[str, Any] = {"fleet": "nodes", "node_lease_s": 3, "node_hold_s": 60, **SIZES, **values}
    async with open_site(folder, **chosen) as site:
        yield site


def node_token(site: Site) -> str:
    return site.served.app_state.settings.node_token_path.read_text().strip()


@dataclass
class LoopNode:
    """A node in this loop. `cut` makes its calls fail, as if its network were down; `heal` reconnects it."""

    name: str
    options: NodeOptions
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    is_cut: bool = False
    url: str = ""
    token: str = ""

    def head(self) -> tuple[str, str]:
        return (NOWHERE if self.is_cut else self.url), self.token

    def goes_to(self, site: Site) -> None:
        self.url, self.token = site.url, node_token(site)


@asynccontextmanager
async def loop_node(site: Site, folder: Path, name: str, **sizes: Any) -> AsyncGenerator[LoopNode, None]:
    """The node has joined when the block starts, and leaves in order when it ends."""
    node = LoopNode(name, NodeOptions(name, "", "", folder / name, **sizes))
    node.goes_to(site)
    node.options = NodeOptions(name, site.url, node.token, folder / name, **sizes, head=node.head)
    running = asyncio.create_task(run_node(node.options, node.stop, on_joined=node.joined.set), name=f"node {name}")
    try:
        async with asyncio.timeout(90):
            joined = asyncio.create_task(node.joined.wait())
            await asyncio.wait({joined, running}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                joined.cancel()
                running.result()
        yield node
    finally:
        node.stop.set()
        node.is_cut = False
        async with asyncio.timeout(90):
            await running


class ProcessNode:
    """`rollyard node` in its own process: it can be killed and frozen."""

    def __init__(
        self,
        url: str,
        token_file: Path,
        folder: Path,
        name: str,
        *,
        within: Sequence[str] = (),
        is_plain: bool = False,
        **sizes: int,
    ) -> None:
        """`within` is a command that runs the node, in another network for example."""
        self.name = name
        self.folder = folder / name
        options = [f"--{key.replace('_', '-')}={value}" for key, value in sizes.items()]
        options += ["--plain-http"] if is_plain else []
        command = [sys.executable, "-m", "rollyard", "node", "--head", url, "--token-file", str(token_file)]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = (folder / f"{name}.log").open("ab")
        self.process = subprocess.Popen(
            [*within, *command, "--name", name, "--data-dir", str(self.folder), *options],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env={**os.environ, "HOME": str(folder)},
        )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self.log.close()


async def nodes_of(site: Site) -> dict[str, dict[str, Any]]:
    answer = await site.get("/v1/nodes")
    assert answer.status == 200, answer.body
    return {node["name"]: node for node in answer.body["nodes"]}


async def until(site: Site, *names: str) -> None:
    """Waits until exactly these nodes are connected."""
    async with asyncio.timeout(90):
        while set(await nodes_of(site)) != set(names):
            await asyncio.sleep(0.05)
