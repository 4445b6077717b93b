"""Hollow nodes: many nodes of a fleet in one process, which take leases and send results, and run nothing.

    python -m bench._fleet_hollow        (`HollowPlan` as JSON on standard input; it exits when that closes)

To the head they look like real nodes: they send the same structs (`fleet.messages`) over two connections, a long poll
and a report whenever there is news. Each rollout moves through READY and RUN, saves a trace at the end of RUN, and ends
after EVAL; some leases wait for a slot. They have almost no cost of their own, so that the head is measured. Every
TELL_S they print their progress (`Tally`), including bytes of HTTP.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
import uvloop

from bench._fleet_parts import Result
from bench._load import Line
from rollyard.core import Position, State
from rollyard.core.version import __version__
from rollyard.fleet.messages import (
    MEDIA_TYPE,
    PROTOCOL,
    Ended,
    EngineUse,
    Item,
    Join,
    Joined,
    Key,
    Moved,
    NodeStatus,
    Orders,
    Poll,
    PoolUse,
    Report,
    Reported,
    Saved,
    decode,
    encode,
)

PRINT_S = 0.2
MOST_ITEMS = 512  # in one report, as in a real node

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HollowPlan:
    """`slots` and `ahead` are per node. With `hold_s` 0 everything ends immediately."""

    url: str
    token: str
    first: int  # nodes are numbered from here
    nodes: int
    slots: int
    ahead: int
    hold_s: float = 0.0
    eval_s: float = 0.0
    poll_s: float = 10.0


@dataclass(slots=True)
class Tally:
    """The progress of one process of hollow nodes."""

    at_s: float = 0.0
    joined: int = 0
    ended: int = 0
    refused: int = 0
    calls: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    cpu_s: float = 0.0


class _Brief(msgspec.Struct):
    """The fields of a leased rollout that a hollow node reads."""

    id: str
    position: Position


_BRIEFS = msgspec.json.Decoder(_Brief)


class HeadLine(Line):
    """A connection to the head that counts its bytes."""

    def aim(self, url: str, token: str, tally: Tally) -> None:
        host = urlsplit(url).netloc
        self._head = f"Host: {host}\r\nAuthorization: Bearer {token}\r\nContent-Type: {MEDIA_TYPE}\r\n"
        self._tally = tally

    async def call(self, path: str, message: msgspec.Struct, kind: type[T]) -> T:
        assert self._transport is not None
        body = encode(message)
        head = f"POST /v1/fleet/{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n".encode()
        self._got.clear()
        self._head_end = -1
        self._response = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        status, answer = await self._response
        self._tally.calls += 1  # after the response, as for endings: a window must not count one without the other
        self._tally.bytes_out += len(head) + len(body)
        if status != 200:
            raise RuntimeError(f"the head returned {status} for {path}: {answer[:500]!r}")
        return decode(answer, kind)

    def data_received(self, data: bytes) -> None:
        self._tally.bytes_in += len(data)
        super().data_received(data)


@dataclass(eq=False)
class HollowNode:
    name: str
    plan: HollowPlan
    result: Result
    tally: Tally
    got: int = 0
    gates: int = -1
    engines: list[EngineUse] = field(default_factory=list[EngineUse])  # all known engines; they are not used
    leased: int = 0
    running: int = 0
    started_count: int = 0
    waiting: deque[Key] = field(default_factory=deque[Key])
    outbox: deque[Item] = field(default_factory=deque[Item])
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def main(self) -> None:
        plan = self.plan
        polls, reports = await HeadLine.open(plan.url), await HeadLine.open(plan.url)
        assert isinstance(polls, HeadLine) and isinstance(reports, HeadLine)
        for line in (polls, reports):
            line.aim(plan.url, plan.token, self.tally)
        session = f"{self.name}-{os.getpid()}"
        await polls.call("join", Join(PROTOCOL, __version__, self.name, session, "bench", [], self._standing()), Joined)
        self.tally.joined += 1
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll(polls, session))
            group.create_task(self._report(reports, session))

    async def _poll(self, line: HeadLine, session: str) -> None:
        while True:
            orders = await line.call(f"poll?wait_s={self.plan.poll_s:g}", Poll(session, self._standing()), Orders)
            self.got = orders.number
            if orders.gates is not None and orders.gates.number > self.gates:
                self.gates = orders.gates.number
                self.engines = [EngineUse(spec.id, 0, 0, 0) for spec in orders.gates.specs]
                self.news.set()
            for lease in orders.leases:
                brief = _BRIEFS.decode(lease.rollout)
                self.waiting.append(Key(brief.id, brief.position.attempt))
            self.leased += len(orders.leases)
            self._start()

    async def _report(self, line: HeadLine, session: str) -> None:
        while True:
            await self.news.wait()
            self.news.clear()
            items = [self.outbox.popleft() for _ in range(min(MOST_ITEMS, len(self.outbox)))]
            if self.outbox:
                self.news.set()
            answer = await line.call("report", Report(session, self._standing(), items), Reported)
            ended = sum(isinstance(item, Ended) for item in items)
            self.tally.refused += len(answer.refused)
            self.tally.ended += ended
            self.leased -= ended
            if ended and not self.plan.hold_s:
                self.news.set()  # report the free places to the head

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        plan = self.plan
        while self.waiting and self.running < plan.slots:
            key = self.waiting.popleft()
            self.running += 1
            self.started_count += 1
            self._enqueue(Moved(key, State.READY))
            self._enqueue(Moved(key, State.RUN))
            if plan.hold_s:
                loop.call_later(plan.hold_s * _share(self.started_count <= plan.slots), self._run_over, key)
            else:
                loop.call_soon(self._run_over, key)

    def _run_over(self, key: Key) -> None:
        self.running -= 1
        data = self.result.encoded(key.id, key.attempt)
        self._enqueue(Saved(key, data, self.result.sampled_tokens, self.result.info, []))
        ended = Ended(key, self.result.ending, None, 0)
        if self.plan.eval_s:
            asyncio.get_running_loop().call_later(self.plan.eval_s, self._enqueue, ended)
        else:
            self._enqueue(ended)
        self._start()

    def _enqueue(self, item: Item) -> None:
        self.outbox.append(item)
        self.news.set()

    def _standing(self) -> NodeStatus:
        plan = self.plan
        places = plan.slots + plan.ahead
        requested = max(0, min(places - self.running - len(self.waiting), 2 * places - self.leased))
        pools = {
            "init": PoolUse(plan.ahead, 0, 0),
            "run": PoolUse(plan.slots, self.running, 0),
            "eval": PoolUse(plan.slots, 0, 0),
            "ready": PoolUse(plan.ahead, 0, 0),
            "live": PoolUse(2 * places, self.leased, 0),
            "queue": PoolUse(100_000, len(self.waiting), 0),
        }
        return NodeStatus(self.got, requested, self.gates, False, pools, self.engines)


def _share(is_first: bool) -> float:
    """Returns a factor for `hold_s`, from 0.75 to 1.25. The first rollouts get the remaining time of a rollout that is
    observed at a random moment of a steady state (longer ones are observed more often, each moment equally often), so
    that the rate of endings is constant from the start."""
    if not is_first:
        return random.uniform(0.75, 1.25)
    return random.random() * math.sqrt(random.uniform(0.75**2, 1.25**2))


async def main() -> None:
    tally, result = Tally(), Result()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    plan = msgspec.json.decode(await reader.readline(), type=HollowPlan)
    nodes = [HollowNode(f"hollow-{plan.first + index}", plan, result, tally) for index in range(plan.nodes)]
    working = [asyncio.create_task(node.main()) for node in nodes]
    printing = asyncio.create_task(_print_tally(tally))
    over = asyncio.create_task(reader.read())
    done, _ = await asyncio.wait({*working, printing, over}, return_when=asyncio.FIRST_COMPLETED)
    over.cancel()
    for task in (*working, printing):
        task.cancel()
    await asyncio.gather(*working, printing, return_exceptions=True)
    for task in done - {over}:
        task.result()


async def _print_tally(tally: Tally) -> None:
    while True:
        tally.at_s, tally.cpu_s = time.monotonic(), time.process_time()
        sys.stdout.write(msgspec.json.encode(tally).decode() + "\n")
        sys.stdout.flush()
        await asyncio.sleep(PRINT_S)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
