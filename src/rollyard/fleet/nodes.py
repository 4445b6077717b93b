"""The head's record of its nodes: which are connected, what each was sent, what it wants, and when it counts as lost.

A node is connected from its join until it leaves or makes no call for `lease_s`; then its session is over for good, and
later calls of it get `NodeUnknown`. A name has one session: a join with another session ends the first.

Invariants. What a node was sent and has not confirmed with `got` is sent again with the next orders. Order numbers only
rise during a node's life, even across heads, so what it confirms it has. `want` counts places that are neither filled
nor promised. A head that was suspended itself (stopped, starved) does not count its nodes as lost: it could not have
received their calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from rollyard.core import Rollout, Run
from rollyard.core.failure import NodeReplaced, NodeUnknown, NotFound
from rollyard.engines.weights.weight_gates import WeightGates
from rollyard.fleet.messages import Cancel, Join, Key, Lease, NodeStatus, Orders, lease_of
from rollyard.fleet.placement import NodeRoom, PlacementKeys, place
from rollyard.fleet.views import NodeViews, ViewPace
from rollyard.store.codec import to_json

REPLACED = 256
"""Number of remembered sessions whose name another session took; they are answered with `NodeReplaced`."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    lease_s: float = 30.0  # a node that makes no call for so long is lost
    hold_s: float = 600.0  # how long a node keeps what it has without a head
    poll_s: float = 10.0  # a poll is answered after so long, even without orders
    batch: int = 256  # rollouts leased in one transaction


@dataclass(eq=False, slots=True)
class ConnectedNode:
    """A connected node."""

    name: str
    session: str
    host: str
    version: str
    last_call_at: float
    has_orders: asyncio.Event
    views: NodeViews
    joined_at: float = field(default_factory=time.time)
    status: NodeStatus = field(default_factory=NodeStatus)
    room: NodeRoom = field(default_factory=NodeRoom)
    out: set[str] = field(default_factory=set[str])  # ids of the rollouts that it has
    ended: int = 0  # rollouts that it has handed over
    promised: int = 0  # its places whose leases are being written
    is_over: bool = False
    drain_asked: bool | None = None
    _runs: dict[str, Run] = field(default_factory=dict[str, Run])  # as sent to it
    # Each with the number of the orders that it was sent in; 0: not sent yet.
    _leases: dict[str, tuple[int, Lease]] = field(default_factory=dict[str, tuple[int, Lease]])
    _cancels: list[tuple[int, Cancel]] = field(default_factory=list[tuple[int, Cancel]])
    _new_runs: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    _gates_sent: int = -1
    _gates_in: int = 0  # the orders that they were sent in
    _sent: int = 0

    @property
    def heard_s_ago(self) -> float:
        return max(0.0, time.monotonic() - self.last_call_at)

    @property
    def is_drained(self) -> bool:
        return self.status.is_drained if self.drain_asked is None else self.drain_asked

    def rejoined(self, status: NodeStatus) -> None:
        """Handles a join: what the node may not have received is sent again, in orders numbered after its last."""
        self._sent = max(self._sent, status.got)
        self._gates_sent = -1
        self.status = status
        self.apply_status(status)
        self._leases = {name: (0, lease) for name, (_, lease) in self._leases.items()}
        self._cancels = [(0, cancel) for _, cancel in self._cancels]
        self._new_runs = [(0, run) for _, run in self._new_runs]

    def apply_status(self, status: NodeStatus) -> None:
        """Applies a status. The node's two loops use separate connections, so a status may arrive after a newer one or
        after a join. Then it is outdated and ignored."""
        got = status.got
        if not self.status.got <= got <= self._sent:
            return
        if status.gates < self.status.gates:
            status = msgspec.structs.replace(status, gates=self.status.gates)
        self.status = status
        self._leases = {name: entry for name, entry in self._leases.items() if entry[0] == 0 or entry[0] > got}
        self._cancels = [entry for entry in self._cancels if entry[0] == 0 or entry[0] > got]
        self._new_runs = [entry for entry in self._new_runs if entry[0] == 0 or entry[0] > got]
        if self.drain_asked is not None and status.is_drained is self.drain_asked:
            self.drain_asked = None
        self.room.want = 0 if self.is_drained else max(0, status.want - len(self._leases) - self.promised)
        self.room.reaches = frozenset(use.engine for use in status.engines if use.is_reachable)
        live = status.pools.get("live")
        self.room.places = live.size if live is not None else max(1, self.room.want + len(self.out))

    @property
    def unreachable(self) -> dict[str, str]:
        """Engines that it cannot use, and why."""
        return {use.engine: use.error or "not tried yet" for use in self.status.engines if not use.is_reachable}

    def lease(self, rollout: Rollout, run: Run, queued_s: float = 0.0) -> None:
        self.out.add(rollout.id)
        if self._runs.get(run.id) != run:
            self._runs[run.id] = run
            self._new_runs.append((0, to_json(run)))
        self._leases[rollout.id] = (0, lease_of(rollout, queued_s))
        self.has_orders.set()

    def is_sent(self, rollout_id: str) -> bool:
        """Whether the lease is being sent: the node may not have received it yet."""
        return rollout_id in self._leases

    def cancel(self, key: Key, detail: str) -> None:
        self._cancels.append((0, Cancel(key, detail)))
        self.has_orders.set()

    def drain(self, is_drained: bool) -> None:
        self.drain_asked = is_drained
        if is_drained:
            self.room.want = 0
        self.has_orders.set()

    def orders(self, gates: WeightGates) -> Orders | None:
        """Returns everything that the node has not confirmed, under a new number, or None if there is nothing new."""
        is_news = any(number == 0 for number, _ in (*self._leases.values(), *self._cancels))
        is_missing = bool(self._leases or self._cancels or self._new_runs) and self.status.got < self._sent
        sends_gates = gates.number != self._gates_sent or self.status.got < self._gates_in
        views = self.views.take()
        self.has_orders.clear()
        if not is_news and not is_missing and not sends_gates and self.drain_asked is None and not views:
            return None
        self._sent += 1
        number = self._sent
        self._leases = {name: (number, lease) for name, (_, lease) in self._leases.items()}
        self._cancels = [(number, cancel) for _, cancel in self._cancels]
        self._new_runs = [(number, run) for _, run in self._new_runs]
        if sends_gates:
            self._gates_sent, self._gates_in = gates.number, number
        return Orders(
            number,
            [lease for _, lease in self._leases.values()],
            [run for _, run in self._new_runs],
            [cancel for _, cancel in self._cancels],
            gates if sends_gates else None,
            self.drain_asked,
            views,
        )


class Nodes:
    """All connected nodes. `on_lost` is called with each node that is over, `on_room` when a node may want more."""

    def __init__(
        self,
        settings: FleetSettings,
        *,
        on_lost: Callable[[ConnectedNode, str], None],
        on_room: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.by_name: dict[str, ConnectedNode] = {}
        self._by_session: dict[str, ConnectedNode] = {}
        self._wanting: dict[int, ConnectedNode] = {}  # by the id of its room: all that want rollouts, and some that did
        self._on_lost = on_lost
        self._on_room = on_room
        self._clock = clock
        self._checked_at = clock()
        self._replaced: dict[str, str] = {}
        self._pace = ViewPace()
        self._changed: set[asyncio.Future[None]] = set()

    def join(self, join: Join) -> tuple[ConnectedNode, bool]:
        """Returns the node and whether it was connected. Raises `NodeReplaced` if another session has its name."""
        if join.session in self._replaced:
            raise NodeReplaced(f"another process has joined as {self._replaced[join.session]!r} since")
        there = self.by_name.get(join.name)
        if there is not None and there.session == join.session:
            there.last_call_at = self._clock()
            there.rejoined(join.status)
            self._wanting[id(there.room)] = there
            self.notify()
            return there, True
        if there is not None:
            self._replaced[there.session] = join.name
            while len(self._replaced) > REPLACED:
                del self._replaced[next(iter(self._replaced))]
            self.mark_lost(there, "was started again")
        has_orders = asyncio.Event()
        views = NodeViews(self._pace, has_orders, is_supported=join.sends_views)
        node = ConnectedNode(join.name, join.session, join.host, join.version, self._clock(), has_orders, views)
        self.by_name[join.name] = self._by_session[join.session] = self._wanting[id(node.room)] = node
        return node, False

    def record_call(self, session: str, status: NodeStatus) -> ConnectedNode:
        """Applies a call's status and returns the session's node. Raises `NodeUnknown` or `NodeReplaced`."""
        node = self.with_session(session)
        node.last_call_at = self._clock()
        node.apply_status(status)
        self._wanting[id(node.room)] = node
        self.notify()
        return node

    def with_session(self, session: str) -> ConnectedNode:
        """Returns the session's node. Raises `NodeUnknown` or `NodeReplaced`."""
        if session in self._by_session:
            return self._by_session[session]
        if session in self._replaced:
            raise NodeReplaced(f"another process has joined as {self._replaced[session]!r} since")
        raise NodeUnknown("this head does not know that node, or counts it as lost")

    def named(self, name: str) -> ConnectedNode:
        if name not in self.by_name:
            raise NotFound(f"there is no node {name!r}")
        return self.by_name[name]

    def with_pool(self, name: str) -> Iterable[ConnectedNode]:
        return (node for node in self.by_name.values() if name in node.status.pools)

    def mark_lost(self, node: ConnectedNode, why: str) -> None:
        if node.is_over:
            return
        node.is_over = True
        node.views.close()
        node.has_orders.set()
        self._by_session.pop(node.session, None)
        self._wanting.pop(id(node.room), None)
        if self.by_name.get(node.name) is node:
            del self.by_name[node.name]
        self._on_lost(node, why)
        self.notify()

    def end_silent(self) -> None:
        """Ends the sessions of nodes that made no call for too long."""
        now, lease_s = self._clock(), self.settings.lease_s
        stood_still_s = now - self._checked_at
        self._checked_at = now
        for node in list(self.by_name.values()):
            if stood_still_s > lease_s / 2:
                node.last_call_at = max(node.last_call_at, now - lease_s / 2)
            elif now - node.last_call_at > lease_s:
                self.mark_lost(node, f"made no call for {now - node.last_call_at:.1f} s")

    # --- places ---------------------------------------------------------------------------------------

    @property
    def free_places(self) -> int:
        """Rollouts that all nodes want. Read often, so it visits only nodes that have called since they wanted none."""
        for key in [key for key, node in self._wanting.items() if node.room.want <= 0]:
            del self._wanting[key]
        return sum(node.room.want for node in self._wanting.values())

    def free_places_for(self, engines: Collection[str]) -> int:
        """Rollouts wanted by the nodes that can use one of these engines."""
        return sum(node.room.want for node in self._wanting.values() if node.room.serves(engines))

    def place(self, rollout: Rollout, engines: Collection[str] = ()) -> ConnectedNode | None:
        """Chooses a node that can use one of these engines, if any are given. Its place is promised until the caller
        decrements `promised`."""
        needs = PlacementKeys.of(rollout)
        lost_at = {lost.node for lost in rollout.lost}
        avoided = [node.room for node in self._wanting.values() if node.name in lost_at] if lost_at else []
        room = place(needs, (node.room for node in self._wanting.values()), engines, avoided)
        if room is None:
            return None
        room.want -= 1
        room.remember(needs)
        node = self._wanting[id(room)]
        node.promised += 1
        return node

    # --- waiters --------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Wakes the waiters for a change."""
        for waiter in self._changed:
            if not waiter.done():
                waiter.set_result(None)
        self._on_room()

    async def changed(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed.add(waiter)
        try:
            await waiter
        finally:
            self._changed.discard(waiter)

    def behind(self, gates: int) -> Iterable[ConnectedNode]:
        """Returns the nodes that have not applied these gates yet."""
        return [node for node in self.by_name.values() if node.status.gates < gates]
