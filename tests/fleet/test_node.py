"""Failures of a node: it gets back a rollout that it still cleans up, finds its head again, or never, and reports its
room."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollyard.agents.base import AgentContext
from rollyard.agents.oracle import NoopAgent
from rollyard.agents.registry import Agents
from rollyard.core import Message
from rollyard.service.node import run_node
from rollyard.testing.script import Reply
from tests.fleet.fleet_site import NOWHERE, LoopNode, NodeOptions, loop_node, node_token, nodes_of, open_head, until
from tests.service.site import Site, engine_table, finish, scripted, task

pytestmark = pytest.mark.slow


class SlowToLeave(NoopAgent):
    """Its first attempt runs until it is stopped, and then ends only when the test allows it."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.stopped = asyncio.Event()
        self.may_go = asyncio.Event()

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        if not self.started.is_set():
            self.started.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.stopped.set()
                await self.may_go.wait()
        return await super().run(context, messages)


@asynccontextmanager
async def node_with(site: Site, folder: Path, agent: NoopAgent) -> AsyncGenerator[LoopNode, None]:
    node = LoopNode("n1", NodeOptions("n1", "", "", folder / "n1"))
    node.goes_to(site)
    options = NodeOptions("n1", site.url, node_token(site), folder / "n1", head=node.head)
    running = asyncio.create_task(
        run_node(options, node.stop, agents=Agents({"noop": agent}), on_joined=node.joined.set)
    )
    try:
        async with asyncio.timeout(90):
            await node.joined.wait()
        yield node
    finally:
        node.stop.set()
        async with asyncio.timeout(90):
            await running


async def test_a_rollout_that_returns_to_its_node_starts_after_the_clean_up(tmp_path: Path) -> None:
    agent = SlowToLeave()
    async with open_head(tmp_path, node_lease_s=5) as site, node_with(site, tmp_path, agent) as node:
        try:
            await site.submit("r1", task=task(agent={"name": "noop"}))
            async with asyncio.timeout(90):
                await agent.started.wait()
                node.is_cut = True
                await until(site)
                node.is_cut = False
                await agent.stopped.wait()
                while (await site.get("/v1/rollouts/r1")).body["state"] == "queued":  # the only node gets it again
                    await asyncio.sleep(0.02)
        finally:
            agent.may_go.set()
        record = await site.ended("r1")
        assert record["attempt"] == 2 and record["summary"]["node"] == "n1", record
        assert (await nodes_of(site))["n1"]["live"] == 0


async def test_a_node_that_gave_up_joins_a_head_that_did_not_notice(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=600.0)) as engine,
        open_head(tmp_path, engines=[engine_table(engine)], node_lease_s=600, node_hold_s=5) as site,
        loop_node(site, tmp_path, "n1") as node,
    ):
        nodes = site.served.app_state.head.nodes
        nodes.settings = replace(nodes.settings, poll_s=0.2)  # a poll that is held already is not disconnected
        await site.submit("r1")
        async with asyncio.timeout(90):
            await engine.busy()
            node.is_cut = True
            await engine.idle()
        engine.script = lambda _: finish()
        node.is_cut = False
        record = await site.ended("r1")
        assert record["attempt"] == 2 and [lost["code"] for lost in record["lost"]] == ["node_lost"], record


async def test_a_node_whose_head_never_returns_ends_when_stopped(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=600.0)) as engine,
        open_head(tmp_path, engines=[engine_table(engine)], node_lease_s=600, drain_s=0.5) as site,
    ):
        async with loop_node(site, tmp_path, "n1") as node:
            await site.submit("r1")
            async with asyncio.timeout(90):
                await engine.busy()
            node.url = NOWHERE
        await engine.idle()


async def test_a_free_place_is_reported_before_the_next_poll(tmp_path: Path) -> None:
    judged = tmp_path / "judged"
    waits = {"instruction": "go", "checks": [f"until [ -e {judged} ]; do sleep 0.05; done"]}
    sizes: dict[str, Any] = {"init_slots": 1, "run_slots": 1, "ready_slots": 0, "eval_slots": 2}
    async with scripted() as engine, open_head(tmp_path, engines=[engine_table(engine)], node_lease_s=3600) as site:
        nodes = site.served.app_state.head.nodes
        nodes.settings = replace(nodes.settings, poll_s=3600)
        async with loop_node(site, tmp_path, "n1", **sizes):
            await site.submit("r1", "r2", task={**task(), "data": waits})
            async with asyncio.timeout(90):
                while (await site.get("/v1/status")).body["states"]["eval"] < 2:
                    await asyncio.sleep(0.02)
            judged.touch()
            for name in ("r1", "r2"):
                assert (await site.ended(name))["reward"] == 1.0
