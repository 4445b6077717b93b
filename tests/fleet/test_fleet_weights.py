"""Weights change during leased rollouts: every token of a node has the version that sampled it."""

import asyncio
from pathlib import Path

import pytest

from rollyard.testing.script import Reply
from tests.fleet.fleet_site import loop_node, nodes_of, open_head
from tests.service.site import engine_table, finish, scripted, shell

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["abort", "drain", "keep"])
async def test_a_nodes_tokens_have_the_version_that_sampled_them(tmp_path: Path, mode: str) -> None:
    slow = Reply(shell("true") + " " * 40, tokens_per_s=6)  # 4 s: on a busy machine, the rollouts do not start together
    async with (
        scripted(slow, finish()) as engine,
        open_head(tmp_path, engines=[engine_table(engine)]) as site,
        loop_node(site, tmp_path, "n1"),
        loop_node(site, tmp_path, "n2"),
    ):
        await site.submit("r1", "r2", "r3", "r4")
        async with asyncio.timeout(90):
            while engine.running < 4:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # three tokens each
        paused = await site.post("/v1/policies/default/pause", {"mode": mode, "lease_s": 60})
        assert paused.status == 200 and paused.body["state"] == "paused", paused.body
        if mode != "keep":
            await engine.idle()
        resumed = await site.post("/v1/policies/default/resume", {"version": 1})
        assert resumed.status == 200 and resumed.body["version"] == 1, resumed.body
        assert engine.version == "1"
        for one in ("r1", "r2", "r3", "r4"):
            record = await site.ended(one)
            assert record["reward"] == 1.0 and record["attempt"] == 1, record
            assert (record["summary"]["oldest_version"], record["summary"]["newest_version"]) == (0, 1), record
            (trace,) = (await site.get(f"/v1/rollouts/{one}/traces")).body["traces"]
            for span in trace["spans"]:
                assert trace["versions"][span["start"] : span["end"]] == sorted(
                    trace["versions"][span["start"] : span["end"]]
                )
        assert {node["gates"] for node in (await nodes_of(site)).values()} != {-1}


async def test_a_pause_waits_for_a_disconnected_node_no_longer_than_its_lease(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=60.0)) as engine,
        open_head(tmp_path, engines=[engine_table(engine)], node_lease_s=1) as site,
        loop_node(site, tmp_path, "n1") as node,
    ):
        await site.submit("r1")
        await engine.busy()
        node.is_cut = True
        paused = await site.post("/v1/policies/default/pause", {"mode": "abort", "lease_s": 60})
        assert paused.body["state"] == "paused", paused.body
        assert await nodes_of(site) == {}, "the pause waited until the node counted as lost"
        async with asyncio.timeout(90):
            while (record := (await site.get("/v1/rollouts/r1")).body)["state"] != "queued":
                await asyncio.sleep(0.02)
        assert record["lost"][0]["code"] == "node_lost", record
        await site.delete("/v1/rollouts/r1")
        node.is_cut = False
