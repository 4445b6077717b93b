"""A head and its nodes in one process, joined as in a fleet but without a network: gates are encoded and decoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import msgspec

from rollyard.engines import Health, Router, RouterSettings
from rollyard.engines.routing.follower_router import FollowerRouter
from rollyard.engines.weights.weight_gates import WeightGates
from tests.engines.parts import QUICK


class Node:
    """A following router. While it is blocked, it receives nothing."""

    def __init__(self, fleet: Fleet, router: FollowerRouter) -> None:
        self.router = router
        self.is_blocked = False
        self.applied = -1
        self._fleet = fleet
        self._sent: WeightGates | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    def send(self, gates: WeightGates) -> None:
        if self.is_blocked or self._sent == gates:
            return
        self._sent = gates
        task = asyncio.create_task(
            self._follow(msgspec.msgpack.decode(msgspec.msgpack.encode(gates), type=WeightGates))
        )
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _follow(self, gates: WeightGates) -> None:
        await self.router.follow(gates)
        self.applied = max(self.applied, gates.number)
        self._fleet.notify()

    def release(self) -> None:
        self.is_blocked = False
        self.send(self._fleet.head.gates())

    async def up(self, *ids: str) -> None:
        """Waits until exactly these engines are up at this node."""
        async with asyncio.timeout(90):
            while {s.spec.id for s in self.router.list() if s.health is Health.UP} != set(ids):
                await asyncio.sleep(0.005)


class Fleet:
    """All nodes of a head: its `Followers`."""

    def __init__(self, head: Router) -> None:
        self.head = head
        self.nodes: list[Node] = []
        self.waiting = 0
        self._changed: set[asyncio.Future[None]] = set()
        head.followers = self
        head.on_gates.append(self._push)

    async def settled(self) -> None:
        number = self.head.gates().number
        self.waiting += 1
        self.notify()
        try:
            while any(node.applied < number for node in self.nodes):
                await self._next()
        finally:
            self.waiting -= 1

    def lose(self, node: Node) -> None:
        self.nodes.remove(node)
        self.notify()

    async def is_waited_for(self) -> None:
        """Waits until the head waits for its nodes. Times out if it does not."""
        await self.until(lambda: self.waiting > 0)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(90):
            while not is_so():
                await self._next()

    def notify(self) -> None:
        for waiter in self._changed:
            if not waiter.done():
                waiter.set_result(None)

    def _push(self) -> None:
        gates = self.head.gates()
        for node in self.nodes:
            node.send(gates)

    async def _next(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed.add(waiter)
        try:
            await waiter
        finally:
            self._changed.discard(waiter)

    @asynccontextmanager
    async def node(self, settings: RouterSettings = QUICK, *, must_be_up: bool = True) -> AsyncGenerator[Node, None]:
        """Joins a node and, with `must_be_up`, waits until all engines that are up at the head are up there."""
        async with FollowerRouter(settings) as router:
            node = Node(self, router)
            self.nodes.append(node)
            node.send(self.head.gates())
            await self.until(lambda: node.applied >= 0)
            if must_be_up:
                await node.up(*(s.spec.id for s in self.head.list() if s.health is Health.UP))
            try:
                yield node
            finally:
                if node in self.nodes:
                    self.lose(node)
                for task in list(node.tasks):
                    task.cancel()
                    await asyncio.wait({task})
