"""Changes to a running fleet: nodes upgraded one after another, a head that is restarted elsewhere."""

import asyncio
from pathlib import Path

import pytest

from bench.postgres import PgServer
from rollyard.testing.script import Reply
from tests.fleet.fleet_site import loop_node, nodes_of, open_head, until
from tests.fleet.test_fleet import all_ended
from tests.service.site import engine_table, finish, scripted

pytestmark = pytest.mark.slow


async def test_nodes_are_restarted_one_after_another_and_no_attempt_counts_as_lost(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=0.2)) as engine,
        open_head(tmp_path, engines=[engine_table(engine)], node_lease_s=30) as site,
    ):
        nodes = {name: loop_node(site, tmp_path, name) for name in ("n1", "n2")}
        for node in nodes.values():
            await node.__aenter__()
        try:
            await site.submit(*(f"r{number}" for number in range(60)))
            for name in nodes:
                assert (await site.post(f"/v1/nodes/{name}/drain")).status == 200
                async with asyncio.timeout(90):
                    while (await nodes_of(site))[name]["live"]:
                        await asyncio.sleep(0.02)
                await nodes[name].__aexit__(None, None, None)  # it leaves: this is where it would be upgraded
                nodes[name] = loop_node(site, tmp_path, name)
                await nodes[name].__aenter__()
            records = await all_ended(site, 60)
            assert len({record["id"] for record in records}) == 60
            assert {record["reward"] for record in records} == {1.0}, [one["failure"] for one in records]
            assert {lost["code"] for record in records for lost in record["lost"]} <= {"drained"}
            assert {record["summary"]["node"] for record in records} == {"n1", "n2"}
        finally:
            for node in nodes.values():
                await node.__aexit__(None, None, None)


async def test_a_head_on_another_machine_continues_with_the_same_database_and_nodes(
    tmp_path: Path, postgres: PgServer
) -> None:
    """Another data folder stands for another machine: of the first head, only the database and the nodes are left."""
    url = postgres.create_database("moves")
    async with scripted(Reply(finish(), latency_s=1.0)) as engine:
        table = engine_table(engine)
        async with open_head(tmp_path / "a", engines=[table], store=url, node_lease_s=20) as site:
            node = loop_node(site, tmp_path, "n1")
            running = await node.__aenter__()
            await site.submit(*(f"r{number}" for number in range(8)))
            started: set[str] = set()
            async with asyncio.timeout(90):
                while len(started) < 3:  # in one listing: some leave RUN before the next
                    await asyncio.sleep(0.02)
                    listed = (await site.get("/v1/rollouts?state=run")).body["rollouts"]
                    started = {record["id"] for record in listed}
        try:
            async with open_head(tmp_path / "b", engines=[table], store=url, node_lease_s=20) as site:
                running.goes_to(site)
                records = await all_ended(site, 8)
                assert {record["reward"] for record in records} == {1.0}
                again = {record["id"]: record["lost"] for record in records if record["attempt"] > 1}
                assert len(started) >= 3 and not started & again.keys(), "no rollout had to start again"
                # A lease that was written, and whose node had not received it yet, is given back.
                assert {lost["code"] for attempts in again.values() for lost in attempts} <= {"node_lost"}
                running.stop.set()
                await until(site)
        finally:
            await node.__aexit__(None, None, None)
