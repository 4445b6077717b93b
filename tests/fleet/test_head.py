"""A head and a node whose messages the test sends: duplicate, late, wrong and missing ones."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollyard.core import State
from rollyard.fleet.head import FleetHead
from rollyard.fleet.messages import (
    PROTOCOL,
    Ended,
    EngineUse,
    Join,
    Joined,
    Key,
    Moved,
    NodeStatus,
    Orders,
    Poll,
    Report,
    Saved,
    rollout_of,
)
from rollyard.store.codec import encode_trajectory, to_json
from rollyard.testing.store_conformance import completed, trajectory
from tests.fleet.fleet_site import loop_node, open_head
from tests.service.site import Site, engine_table, scripted

INFO = {"is_reevaluable": False, "summary": {}, "timings": {}, "failure": None}


def saved(key: Key) -> Saved:
    saved_trajectory = trajectory(key.id, key.attempt)
    return Saved(key, bytes(encode_trajectory(saved_trajectory)), saved_trajectory.sampled_tokens, to_json(INFO), [])


def ended(key: Key, reward: float = 0.5) -> Ended:
    return Ended(key, to_json(completed(reward)), None, 0)


class Hand:
    """A node that sends what the test gives it."""

    def __init__(self, head: FleetHead, name: str = "hand") -> None:
        self._head = head
        self._name = name
        self.got = 0
        self.engines = {"e1": ""}  # known engines, and why it cannot use them

    def join(self, *holds: Key, want: int = 8, sends_views: bool = False) -> Joined:
        status = self._status(want)
        return self._head.join(Join(PROTOCOL, "0", self._name, self._name, "host", list(holds), status, sends_views))

    async def poll(self, want: int = 8, wait_s: float = 5.0) -> Orders:
        return await self._head.poll(Poll(self._name, self._status(want)), wait_s)

    async def poll_briefly(self) -> Orders:
        """Returns the orders that come at once, after the gates."""
        self.got = (await self._head.poll(Poll(self._name, self._status(8)), 0.3)).number
        return await self._head.poll(Poll(self._name, self._status(8)), 0.3)

    def _status(self, want: int) -> NodeStatus:
        uses = [EngineUse(name, 0, 0, 0, not why, why) for name, why in self.engines.items()]
        return NodeStatus(got=self.got, want=want, engines=uses)

    async def leased(self, count: int) -> list[Key]:
        """Polls until it has received so many leases."""
        keys: list[Key] = []
        async with asyncio.timeout(90):
            while len(keys) < count:
                orders = await self.poll(count - len(keys))
                self.got = orders.number
                keys += [Key(one.id, one.attempt) for one in map(rollout_of, orders.leases)]
        return keys

    async def send_report(self, *items: Any, want: int = 0) -> list[Key]:
        """Reports the items and returns the keys that the head refuses."""
        report = Report(self._name, self._status(want), list(items))
        return (await self._head.report(report)).refused


@asynccontextmanager
async def opened(folder: Path, **values: Any) -> AsyncGenerator[tuple[Site, Hand], None]:
    """The hand has joined. No other node runs anything, and no lease expires."""
    async with (
        scripted() as engine,
        open_head(folder, engines=[engine_table(engine)], node_lease_s=600, **values) as site,
    ):
        hand = Hand(site.served.app_state.head)
        hand.join()
        yield site, hand


async def test_rollouts_that_a_node_no_longer_holds_run_elsewhere(tmp_path: Path) -> None:
    async with opened(tmp_path) as (site, hand):
        await site.submit("r1", "r2")
        first, second = await hand.leased(2)
        assert hand.join(first, want=0).keeps == [first]
        async with loop_node(site, tmp_path, "n2"):
            record = await site.ended(second.id)
            assert record["attempt"] == 2 and [lost["code"] for lost in record["lost"]] == ["node_lost"], record
            assert record["summary"]["node"] == "n2" and record["reward"] == 1.0
        assert await hand.send_report(ended(first)) == []
        assert (await site.ended(first.id))["attempt"] == 1, "the node keeps what it still holds"


async def test_leases_in_transit_at_a_join_are_sent_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as (site, hand):
        await site.submit("r1")
        async with asyncio.timeout(90):
            while not (missed := await hand.poll()).leases:
                hand.got = missed.number
        hand.join()
        again = await hand.poll()
        assert again.number > missed.number and again.leases == missed.leases and again.runs == missed.runs
        (key,) = [Key(one.id, one.attempt) for one in map(rollout_of, again.leases)]
        assert key.attempt == 1
        hand.got = again.number
        assert await hand.send_report(ended(key)) == []
        assert (await site.ended("r1"))["reward"] == 0.5


async def test_concurrent_duplicate_reports_count_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as (site, hand):
        await site.submit("r1")
        (key,) = await hand.leased(1)
        both = await asyncio.gather(*(hand.send_report(Moved(key, State.RUN), saved(key)) for _ in range(2)))
        assert both == [[], []], "the second report is known already, and the attempt is still this node's"
        ends = await asyncio.gather(hand.send_report(ended(key, 0.25)), hand.send_report(ended(key, 0.75)))
        assert ends == [[], [key]]
        record = await site.ended("r1")
        assert record["reward"] == 0.25 and record["attempt"] == 1
        (trace,) = (await site.get("/v1/rollouts/r1/traces")).body["traces"]
        assert sum(trace["mask"]) == 3


async def test_a_node_lost_during_its_report_leaves_nothing_behind(tmp_path: Path) -> None:
    async with opened(tmp_path) as (site, hand):
        await site.submit("r1")
        (key,) = await hand.leased(1)
        word = asyncio.create_task(hand.send_report(Moved(key, State.RUN), saved(key)))
        await asyncio.sleep(0)
        nodes = site.served.app_state.head.nodes
        nodes.mark_lost(nodes.named("hand"), "went away")
        await word
        async with loop_node(site, tmp_path, "n2"):
            record = await site.ended("r1")
            assert record["attempt"] == 2 and record["summary"]["node"] == "n2", record


async def test_a_report_that_cannot_be_stored_fails_only_its_own_rollout(tmp_path: Path) -> None:
    async with opened(tmp_path, max_attempts=1) as (site, hand):
        await site.submit("r1", "r2", "r3")
        keys = {key.id: key for key in await hand.leased(3)}
        broken_end = Ended(keys["r1"], "no JSON", None, 0)
        broken_run = Saved(keys["r2"], b"", 0, "no JSON", [])
        refused = await hand.send_report(broken_end, broken_run, ended(keys["r3"]))
        assert set(refused) == {keys["r1"], keys["r2"]}
        assert (await site.ended("r3"))["reward"] == 0.5
        for name in ("r1", "r2"):
            record = await site.ended(name)
            assert record["outcome"] == "failed" and record["reward"] is None, record
            assert (record["failure"]["code"], record["failure"]["blame"]) == ("internal_error", "infra")
        pipeline = site.served.app_state.pipeline
        assert pipeline.live_here == 0 and not pipeline.live


async def test_a_node_cannot_report_for_another(tmp_path: Path) -> None:
    async with opened(tmp_path) as (site, hand):
        other = Hand(site.served.app_state.head, "other")
        other.join(want=0)
        await site.submit("r1")
        (key,) = await hand.leased(1)
        assert await other.send_report(ended(key, 0.1)) == [key]
        assert other.join(key, want=0).keeps == []
        assert await hand.send_report(Ended(Key(key.id, 2), to_json(completed(0.2)), None, 0)) == [Key(key.id, 2)]
        assert await hand.send_report(ended(key, 0.3)) == []
        assert (await site.ended("r1"))["reward"] == 0.3
