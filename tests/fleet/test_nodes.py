"""The head's record of its nodes: what is sent until it is confirmed, and which nodes count as lost. No network."""

import pytest

from rollyard.core import Rollout, Run, Task
from rollyard.core.failure import NodeReplaced, NodeUnknown, NotFound
from rollyard.engines.weights.weight_gates import WeightGates
from rollyard.fleet.messages import PROTOCOL, Join, Key, NodeStatus, Orders, PoolUse, decode, encode, rollout_of, run_of
from rollyard.fleet.nodes import REPLACED, ConnectedNode, FleetSettings, Nodes

LEASE_S = 10.0
RUN = Run("run")
GATES = WeightGates(7)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Site:
    """Nodes with a clock that a test moves."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.lost: list[tuple[str, str]] = []
        self.nodes = Nodes(
            FleetSettings(lease_s=LEASE_S),
            on_lost=lambda node, why: self.lost.append((node.session, why)),
            on_room=lambda: None,
            clock=self.clock,
        )

    def join(self, name: str = "n1", session: str = "s1", status: NodeStatus | None = None) -> ConnectedNode:
        status = status or NodeStatus(want=4)
        node, was_there = self.nodes.join(Join(PROTOCOL, "0", name, session, "host", [], status))
        if not was_there:
            node.rejoined(status)
        return node

    def look_after(self, *pauses_s: float) -> None:
        for pause_s in pauses_s:
            self.clock.now += pause_s
            self.nodes.end_silent()


def rollout(name: str = "r1") -> Rollout:
    return Rollout(name, "run", Task("shell"))


def orders_of(node: ConnectedNode, gates: WeightGates = GATES) -> Orders:
    orders = node.orders(gates)
    assert orders is not None
    return orders


def ids(orders: Orders) -> list[str]:
    return [rollout_of(lease).id for lease in orders.leases]


# --- orders


async def test_orders_are_sent_again_until_confirmed() -> None:
    node = Site().join()
    node.lease(rollout(), RUN)
    node.cancel(Key("r0", 1), "asked")
    first = orders_of(node)
    assert ids(first) == ["r1"] and [run_of(run) for run in first.runs] == [RUN] and first.gates == GATES
    assert [cancel.key.id for cancel in first.cancels] == ["r0"]
    node.apply_status(NodeStatus(got=0, want=4))  # it polls again without having received them: the answer was lost
    again = orders_of(node)
    assert again.number > first.number
    assert (ids(again), again.runs, again.cancels, again.gates) == (["r1"], first.runs, first.cancels, GATES)
    node.apply_status(NodeStatus(got=again.number, want=3))
    assert node.orders(GATES) is None


async def test_gates_alone_are_sent_again_too() -> None:
    node = Site().join()
    first = orders_of(node)
    assert first.gates == GATES and not first.leases
    node.apply_status(NodeStatus(got=0))
    again = orders_of(node)
    assert again.gates == GATES
    node.apply_status(NodeStatus(got=again.number))
    assert node.orders(GATES) is None
    assert orders_of(node, WeightGates(8)).gates == WeightGates(8)


async def test_a_run_is_sent_once() -> None:
    node = Site().join()
    node.lease(rollout("r1"), RUN)
    first = orders_of(node)
    node.apply_status(NodeStatus(got=first.number))
    node.lease(rollout("r2"), RUN)
    second = orders_of(node)
    assert ids(second) == ["r2"] and second.runs == [] and second.gates is None


async def test_a_changed_run_is_sent_again_with_integers_of_any_size() -> None:
    node = Site().join()
    node.lease(rollout("r1"), RUN)
    node.apply_status(NodeStatus(got=orders_of(node).number))
    recreated_run = Run(RUN.id, policy="another", defaults={"data": {"n": 2**70}})
    node.lease(rollout("r2"), recreated_run)
    sent = decode(encode(orders_of(node)), Orders)
    assert [run_of(run) for run in sent.runs] == [recreated_run]


async def test_a_drain_is_sent_until_confirmed() -> None:
    node = Site().join()
    node.apply_status(NodeStatus(got=orders_of(node).number, want=4))
    node.drain(True)
    assert node.room.want == 0 and node.is_drained
    assert orders_of(node).is_drained is True
    node.apply_status(NodeStatus(got=node.status.got, want=4))
    assert node.room.want == 0 and orders_of(node).is_drained is True
    node.apply_status(NodeStatus(got=node.status.got, want=0, is_drained=True))
    assert node.drain_asked is None and node.is_drained
    node.drain(False)
    assert orders_of(node).is_drained is False


# --- joining again


async def test_a_node_that_joins_again_gets_unconfirmed_orders_under_higher_numbers() -> None:
    site = Site()
    node = site.join()
    node.lease(rollout("r1"), RUN)
    got = orders_of(node).number
    node.apply_status(NodeStatus(got=got, want=3))
    node.lease(rollout("r2"), RUN)
    node.lease(rollout("r3"), Run("other"))
    missed = orders_of(node)
    assert site.join(status=NodeStatus(got=got, want=1)) is node
    again = orders_of(node)
    assert again.number > missed.number, "so a confirmation of an earlier answer does not confirm this one"
    assert sorted(ids(again)) == ["r2", "r3"] and [run_of(run).id for run in again.runs] == ["other"]
    assert again.gates == GATES


async def test_order_numbers_continue_from_those_of_an_earlier_head() -> None:
    """A call from before the join that arrives after it must not confirm what was sent since."""
    node = Site().join(status=NodeStatus(got=40, want=4))
    node.lease(rollout(), RUN)
    sent = orders_of(node)
    assert sent.number > 40
    node.apply_status(NodeStatus(got=40, want=4))
    assert ids(orders_of(node)) == ["r1"]


async def test_a_lease_counts_as_sent_until_confirmed() -> None:
    node = Site().join()
    node.lease(rollout(), RUN)
    assert node.is_sent("r1")
    number = orders_of(node).number
    assert node.is_sent("r1")
    node.apply_status(NodeStatus(got=number))
    assert not node.is_sent("r1") and node.out == {"r1"}


# --- places


async def test_promised_places_are_not_assigned_twice() -> None:
    site = Site()
    node = site.join(status=NodeStatus(want=2, pools={"live": PoolUse(8, 0, 0)}))
    assert site.nodes.place(rollout("r1")) is node and site.nodes.free_places == 1
    site.nodes.record_call("s1", NodeStatus(want=2))  # sent before it received the lease
    assert site.nodes.free_places == 1
    node.lease(rollout("r1"), RUN)
    node.promised -= 1
    site.nodes.record_call("s1", NodeStatus(want=2))
    assert site.nodes.free_places == 1, "the lease is being sent"
    number = orders_of(node).number
    site.nodes.record_call("s1", NodeStatus(got=number, want=1))
    assert site.nodes.free_places == 1
    assert site.nodes.place(rollout("r2")) is node
    assert site.nodes.place(rollout("r3")) is None


async def test_an_outdated_status_is_ignored() -> None:
    node = Site().join()
    node.lease(rollout(), RUN)
    number = orders_of(node).number
    node.apply_status(NodeStatus(got=number, want=0, gates=7))
    node.apply_status(NodeStatus(got=0, want=4, gates=-1))
    assert node.room.want == 0 and node.status.gates == 7
    assert node.orders(GATES) is None


# --- connected nodes


async def test_a_silent_node_is_lost_for_good() -> None:
    site = Site()
    site.join("n1", "s1")
    site.join("n2", "s2")
    site.look_after(*[LEASE_S / 10] * 8)
    site.nodes.record_call("s2", NodeStatus())
    site.look_after(*[LEASE_S / 10] * 3)
    assert [session for session, _ in site.lost] == ["s1"] and list(site.nodes.by_name) == ["n2"]
    with pytest.raises(NodeUnknown):
        site.nodes.record_call("s1", NodeStatus())
    with pytest.raises(NotFound):
        site.nodes.named("n1")
    assert site.join("n1", "s1").session == "s1", "it may join again with what it holds"
    assert len(site.lost) == 1


async def test_a_suspended_head_loses_no_node() -> None:
    site = Site()
    site.join()
    site.look_after(LEASE_S / 10, 5 * LEASE_S)
    assert site.lost == []
    site.look_after(*[LEASE_S / 10] * 4)
    assert site.lost == []
    site.look_after(*[LEASE_S / 10] * 2)
    assert [session for session, _ in site.lost] == ["s1"], "but it must call soon"


async def test_a_name_has_one_session() -> None:
    site = Site()
    old = site.join("n1", "old")
    new = site.join("n1", "new")
    assert old.is_over and site.nodes.named("n1") is new
    assert [session for session, _ in site.lost] == ["old"]
    with pytest.raises(NodeReplaced):
        site.nodes.record_call("old", NodeStatus())
    with pytest.raises(NodeReplaced):
        site.join("n1", "old")
    assert site.nodes.record_call("new", NodeStatus()) is new


async def test_replaced_sessions_are_remembered_within_a_bound() -> None:
    site = Site()
    for number in range(REPLACED + 2):
        site.join("n1", f"s{number}")
    with pytest.raises(NodeReplaced):
        site.nodes.record_call("s1", NodeStatus())
    with pytest.raises(NodeUnknown):
        site.nodes.record_call("s0", NodeStatus())


async def test_connected_nodes_without_the_gates_are_behind() -> None:
    site = Site()
    site.join("n1", "s1")
    node = site.join("n2", "s2")
    site.nodes.record_call("s1", NodeStatus(gates=7))
    assert list(site.nodes.behind(7)) == [node]
    site.nodes.mark_lost(node, "left")
    assert list(site.nodes.behind(7)) == [] and [node.name for node in site.nodes.behind(8)] == ["n1"]
