"""Nodes and heads that die and freeze while rollouts run: every rollout ends once, as scripted.

Each run prints what was lost meanwhile and when each fault was applied.
"""

import json
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import asyncpg
import pytest

from bench._census import adopting
from bench.postgres import PgServer
from rollyard.cli.rig import engine_process
from rollyard.core import Json
from tests.fleet import netns
from tests.fleet.chaos import (
    SCRIPT,
    Fleet,
    Head,
    below_us,
    break_it,
    explain,
    judge,
    nobody_left,
    submit_all,
    wait_until_idle,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LATENCY_S = 0.2
LEASE_S = 5.0
RUN_S = 200.0
DEEDS = ("kill_node", "kill_head", "kill_node", "freeze_node")
"""The freeze comes last: it takes a lease's time, in which the other nodes would do what later deeds are to hit."""

ROWS = "SELECT COUNT(*), COUNT(DISTINCT ended_seq), COUNT(node), MIN(state), MAX(state) FROM rollouts"


@asynccontextmanager
async def broken_fleet(
    folder: Path, *, nodes: int, count: int, deeds: Sequence[str], **more: Json
) -> AsyncGenerator[Fleet, None]:
    """One run to its end, checked. Inside the block all is idle and still up; after it nothing is left."""
    (folder / "script.json").write_text(json.dumps(SCRIPT))
    with adopting():
        before = below_us()
        async with engine_process(folder, LATENCY_S) as (_, engine_url):
            before |= below_us()
            fleet = Fleet(folder, Head(folder, engine_url, LEASE_S, **more))
            try:
                await fleet.head.start()
                await fleet.joined(*(fleet.add_node() for _ in range(nodes)))
                ids = await submit_all(fleet, count)
                records = await break_it(fleet, count, deeds, RUN_S)
                await explain(fleet, records)
                print(f"{judge(records, ids)}; {fleet.did}")
                await wait_until_idle(fleet, engine_url)
                yield fleet
                await fleet.stop()
                await nobody_left(before)
            finally:
                fleet.close()


async def test_rollouts_outlive_nodes_and_heads(tmp_path: Path) -> None:
    count = 160  # `make soak` runs 2,000
    async with broken_fleet(tmp_path, nodes=3, count=count, deeds=DEEDS) as fleet:
        pass
    assert rows_of(fleet) == (count, count, 0, "ended", "ended")


def rows_of(fleet: Fleet) -> tuple[object, ...]:
    with closing(sqlite3.connect(fleet.head.data_dir / "rollyard.db")) as store:
        return store.execute(ROWS).fetchone()


async def test_rollouts_outlive_nodes_and_heads_with_a_shared_store(tmp_path: Path, postgres: PgServer) -> None:
    count = 64
    deeds = ("kill_node", "kill_head")
    url = postgres.create_database("chaos")
    async with broken_fleet(tmp_path, nodes=2, count=count, deeds=deeds, store=url):
        pass
    connection = await asyncpg.connect(url)
    try:
        assert tuple(await connection.fetchrow(ROWS)) == (count, count, 0, "ended", "ended")
    finally:
        await connection.close()


def test_rollouts_outlive_nodes_that_ray_restarts(tmp_path: Path) -> None:
    file = Path(__file__).parent / "inside" / "test_ray_chaos.py"
    netns.run_test_inside(str(file), tmp_path, limit_s=RUN_S)
