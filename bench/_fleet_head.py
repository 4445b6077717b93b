"""Measures one head with hollow nodes: at saturation, at half of that, and idle with only polls.

The head is a separate process, `rollyard serve --fleet nodes`; its CPU time is read from /proc. Rollouts are queued
before the nodes join, which is measured separately, so a figure per rollout covers leasing, moving, saving and ending.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench._fleet_hollow import HollowPlan, Tally
from bench._fleet_parts import math_task
from bench.processes import module_argv
from rollyard.cli._console import CommandError
from rollyard.cli._deadline import within
from rollyard.cli.rig import Meter, Served, machine_busy_s, service, stop
from rollyard.client import AsyncClient
from rollyard.core import Json

PAGE = 1_000
WITHIN_S = 120.0

AHEAD = 16
"""Leases that wait for a slot on a node: the default of READY. A real node also has leases that wait for INIT."""


@dataclass(frozen=True, slots=True)
class Load:
    """The hollow nodes, in all processes together."""

    nodes: int = 64
    slots: int = 8
    ahead: int = 2
    hold_s: float = 0.0
    eval_s: float = 0.0
    poll_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Window:
    """The figures of one time window."""

    took_s: float
    ended: int
    calls: int
    bytes: int
    head_cpu_s: float
    nodes_cpu_s: float
    busy_s: float

    @property
    def per_s(self) -> float:
        return self.ended / self.took_s


@dataclass(slots=True)
class Head:
    """A running head with queued rollouts."""

    served: Served
    token: str  # for nodes
    meter: Meter
    queued: int
    submit_cpu_ms: float = 0.0  # CPU time of the head, per rollout


@asynccontextmanager
async def open_head(queued: int, store: str | None = None) -> AsyncGenerator[Head, None]:
    settings: dict[str, Json] = {
        "fleet": "nodes",
        "runtimes": ["local"],
        "max_queued": max(1, queued),
        **({"store": store} if store else {}),
    }
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as name:
        async with service(Path(name), settings) as served:
            token = (Path(name) / "data" / "node-token").read_text().strip()
            head = Head(served, token, Meter(served.process.pid), queued)
            async with AsyncClient(served.url, served.token) as client:
                before_s = head.meter.cpu_s()
                for start in range(0, queued, PAGE):
                    await client.submit([math_task(number) for number in range(start, min(start + PAGE, queued))])
                head.submit_cpu_ms = 1000 * (head.meter.cpu_s() - before_s) / max(1, queued)
            try:
                yield head
            finally:
                with suppress(ProcessLookupError):
                    served.process.kill()  # queued rollouts are discarded
                await served.process.wait()


class Nodes:
    """The processes of hollow nodes, and the last tally of each."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._tallies: list[Tally] = []
        self._news = asyncio.Event()
        self._error = ""

    @property
    def ended(self) -> int:
        return sum(tally.ended for tally in self._tallies)

    @property
    def joined(self) -> int:
        return sum(tally.joined for tally in self._tallies)

    async def listen(self, process: asyncio.subprocess.Process) -> None:
        """Reads the tallies of one process until it ends."""
        assert process.stdout is not None
        place = len(self._tallies)
        self._tallies.append(Tally())
        async for line in process.stdout:
            self._tallies[place] = msgspec.json.decode(line, type=Tally)
            self._news.set()
        self._error = "a process of hollow nodes has ended; its output is above"
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until `holds` returns True, called at each new tally."""
        while not holds():
            self._news.clear()
            await self._news.wait()
            if self._error:
                raise CommandError(self._error)

    async def window(self, is_over: Callable[[], bool]) -> Window:
        """Measures from now until `is_over` returns True."""
        before, started_at = list(self._tallies), time.monotonic()
        head_cpu_s, busy_s = self._head.meter.cpu_s(), machine_busy_s()
        await self.until(is_over)
        took_s = time.monotonic() - started_at
        if any(tally.refused for tally in self._tallies):
            raise CommandError(
                "the head refused reports of hollow nodes", "it has released their leases: is the machine idle?"
            )

        def more(count: Callable[[Tally], float]) -> float:
            return sum(map(count, self._tallies)) - sum(map(count, before))

        return Window(
            took_s,
            int(more(lambda tally: tally.ended)),
            int(more(lambda tally: tally.calls)),
            int(more(lambda tally: tally.bytes_in + tally.bytes_out)),
            self._head.meter.cpu_s() - head_cpu_s,
            more(lambda tally: tally.cpu_s),
            machine_busy_s() - busy_s,
        )


@asynccontextmanager
async def hollow_nodes(head: Head, load: Load) -> AsyncGenerator[Nodes, None]:
    """Starts the hollow nodes and waits until all have joined."""
    nodes = Nodes(head)
    count = min(load.nodes, max(1, len(os.sched_getaffinity(0)) - 1))  # one core is for the head
    processes: list[asyncio.subprocess.Process] = []
    listening: list[asyncio.Task[None]] = []
    try:
        for number in range(count):
            first, beyond = load.nodes * number // count, load.nodes * (number + 1) // count
            sizes = (load.slots, load.ahead, load.hold_s, load.eval_s, load.poll_s)
            plan = HollowPlan(head.served.url, head.token, first, beyond - first, *sizes)
            process = await asyncio.create_subprocess_exec(
                *module_argv("_fleet_hollow"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            processes.append(process)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(plan) + b"\n")
            listening.append(asyncio.create_task(nodes.listen(process)))
        async with within(WITHIN_S, "starting hollow nodes", lambda: f"{load.nodes} to join; {nodes.joined} have"):
            await nodes.until(lambda: nodes.joined == load.nodes)
        yield nodes
    finally:
        for task in listening:
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)
        for process in processes:
            await stop(process)


async def at_saturation(queued: int, load: Load, store: str | None = None) -> tuple[Window, Head]:
    """Measures from a tenth of the queue to nine tenths: the steady state."""
    last = queued * 9 // 10
    async with (
        open_head(queued, store) as head,
        hollow_nodes(head, load) as nodes,
        within(WITHIN_S, "saturating the head", lambda: f"{last} rollouts; {nodes.ended} ended"),
    ):
        await nodes.until(lambda: nodes.ended >= queued // 10)
        return await nodes.window(lambda: nodes.ended >= last), head


async def at_rate(per_s: float, *, nodes: int, hold_s: float, window_s: float) -> tuple[Window, float]:
    """Measures nodes whose slots, all filled, end about `per_s` rollouts a second. Also returns the exact rate."""
    slots = max(1, round(per_s * hold_s / nodes))
    offered = nodes * slots / hold_s
    load = Load(nodes, slots, AHEAD, hold_s, eval_s=0.2)
    warm_s = 2 * hold_s + nodes * (slots + AHEAD) / per_s  # the first leases are all requested at once
    queued = int(nodes * (slots + load.ahead) + 1.2 * offered * (warm_s + window_s))
    limit_s = WITHIN_S + warm_s + window_s
    async with (
        open_head(queued) as head,
        hollow_nodes(head, load) as hollow,
        within(limit_s, f"loading the head with {per_s:g} rollouts/s", "reports of its nodes"),
    ):
        await hollow.until(_passed(warm_s))
        return await hollow.window(_passed(window_s)), offered


async def idle(nodes: int, window_s: float) -> Window:
    """Measures idle polls, as fast as possible."""
    async with open_head(0) as head, hollow_nodes(head, Load(nodes, poll_s=0.0)) as hollow:
        return await hollow.window(_passed(window_s))


def _passed(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until
