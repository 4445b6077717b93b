"""Nodes on a Ray cluster: one on each of its machines, for as long as the machine is there.

    async with RayHost("10.0.0.1:6379", "http://10.0.0.1:8700", token) as host:
        host.nodes()

Ray places nodes, watches and restarts them. Nothing of a rollout goes through it: a node talks to the head over HTTP,
as one does that `rollyard node` started. Ray itself is in a child process (`ray_driver.py` says why); this module never
imports it.

Invariants. At most one driver at a time; one that ends is started again, which finds the same nodes. Closing the host
leaves the nodes alone, so that a head can be restarted under them; `stop_nodes` ends them. On a cluster that the host
itself started (address None), they end with it. The driver never outlives this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import msgspec

from rollyard.core import Json
from rollyard.fleet.ray_messages import DriverConfig, DriverOrder, DriverReport, RayNode

__all__ = ["RayHost", "RayNode", "RayUnavailable"]

log = logging.getLogger("rollyard.fleet")

NODE_ENTRY = "rollyard.service.node:run_node"
"""What an actor runs, by name: that module is above this wing. Its `NodeOptions` stands beside it."""

START_S = 120.0
"""For the first look. Ray starts in 5 s, and takes 20 s to say that a token is wrong."""
CLOSE_S = 15.0
AGAIN_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Before a driver is started again, by how often in a row it ended without a look."""
STALE_S = 15.0
"""Without a look: Ray does not answer the driver."""
TAIL_BYTES = 4096
MAX_LINE_BYTES = 64 << 20

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # else a cluster that we start reports to Ray's makers
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run rollyard serve` ships this folder to all nodes
}
LOCAL = {
    # of a cluster that we start: at 95 % of the machine's memory Ray would end the node, with all its rollouts
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",  # else one idle Python process for each CPU; we need one in all
    "RAY_AUTH_MODE": "token",
}


class RayUnavailable(Exception):
    """There is no Ray, or it will not have us. The message says what to do."""


def driver_environment(address: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """With Ray's token authentication on: always for a cluster that we start, else where a token is set."""
    found = {**QUIET, **environ}
    has_token = bool(environ.get("RAY_AUTH_TOKEN") or environ.get("RAY_AUTH_TOKEN_PATH"))
    if address is None:
        found = {**found, **LOCAL}
        if not has_token:
            found["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    elif has_token:
        found.setdefault("RAY_AUTH_MODE", "token")
    return found


class RayHost:
    """See the module. `node_settings` are NodeOptions by name; what a node's own environment says goes before them, and
    what nobody says follows from the Ray node's CPUs and memory. A node that is there already keeps what it has."""

    def __init__(
        self,
        address: str | None,
        head_url: str,
        token: str,
        *,
        namespace: str = "rollyard",
        node_settings: Mapping[str, Json] | None = None,
        entry: str = NODE_ENTRY,
    ) -> None:
        if address is not None and "://" in address:
            raise RayUnavailable(f"{address}: give HOST:PORT of Ray's head, or auto; a Ray client's URL does not do")
        self._brief = DriverConfig(
            address=address,
            namespace=namespace,
            head_id=secrets.token_hex(8),
            head_url=head_url,
            token=token,
            entry=entry,
            settings=dict(node_settings or {}),
        )
        self._environment = driver_environment(address, os.environ)
        self._nodes: tuple[RayNode, ...] = ()
        self._looked_at_s: float | None = None
        self._error = ""
        self._first: asyncio.Future[None] | None = None
        self._stopped: asyncio.Future[DriverReport] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tending: asyncio.Task[None] | None = None
        self._is_closing = False
        self.driver_pid: int | None = None

    def nodes(self) -> list[RayNode]:
        """As the last look found them."""
        return list(self._nodes)

    @property
    def error(self) -> str:
        """Why `nodes` may be old; empty when all is well."""
        if self._error or self._looked_at_s is None:
            return self._error
        silent_s = asyncio.get_running_loop().time() - self._looked_at_s
        return f"Ray has not answered for {silent_s:.0f} s" if silent_s > STALE_S else ""

    async def __aenter__(self) -> Self:
        if importlib.util.find_spec("ray") is None:
            raise RayUnavailable("Ray is not installed: pip install 'rollyard[ray]'")
        if self._brief.address is not None and self._environment.get("RAY_AUTH_MODE") != "token":
            log.warning("Ray without a token: whoever reaches it can run code on all nodes (RAY_AUTH_MODE=token)")
        self._first = asyncio.get_running_loop().create_future()
        self._tending = asyncio.create_task(self._tend(), name="ray driver")
        try:
            await asyncio.wait((self._first, self._tending), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if not self._first.done():
                raise RayUnavailable(f"Ray did not answer within {START_S:g} s")
            self._first.result()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def stop_nodes(self, bound_s: float = 60.0) -> None:
        """Ends all nodes: each is asked to end what it has, and has `bound_s` for it. The host starts none any more."""
        if self._writer is None:
            raise RayUnavailable(f"no nodes were stopped: {self._error}")
        self._stopped = asyncio.get_running_loop().create_future()
        self._is_closing = True
        self._tell(DriverOrder("stop_nodes", bound_s))
        async with asyncio.timeout(bound_s + CLOSE_S):
            report = await self._stopped
        self._nodes = ()
        if report.error:
            log.warning("nodes did not end in time", extra={"told": report.error})

    async def _end(self) -> None:
        assert self._tending is not None
        self._is_closing = True
        if self._writer is not None:
            self._tell(DriverOrder("close"))
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(self._tending)
        except TimeoutError:
            self._tending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tending
        self._tending = None

    async def _tend(self) -> None:
        """Keeps a driver running until the host closes."""
        failures = 0
        while not self._is_closing:
            looked_before = self._looked_at_s
            last_words = await self._drive()
            if self._is_closing:
                break
            failures = failures + 1 if self._looked_at_s == looked_before else 0
            self._error = self._error or f"the Ray driver ended: {last_words or 'it did not say why'}"
            log.error("the Ray driver ended, it is started again", extra={"told": self._error})
            assert self._first is not None
            if not self._first.done():
                self._first.set_exception(RayUnavailable(self._error))
                return
            await asyncio.sleep(AGAIN_S[min(failures, len(AGAIN_S) - 1)])
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_exception(RayUnavailable("the Ray driver ended before it had stopped the nodes"))

    async def _drive(self) -> str:
        """One driver's whole life. Its last words."""
        ours, theirs = socket.socketpair()
        heard, said = socket.socketpair()
        with theirs, said:
            process = subprocess.Popen(  # noqa: ASYNC220 (a vfork; nothing is waited for)
                (sys.executable, "-P", "-m", "rollyard.fleet.ray_driver"),
                stdin=theirs.fileno(),
                stdout=said.fileno(),
                stderr=said.fileno(),
                env=self._environment,
                start_new_session=True,  # an interrupt at the terminal is the service's, which then closes us
            )
        self.driver_pid = process.pid
        tail = bytearray()
        ear: asyncio.StreamWriter | None = None
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
            printed, ear = await asyncio.open_connection(sock=heard)
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(_overhear(printed, tail))
                self._tell(self._brief)
                while (line := await reader.readline()).endswith(b"\n"):
                    self._take(msgspec.json.decode(line, type=DriverReport))
                listening.cancel()
        except* OSError as errors:
            log.debug("the Ray driver's line broke", extra={"error": str(errors.exceptions[0])})
        finally:
            for writer in (self._writer, ear):
                if writer is not None:
                    writer.transport.abort()
            self._writer = None
            await asyncio.shield(_ended(process, CLOSE_S if self._is_closing else 0.0))
            self.driver_pid = None
        lines = bytes(tail).decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    def _tell(self, what: DriverConfig | DriverOrder) -> None:
        assert self._writer is not None
        self._writer.write(msgspec.json.encode(what) + b"\n")

    def _take(self, report: DriverReport) -> None:
        loop = asyncio.get_running_loop()
        if report.what == "stopped":
            if self._stopped is not None and not self._stopped.done():
                self._stopped.set_result(report)
            return
        if report.error and report.error != self._error:
            log.error("Ray says", extra={"told": report.error})
        self._error = report.error
        if report.what == "superseded":
            self._nodes = ()
        elif report.what == "look":
            self._log_changes(report.nodes)
            self._nodes = report.nodes
            self._looked_at_s = loop.time()
        if report.what != "failed" and self._first is not None and not self._first.done():
            self._first.set_result(None)

    def _log_changes(self, nodes: tuple[RayNode, ...]) -> None:
        before = {node.ray_id: node for node in self._nodes}
        now = {node.ray_id: node for node in nodes}
        for ray_id in before.keys() - now.keys():
            log.warning("a machine has left the Ray cluster", extra={"node": before[ray_id].name})
        for ray_id, node in now.items():
            if ray_id not in before:
                log.info("a machine of the Ray cluster", extra={"node": node.name, "host": node.host})
            elif node.error and node.error != before[ray_id].error:
                log.warning("a node is not well", extra={"node": node.name, "error": node.error})


async def _ended(process: subprocess.Popen[bytes], bound_s: float) -> None:
    """A driver whose line is closed ends by itself; if it does not, it is ended."""
    try:
        await asyncio.to_thread(process.wait, bound_s)
    except subprocess.TimeoutExpired:
        process.kill()
        await asyncio.to_thread(process.wait)


async def _overhear(printed: asyncio.StreamReader, tail: bytearray) -> None:
    """Keeps the end of what Ray prints. Its processes inherit that line, so its end says nothing about the driver's."""
    while chunk := await printed.read(TAIL_BYTES):
        tail += chunk
        del tail[:-TAIL_BYTES]
        log.debug("Ray prints", extra={"text": chunk.decode(errors="replace")})
