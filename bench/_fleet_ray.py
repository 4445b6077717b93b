"""Measures the throughput per node of a fleet on 1, 2, 4 and 8 Ray nodes, in a namespace with only a loopback.

    python -m bench._fleet_ray PLAN RESULT      (JSON; inside `_fleet_place`)

The cluster requires a token. The head is a `rollyard serve --fleet ray` process; its nodes are the actors that it
starts on the Ray nodes, with a fixed pool each. All rollouts wait about equally long, except that the first ones have
evenly distributed shorter times, so that the rate of endings is constant from the start. The bench counts the rollouts
that the head reports as ended, per node, in a window in the middle, while more are queued than can start.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from bench._fleet_parts import wait_task, write_entry_points
from bench.processes import CHECKOUT
from rollyard.cli._deadline import within
from rollyard.cli.rig import machine_busy_s, service
from rollyard.client import AsyncClient
from rollyard.core import Json

PAGE = 1_000
WITHIN_S = 90.0
POLL_S = 0.25
OBJECT_STORE_BYTES = 80 << 20  # Ray requires at least 75 MB; we do not use it


@dataclass(frozen=True, slots=True)
class RayPlan:
    nodes: Sequence[int]  # ascending
    slots: int  # of RUN, per node
    wait_s: float
    warm_s: float
    window_s: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """The throughput with a number of nodes."""

    nodes: int
    per_node_s: float  # rollouts per second and node
    least_node_s: float  # the slowest node
    busy_share: float  # of the whole machine


async def measure(plan: RayPlan) -> list[Throughput]:
    with tempfile.TemporaryDirectory(prefix="ry-", dir="/tmp") as name:  # the paths of Ray's sockets must be short
        folder = Path(name)
        write_entry_points(folder / "package")
        os.environ |= {
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(folder / "package"), str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
            ),
            "RAY_TMPDIR": name,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_BACKEND_LOG_LEVEL": "error",  # without a network it prints warnings
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_prestart_worker_first_driver": "0",
            "ROLLYARD_DATA_DIR": name,  # for the nodes; the head has its own
            "ROLLYARD_LOG_LEVEL": "warning",
        }
        # Ray blocks, and must set its signal handlers in the main thread. No other task is waiting here.
        cluster = _cluster()
        settings: dict[str, Json] = {
            "fleet": "ray",
            "ray_address": cluster.address,
            "runtimes": ["local"],
            "run_slots": plan.slots,
            "init_slots": max(2, plan.slots // 4),
            "ready_slots": max(2, plan.slots // 4),
            "eval_slots": max(2, plan.slots // 4),
        }
        results: list[Throughput] = []
        async with service(folder, settings) as served, AsyncClient(served.url, served.token) as client:
            there = 1
            for count in plan.nodes:
                for _ in range(count - there):
                    _add(cluster)
                there = count
                results.append(await _steady(client, plan, count))
        return results


def _cluster() -> Any:
    from ray.cluster_utils import Cluster

    node = {"node_ip_address": "127.0.0.1", "num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
    unused = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    return Cluster(initialize_head=True, head_node_args={**node, **unused})


def _add(cluster: Any) -> None:
    cluster.add_node(node_ip_address="127.0.0.1", num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)


async def _steady(client: AsyncClient, plan: RayPlan, count: int) -> Throughput:
    async with within(WITHIN_S, "starting Ray nodes", f"{count} nodes that are up"):
        while len([node for node in await client.nodes() if node["state"] == "up"]) < count:
            await asyncio.sleep(POLL_S)
    run = f"nodes-{count}"
    await client.create_run(id=run)
    tasks = waits(plan, count)
    for start in range(0, len(tasks), PAGE):
        await client.submit(tasks[start : start + PAGE], run=run)
    await asyncio.sleep(plan.warm_s)
    before, busy_s, started_at = await _ended(client), machine_busy_s(), time.monotonic()
    await asyncio.sleep(plan.window_s)
    after, took_s = await _ended(client), time.monotonic() - started_at
    busy_s = machine_busy_s() - busy_s
    if (await client.status())["pools"]["queue"]["active"] == 0:
        raise RuntimeError(f"the queue ran out with {count} nodes: there was no steady state")
    await client.delete_run(run)
    each = [after[name] - before[name] for name in after]
    busy_share = busy_s / took_s / len(os.sched_getaffinity(0))
    return Throughput(count, sum(each) / took_s / count, min(each) / took_s, busy_share)


def waits(plan: RayPlan, count: int) -> list[dict[str, Json]]:
    """Returns tasks: the first ones end evenly distributed in time, the others take `wait_s` ± 10 %."""
    random = Random(count)
    places = plan.slots * count
    initial_s = [plan.wait_s * (index + 0.5) / places for index in range(places)]
    random.shuffle(initial_s)
    later = int(1.25 * places * (plan.warm_s + plan.window_s) / plan.wait_s) + 4 * places
    return [
        wait_task(round(seconds, 3))
        for seconds in (*initial_s, *(plan.wait_s * random.uniform(0.9, 1.1) for _ in range(later)))
    ]


async def _ended(client: AsyncClient) -> dict[str, int]:
    return {node["name"]: node["ended"] for node in await client.nodes()}


def main(plan: str, result: str) -> None:
    results = asyncio.run(measure(msgspec.json.decode(plan.encode(), type=RayPlan)))
    Path(result).write_bytes(msgspec.json.encode(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
