"""The head's side of its nodes: who is there, what each was sent, what it wants, and when it counts as lost.

A node is there from its join until it leaves or is not heard of for `lease_s`; then its session is over for good, and
whatever it still says is answered with `NodeUnknown`. Under one name there is one session: a join with another one ends
it.

Invariants. What a node was sent and has not said to have `got` is sent again with the next orders. Numbers of orders
only rise in a node's life, whatever becomes of its heads: what it says to have got, it has. `want` counts places that
are neither filled nor promised. A head that stood still itself (stopped, starved) does not take its nodes for
lost: they could not have been heard.
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
from rollyard.store.codec import to_json

REPLACED = 256
"""Sessions that lost their name to another, of which so many are remembered, to be told so."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    lease_s: float = 30.0  # a node that is not heard of for so long is lost
    hold_s: float = 600.0  # so long a node keeps what it has when it finds no head
    poll_s: float = 10.0  # a poll is answered after so long, if only to say that there is nothing
    batch: int = 256  # rollouts leased in one transaction


@dataclass(eq=False, slots=True)
class ConnectedNode:
    """A node that is there."""

    name: str
    session: str
    host: str
    version: str
    heard_at: float
    joined_at: float = field(default_factory=time.time)
    standing: NodeStatus = field(default_factory=NodeStatus)
    room: NodeRoom = field(default_factory=NodeRoom)
    out: set[str] = field(default_factory=set[str])  # ids of what it has
    ended: int = 0  # rollouts that it has handed over
    promised: int = 0  # places of it whose leases are being written
    is_over: bool = False
    drain_asked: bool | None = None
    _runs: dict[str, Run] = field(default_factory=dict[str, Run])  # as it was told them
    _leases: dict[str, tuple[int, Lease]] = field(default_factory=dict[str, tuple[int, Lease]])  # with the orders that
    _cancels: list[tuple[int, Cancel]] = field(default_factory=list[tuple[int, Cancel]])  # they went in; 0: none yet
    _new_runs: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    _gates_sent: int = -1
    _gates_in: int = 0  # the orders that they went in
    _sent: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def heard_s_ago(self) -> float:
        return max(0.0, time.monotonic() - self.heard_at)

    @property
    def is_drained(self) -> bool:
        return self.standing.is_drained if self.drain_asked is None else self.drain_asked

    def anew(self, standing: NodeStatus) -> None:
        """It has joined, again maybe: what it may not have got is sent, in orders numbered on from its last."""
        self._sent = max(self._sent, standing.got)
        self._gates_sent = -1
        self.standing = standing
        self.stands(standing)
        self._leases = {name: (0, lease) for name, (_, lease) in self._leases.items()}
        self._cancels = [(0, cancel) for _, cancel in self._cancels]
        self._new_runs = [(0, run) for _, run in self._new_runs]

    def stands(self, standing: NodeStatus) -> None:
        """What it says of itself now. Its two loops have a connection each, so one's word may be overtaken by the
        other's, or by a join; then it is old, and what it wants has come meanwhile."""
        got = standing.got
        if not self.standing.got <= got <= self._sent:
            return
        if standing.gates < self.standing.gates:
            standing = msgspec.structs.replace(standing, gates=self.standing.gates)
        self.standing = standing
        self._leases = {name: entry for name, entry in self._leases.items() if entry[0] == 0 or entry[0] > got}
        self._cancels = [entry for entry in self._cancels if entry[0] == 0 or entry[0] > got]
        self._new_runs = [entry for entry in self._new_runs if entry[0] == 0 or entry[0] > got]
        if self.drain_asked is not None and standing.is_drained is self.drain_asked:
            self.drain_asked = None
        self.room.want = 0 if self.is_drained else max(0, standing.want - len(self._leases) - self.promised)
        self.room.reaches = frozenset(use.engine for use in standing.engines if use.is_reachable)
        live = standing.pools.get("live")
        self.room.places = live.size if live is not None else max(1, self.room.want + len(self.out))

    @property
    def unreachable(self) -> dict[str, str]:
        """Engines that it cannot use, and why."""
        return {use.engine: use.error or "not tried yet" for use in self.standing.engines if not use.is_reachable}

    def lease(self, rollout: Rollout, run: Run, queued_s: float = 0.0) -> None:
        self.out.add(rollout.id)
        if self._runs.get(run.id) != run:
            self._runs[run.id] = run
            self._new_runs.append((0, to_json(run)))
        self._leases[rollout.id] = (0, lease_of(rollout, queued_s))
        self.news.set()

    def is_sent(self, rollout_id: str) -> bool:
        """Whether it is on its way there: the node need not know of it yet."""
        return rollout_id in self._leases

    def cancel(self, key: Key, detail: str) -> None:
        self._cancels.append((0, Cancel(key, detail)))
        self.news.set()

    def drain(self, is_drained: bool) -> None:
        self.drain_asked = is_drained
        if is_drained:
            self.room.want = 0
        self.news.set()

    def orders(self, gates: WeightGates) -> Orders | None:
        """All that it has not got yet, under a new number; None: there is nothing new to say."""
        is_news = any(number == 0 for number, _ in (*self._leases.values(), *self._cancels))
        is_missing = bool(self._leases or self._cancels or self._new_runs) and self.standing.got < self._sent
        wants_gates = gates.number != self._gates_sent or self.standing.got < self._gates_in
        self.news.clear()
        if not is_news and not is_missing and not wants_gates and self.drain_asked is None:
            return None
        self._sent += 1
        number = self._sent
        self._leases = {name: (number, lease) for name, (_, lease) in self._leases.items()}
        self._cancels = [(number, cancel) for _, cancel in self._cancels]
        self._new_runs = [(number, run) for _, run in self._new_runs]
        if wants_gates:
            self._gates_sent, self._gates_in = gates.number, number
        return Orders(
            number,
            [lease for _, lease in self._leases.values()],
            [run for _, run in self._new_runs],
            [cancel for _, cancel in self._cancels],
            gates if wants_gates else None,
            self.drain_asked,
        )


class Nodes:
    """See the module. `on_lost` is told each node that is over; `on_room` that somebody may want more."""

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
        self._hungry: dict[int, ConnectedNode] = {}  # by the id of its room: all that want something, and some that did
        self._on_lost = on_lost
        self._on_room = on_room
        self._clock = clock
        self._looked_at = clock()
        self._replaced: dict[str, str] = {}
        self._changed: set[asyncio.Future[None]] = set()

    def join(self, join: Join) -> tuple[ConnectedNode, bool]:
        """The node, and whether it was there already. `NodeReplaced` if another has its name since."""
        if join.session in self._replaced:
            raise NodeReplaced(f"another process has joined as {self._replaced[join.session]!r} since")
        there = self.by_name.get(join.name)
        if there is not None and there.session == join.session:
            there.heard_at = self._clock()
            there.anew(join.standing)
            self._hungry[id(there.room)] = there
            self.tell()
            return there, True
        if there is not None:
            self._replaced[there.session] = join.name
            while len(self._replaced) > REPLACED:
                del self._replaced[next(iter(self._replaced))]
            self.lose(there, "was started again")
        node = ConnectedNode(join.name, join.session, join.host, join.version, self._clock())
        self.by_name[join.name] = self._by_session[join.session] = self._hungry[id(node.room)] = node
        return node, False

    def of(self, session: str, standing: NodeStatus) -> ConnectedNode:
        """The node of that session, which was heard of just now. `NodeUnknown`, `NodeReplaced`."""
        node = self._by_session.get(session)
        if node is not None:
            node.heard_at = self._clock()
            node.stands(standing)
            self._hungry[id(node.room)] = node
            self.tell()
            return node
        if session in self._replaced:
            raise NodeReplaced(f"another process has joined as {self._replaced[session]!r} since")
        raise NodeUnknown("this head does not know that node, or has taken it for lost")

    def named(self, name: str) -> ConnectedNode:
        if name not in self.by_name:
            raise NotFound(f"there is no node {name!r}")
        return self.by_name[name]

    def with_pool(self, name: str) -> Iterable[ConnectedNode]:
        return (node for node in self.by_name.values() if name in node.standing.pools)

    def lose(self, node: ConnectedNode, why: str) -> None:
        if node.is_over:
            return
        node.is_over = True
        node.news.set()
        self._by_session.pop(node.session, None)
        self._hungry.pop(id(node.room), None)
        if self.by_name.get(node.name) is node:
            del self.by_name[node.name]
        self._on_lost(node, why)
        self.tell()

    def look(self) -> None:
        """Ends the sessions of nodes that were not heard of for too long."""
        now, lease_s = self._clock(), self.settings.lease_s
        stood_still_s = now - self._looked_at
        self._looked_at = now
        for node in list(self.by_name.values()):
            if stood_still_s > lease_s / 2:
                node.heard_at = max(node.heard_at, now - lease_s / 2)
            elif now - node.heard_at > lease_s:
                self.lose(node, f"was not heard of for {now - node.heard_at:.1f} s")

    # --- places ---------------------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """By all of them. Asked for all the time: so it looks only at those that have spoken since they had enough."""
        for key in [key for key, node in self._hungry.items() if node.room.want <= 0]:
            del self._hungry[key]
        return sum(node.room.want for node in self._hungry.values())

    def wanted_for(self, engines: Collection[str]) -> int:
        """By those that can use one of these engines."""
        return sum(node.room.want for node in self._hungry.values() if node.room.serves(engines))

    def place(self, rollout: Rollout, engines: Collection[str] = ()) -> ConnectedNode | None:
        """A node for it, which can use one of these engines, if there are any. Its place is promised from now on, until
        the caller takes that back from `promised`."""
        needs = PlacementKeys.of(rollout)
        lost_at = {lost.node for lost in rollout.lost}
        shunned = [node.room for node in self._hungry.values() if node.name in lost_at] if lost_at else []
        room = place(needs, (node.room for node in self._hungry.values()), engines, shunned)
        if room is None:
            return None
        room.want -= 1
        room.remember(needs)
        node = self._hungry[id(room)]
        node.promised += 1
        return node

    # --- who waits ------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Something changed that somebody may wait for."""
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
        """Nodes that have not applied these gates yet."""
        return [node for node in self.by_name.values() if node.standing.gates < gates]
