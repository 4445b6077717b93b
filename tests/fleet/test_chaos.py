"""Nodes and heads that die and freeze in the middle of the work: every rollout ends once, as its script says.

Each run prints what was lost on the way and when which deed was done.
"""

import json
import sqlite3
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import asyncpg
import pytest

from rollyard.cli.bench._census import adopting
from rollyard.cli.rig import engine_process
from rollyard.core import Json
from rollyard.testing.store_postgres import PgServer, find_postgres
from tests.fleet import netns
from tests.fleet.chaos import SCRIPT, Fleet, Head, at_rest, below_us, break_it, judge, nobody_left, submit_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LATENCY_S = 0.2
LEASE_S = 5.0
RUN_S = 200.0
ROWS = "SELECT COUNT(*), COUNT(DISTINCT ended_seq), COUNT(node), MIN(state), MAX(state) FROM rollouts"


@asynccontextmanager
async def broken_fleet(
    folder: Path, *, nodes: int, count: int, deeds: Sequence[str], **more: Json
) -> AsyncGenerator[Fleet, None]:
    """One run to its end, judged. In the block all is at rest and still up; after it nothing is left."""
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
                print(f"{judge(records, ids)}; {fleet.did}")
                await at_rest(fleet, engine_url)
                yield fleet
                await fleet.stop()
                await nobody_left(before)
            finally:
                fleet.close()


async def test_two_thousand_rollouts_outlive_nodes_and_heads(tmp_path: Path) -> None:
    count = 2000
    deeds = ("kill_node", "freeze_node", "kill_head", "kill_node", "kill_node", "kill_head", "kill_node")
    async with broken_fleet(tmp_path, nodes=4, count=count, deeds=deeds) as fleet:
        pass
    with closing(sqlite3.connect(fleet.head.data_dir / "rollyard.db")) as store:
        assert store.execute(ROWS).fetchone() == (count, count, 0, "ended", "ended")


@pytest.fixture
def postgres() -> Generator[PgServer, None, None]:
    if find_postgres() is None:
        pytest.skip("no PostgreSQL here: apt-get install postgresql")
    with PgServer() as server:
        yield server


async def test_with_a_shared_store_all_of_them_do_too(tmp_path: Path, postgres: PgServer) -> None:
    count = 304
    deeds = ("kill_node", "kill_head", "freeze_node")
    async with broken_fleet(tmp_path, nodes=3, count=count, deeds=deeds, store=postgres.url):
        pass
    connection = await asyncpg.connect(postgres.url)
    try:
        assert tuple(await connection.fetchrow(ROWS)) == (count, count, 0, "ended", "ended")
    finally:
        await connection.close()


def test_nodes_that_ray_restarts_do_too(tmp_path: Path) -> None:
    file = Path(__file__).parent / "inside" / "test_ray_chaos.py"
    netns.run_test_inside(str(file), tmp_path, limit_s=RUN_S)
