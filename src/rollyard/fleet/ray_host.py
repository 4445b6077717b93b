"""Nodes on a Ray cluster: one on each of its machines, as long as the machine belongs to the cluster.

    async with RayHost("10.0.0.1:6379", "http://10.0.0.1:8700", token) as host:
        host.nodes()

Ray places nodes, watches and restarts them. No data of rollouts goes through it: a node calls the head over HTTP, like
one that `rollyard node` started. Ray itself is in a child process (`ray_driver.py` explains why); this module never
imports it.

Invariants. There is at most one driver at a time; one that ends is started again and finds the same nodes. Closing the
host leaves the nodes running, so that a head can be restarted; `stop_nodes` ends them. On a cluster that the host
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
"""What an actor runs, by name, because that module is in a higher layer. Its `NodeOptions` is in the same module."""

START_S = 120.0
"""Timeout of the first status. Ray starts in 5 s, and takes 20 s to report a wrong token."""
CLOSE_S = 15.0
AGAIN_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before a driver is started again, by how often in a row it ended without a status."""
STALE_S = 15.0
"""Seconds without a status after which Ray counts as not answering."""
TAIL_BYTES = 4096
MAX_LINE_BYTES = 64 << 20

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # otherwise a cluster that we start sends usage data to Ray's developers
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # otherwise `uv run rollyard serve` copies this folder to all nodes
}
LOCAL = {
    # for a cluster that we start: at 95 % of the machine's memory Ray would end the node, with all its rollouts
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",  # otherwise one idle Python process per CPU; one in all is enough
    "RAY_AUTH_MODE": "token",
}


class RayUnavailable(Exception):
    """Ray is missing or refuses the connection. The message contains what to do."""


def driver_environment(address: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the driver's environment, with Ray's token authentication on: always for a cluster that we start, else if
    a token is set."""
    environment = {**QUIET, **environ}
    has_token = bool(environ.get("RAY_AUTH_TOKEN") or environ.get("RAY_AUTH_TOKEN_PATH"))
    if address is None:
        environment = {**environment, **LOCAL}
        if not has_token:
            environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    elif has_token:
        environment.setdefault("RAY_AUTH_MODE", "token")
    return environment


class RayHost:
    """Keeps one node on every machine of a Ray cluster. `node_settings` are NodeOptions by name. A node's own
    environment has precedence, and what neither sets is derived from the Ray node's CPUs and memory. A running node
    keeps its settings."""

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
            raise RayUnavailable(f"{address}: give HOST:PORT of Ray's head, or auto; a Ray client's URL cannot be used")
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
        self._status_at_s: float | None = None
        self._error = ""
        self._first: asyncio.Future[None] | None = None
        self._stopped: asyncio.Future[DriverReport] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tending: asyncio.Task[None] | None = None
        self._is_closing = False
        self.driver_pid: int | None = None

    def nodes(self) -> list[RayNode]:
        """Returns the nodes as of the last status."""
        return list(self._nodes)

    @property
    def error(self) -> str:
        """Why `nodes` may be outdated; empty if they are not."""
        if self._error or self._status_at_s is None:
            return self._error
        silent_s = asyncio.get_running_loop().time() - self._status_at_s
        return f"Ray has not answered for {silent_s:.0f} s" if silent_s > STALE_S else ""

    async def __aenter__(self) -> Self:
        if importlib.util.find_spec("ray") is None:
            raise RayUnavailable("Ray is not installed: pip install 'rollyard[ray]'")
        if self._brief.address is not None and self._environment.get("RAY_AUTH_MODE") != "token":
            log.warning(
                "Ray has no token: every process that reaches it can run code on all nodes (RAY_AUTH_MODE=token)"
            )
        self._first = asyncio.get_running_loop().create_future()
        self._tending = asyncio.create_task(self._keep_driver_running(), name="ray driver")
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
        """Ends all nodes. Each has `bound_s` to end what it has. The host starts no more nodes."""
        if self._writer is None:
            raise RayUnavailable(f"no nodes were stopped: {self._error}")
        self._stopped = asyncio.get_running_loop().create_future()
        self._is_closing = True
        self._send(DriverOrder("stop_nodes", bound_s))
        async with asyncio.timeout(bound_s + CLOSE_S):
            report = await self._stopped
        self._nodes = ()
        if report.error:
            log.warning("nodes did not end in time", extra={"told": report.error})

    async def _end(self) -> None:
        assert self._tending is not None
        self._is_closing = True
        if self._writer is not None:
            self._send(DriverOrder("close"))
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(self._tending)
        except TimeoutError:
            self._tending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tending
        self._tending = None

    async def _keep_driver_running(self) -> None:
        """Keeps a driver running until the host closes."""
        failures = 0
        while not self._is_closing:
            status_before_s = self._status_at_s
            last_line = await self._drive()
            if self._is_closing:
                break
            failures = failures + 1 if self._status_at_s == status_before_s else 0
            self._error = self._error or f"the Ray driver ended: {last_line or 'it printed no reason'}"
            log.error("the Ray driver ended and is started again", extra={"told": self._error})
            assert self._first is not None
            if not self._first.done():
                self._first.set_exception(RayUnavailable(self._error))
                return
            await asyncio.sleep(AGAIN_S[min(failures, len(AGAIN_S) - 1)])
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_exception(RayUnavailable("the Ray driver ended before it had stopped the nodes"))

    async def _drive(self) -> str:
        """Runs one driver until it ends. Returns the last line that it printed."""
        own_socket, driver_socket = socket.socketpair()
        output_socket, driver_output = socket.socketpair()
        with driver_socket, driver_output:
            process = subprocess.Popen(  # noqa: ASYNC220 (a vfork; nothing is waited for)
                (sys.executable, "-P", "-m", "rollyard.fleet.ray_driver"),
                stdin=driver_socket.fileno(),
                stdout=driver_output.fileno(),
                stderr=driver_output.fileno(),
                env=self._environment,
                start_new_session=True,  # an interrupt at the terminal goes to the service, which closes this host
            )
        self.driver_pid = process.pid
        tail = bytearray()
        output_writer: asyncio.StreamWriter | None = None
        try:
            reader, self._writer = await asyncio.open_connection(sock=own_socket, limit=MAX_LINE_BYTES)
            output_reader, output_writer = await asyncio.open_connection(sock=output_socket)
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(_keep_tail(output_reader, tail))
                self._send(self._brief)
                while (line := await reader.readline()).endswith(b"\n"):
                    self._take(msgspec.json.decode(line, type=DriverReport))
                listening.cancel()
        except* OSError as errors:
            log.debug("the connection to the Ray driver broke", extra={"error": str(errors.exceptions[0])})
        finally:
            for writer in (self._writer, output_writer):
                if writer is not None:
                    writer.transport.abort()
            self._writer = None
            await asyncio.shield(_ended(process, CLOSE_S if self._is_closing else 0.0))
            self.driver_pid = None
        lines = bytes(tail).decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    def _send(self, what: DriverConfig | DriverOrder) -> None:
        assert self._writer is not None
        self._writer.write(msgspec.json.encode(what) + b"\n")

    def _take(self, report: DriverReport) -> None:
        loop = asyncio.get_running_loop()
        if report.what == "stopped":
            if self._stopped is not None and not self._stopped.done():
                self._stopped.set_result(report)
            return
        if report.error and report.error != self._error:
            log.error("Ray reports an error", extra={"told": report.error})
        self._error = report.error
        if report.what == "superseded":
            self._nodes = ()
        elif report.what == "status":
            self._log_changes(report.nodes)
            self._nodes = report.nodes
            self._status_at_s = loop.time()
        if report.what != "failed" and self._first is not None and not self._first.done():
            self._first.set_result(None)

    def _log_changes(self, nodes: tuple[RayNode, ...]) -> None:
        before = {node.ray_id: node for node in self._nodes}
        now = {node.ray_id: node for node in nodes}
        for ray_id in before.keys() - now.keys():
            log.warning("a machine has left the Ray cluster", extra={"node": before[ray_id].name})
        for ray_id, node in now.items():
            if ray_id not in before:
                log.info("a machine has joined the Ray cluster", extra={"node": node.name, "host": node.host})
            elif node.error and node.error != before[ray_id].error:
                log.warning("a node has an error", extra={"node": node.name, "error": node.error})


async def _ended(process: subprocess.Popen[bytes], bound_s: float) -> None:
    """Waits for a driver whose connection is closed to end by itself, and kills it if it does not."""
    try:
        await asyncio.to_thread(process.wait, bound_s)
    except subprocess.TimeoutExpired:
        process.kill()
        await asyncio.to_thread(process.wait)


async def _keep_tail(printed: asyncio.StreamReader, tail: bytearray) -> None:
    """Keeps the end of what Ray prints. Ray's processes inherit the connection: it may outlive the driver."""
    while chunk := await printed.read(TAIL_BYTES):
        tail += chunk
        del tail[:-TAIL_BYTES]
        log.debug("Ray prints", extra={"text": chunk.decode(errors="replace")})
