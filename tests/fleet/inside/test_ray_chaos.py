"""The fleet on Ray, broken on purpose: its nodes' processes and its head are killed while rollouts run."""

import json
import os
import signal
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollyard.cli.rig import engine_process
from tests.fleet.chaos import SCRIPT, Fleet, Head, break_it, judge, submit_all, wait_until_idle
from tests.fleet.inside.ray_parts import Cluster

pytestmark = pytest.mark.timeout(180)

COUNT = 48
DEEDS = ("kill_node", "kill_head")


@dataclass
class RayFleet(Fleet):
    """Ray runs the nodes' processes and restarts those that are killed."""

    there: set[str] = field(default_factory=set[str])

    @property
    def names(self) -> set[str]:
        return self.there

    async def all_joined(self, count: int) -> None:
        def is_so(there: dict[str, object]) -> bool:
            self.there = set(there)
            return len(there) == count

        await self.until(is_so, f"{count} nodes are there")

    async def kill_node(self) -> None:
        os.kill(min(actors()), signal.SIGKILL)


def actors() -> list[int]:
    """Returns the processes of this PID namespace that are our nodes."""
    pids: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::NodeActor"):
                pids.append(int(folder.name))
    return pids


async def test_rollouts_outlive_rays_nodes_and_their_head(tmp_path: Path, own_cluster: Cluster) -> None:
    own_cluster.do("add")
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    async with engine_process(tmp_path, 0.2) as (_, engine_url):
        head = Head(tmp_path, engine_url, 5.0, fleet="ray", ray_address=own_cluster.address)
        fleet = RayFleet(tmp_path, head)
        try:
            await head.start()
            await fleet.all_joined(2)
            ids = await submit_all(fleet, COUNT)
            records = await break_it(fleet, COUNT, DEEDS, 120)
            print(f"{judge(records, ids)}; {fleet.did}")
            await wait_until_idle(fleet, engine_url)
            assert await head.stop() == 0
        finally:
            fleet.close()
    with closing(sqlite3.connect(head.data_dir / "rollyard.db")) as store:
        rows = "SELECT COUNT(*), COUNT(DISTINCT ended_seq), COUNT(node), MIN(state), MAX(state) FROM rollouts"
        assert store.execute(rows).fetchone() == (COUNT, COUNT, 0, "ended", "ended")
