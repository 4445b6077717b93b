"""`rollyard bench fleet`: the throughput of a fleet, and the cost for its head.

- 1, 2, 4 and 8 Ray nodes on this machine, rollouts that only wait, a fixed pool per node: `efficiency_N` is the
  throughput of a node among N divided by that of a single node. Ray runs in its own network namespace (`_fleet_place`).
- Waiting is a light load, so the head is also saturated by nodes that run nothing and send realistic results
  (`_fleet_hollow`): `leases_per_s`, and CPU time and bytes of the head per rollout. Then it is loaded at half of that
  rate by nodes of NODE_SLOTS slots with rollouts of NODE_ROLLOUT_S: `efficiency_at_half_head` is the number of ended
  rollouts divided by the offered number.
- The lease rate of the store alone, and the cost of an idle poll.

PostgreSQL, if it is installed, is compared with SQLite: a separate server on this machine, as durable as SQLite. Its
CPU time is not counted for the head, but on a small machine it uses the same cores.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench._fleet_head import Load, Window, at_rate, at_saturation, idle
from bench._fleet_place import inside
from bench._fleet_ray import RayPlan, Throughput
from bench.postgres import PgServer, find_postgres
from bench.processes import module_argv
from bench.store_leases import measure_leases
from rollyard.cli._console import CommandError, note
from rollyard.cli._deadline import within
from rollyard.core import Json
from rollyard.store import open_store

FULL = RayPlan(nodes=(1, 2, 4, 8), slots=32, wait_s=4.0, warm_s=6.0, window_s=20.0)
QUICK = RayPlan(nodes=(1, 2), slots=32, wait_s=4.0, warm_s=4.0, window_s=4.0)

NODE_SLOTS, NODE_ROLLOUT_S = 256, 60.0
"""The size of a node in docs/how-to/scale.md; the capacity of a head is given in such nodes."""

RAY_S = 400.0
DURABLE = ("-c", "max_connections=100")  # fsync is on by default


async def bench_fleet(*, quick: bool = False, peers: bool = True) -> dict[str, Json]:
    carried = await _on_ray(QUICK if quick else FULL)
    queued = 3_000 if quick else 15_000
    metrics: dict[str, Json] = {**_ray_figures(carried)}
    note("the head at saturation")
    metrics |= await _head_figures(queued)
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as name:
        metrics["store_leases_per_s"] = await _store_leases_per_s(str(Path(name) / "bench.db"), quick)
    versus: dict[str, Json] = {"postgresql": await _with_postgres(queued, quick)} if peers else {}
    per_s = float(str(metrics["leases_per_s"]))
    note("the head at half of that")
    half = max(1, nodes_fed(per_s / 2))
    hold_s = 4.0 if quick else 8.0
    window_s = (2 if quick else 3) * hold_s
    window, offered = await at_rate(per_s / 2, nodes=half, hold_s=hold_s, window_s=window_s)
    metrics |= {
        "nodes_at_half_head": half,
        "efficiency_at_half_head": round(window.per_s / offered, 3),
        "head_cpu_share_at_half": round(window.head_cpu_s / window.took_s, 2),
        "head_cpu_ms_per_rollout_at_half": _cpu_ms(window, window.ended),
        "head_calls_per_rollout_at_half": round(window.calls / max(1, window.ended), 2),
    }
    window = await idle(nodes=8, window_s=2.0)
    metrics |= {
        "head_cpu_ms_per_idle_poll": _cpu_ms(window, window.calls),
        "head_bytes_per_idle_poll": round(window.bytes / max(1, window.calls)),
    }
    fed = nodes_fed(per_s)
    metrics["nodes_fed_of_256_slots_at_60_s"] = fed
    note(
        f"one head serves {fed} nodes of {NODE_SLOTS} slots with rollouts of {NODE_ROLLOUT_S:g} s"
        f" ({per_s:.0f} rollouts a second); plan with half of that"
    )
    return {"metrics": metrics, "versus": versus}


def nodes_fed(per_s: float) -> int:
    """Returns the number of nodes that end `per_s` rollouts a second with all slots in use."""
    return int(per_s * NODE_ROLLOUT_S / NODE_SLOTS)


async def _on_ray(plan: RayPlan) -> list[Throughput]:
    """Measures in a child process with its own namespaces."""
    if importlib.util.find_spec("ray") is None:
        raise CommandError("Ray is not installed", "pip install 'rollyard[ray]'")
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as name:
        result = Path(name) / "result.json"
        program = module_argv("_fleet_ray", msgspec.json.encode(plan).decode(), str(result))
        note(f"Ray nodes: {', '.join(map(str, plan.nodes))}")
        process = await asyncio.create_subprocess_exec(
            *inside(program), stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr.fileno()
        )
        try:
            async with within(
                RAY_S, "measuring the fleet on Ray", f"runs with {', '.join(map(str, plan.nodes))} nodes"
            ):
                status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()  # this ends PID 1 of the namespace, and with it all of Ray
                await process.wait()
        if status != 0:
            raise CommandError("the fleet on Ray could not be measured", "the error is above")
        return msgspec.json.decode(result.read_bytes(), type=list[Throughput])


def _ray_figures(carried: list[Throughput]) -> dict[str, Json]:
    single_node = carried[0].per_node_s
    figures: dict[str, Json] = {}
    for one in carried:
        figures[f"rollouts_per_s_per_node_{one.nodes}"] = round(one.per_node_s, 3)
        if one.nodes > 1:
            figures[f"efficiency_{one.nodes}"] = round(one.per_node_s / single_node, 3)
            figures[f"least_node_efficiency_{one.nodes}"] = round(one.least_node_s / single_node, 3)
        figures[f"machine_busy_share_{one.nodes}"] = round(one.busy_share, 2)
    return figures


async def _head_figures(queued: int, store: str | None = None) -> dict[str, Json]:
    window, head = await at_saturation(queued, Load(), store)
    return {
        "leases_per_s": round(window.per_s),
        "head_cpu_ms_per_rollout": _cpu_ms(window, window.ended),
        "head_bytes_per_rollout": round(window.bytes / max(1, window.ended)),
        "head_calls_per_rollout": round(window.calls / max(1, window.ended), 2),
        "head_cpu_share": round(window.head_cpu_s / window.took_s, 2),
        "hollow_cpu_share": round(window.nodes_cpu_s / window.took_s, 2),
        "machine_busy_share": round(window.busy_s / window.took_s / len(os.sched_getaffinity(0)), 2),
        "submit_cpu_ms_per_rollout": round(head.submit_cpu_ms, 3),
    }


async def _store_leases_per_s(place: str, quick: bool) -> int:
    async with await open_store(place) as store:
        return round((await measure_leases(store, 5_000 if quick else 50_000)).leases_per_s)


async def _with_postgres(queued: int, quick: bool) -> dict[str, Json]:
    if find_postgres() is None:
        return {"error": "PostgreSQL's initdb was not found: apt-get install postgresql"}
    note("the same with PostgreSQL")
    with ExitStack() as stack:
        server = await asyncio.to_thread(stack.enter_context, PgServer(*DURABLE))
        figures = await _head_figures(queued, server.url)
        other = await asyncio.to_thread(server.create_database, "leases")
        figures["store_leases_per_s"] = await _store_leases_per_s(other, quick)
        return figures


def _cpu_ms(window: Window, count: int) -> float:
    return round(1000 * window.head_cpu_s / max(1, count), 3)
