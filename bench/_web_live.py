"""The CPU that ten open pages cost the service while rollouts are in flight: each asks for the overview and for the
first page of results every two seconds, as the dashboard does.

The load itself varies by more than the pages cost. Windows with and without pages therefore alternate, and the figure
is the median of the differences between neighbours."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from statistics import median

from bench.pipeline import fill, script, task
from rollyard.cli.rig import Rig, rig
from rollyard.client import AsyncClient
from rollyard.core import Json

PAGES = 10
EVERY_S = 2.0
PAIRS = 9
LATENCY_S = 5.0


async def live_pages(*, in_flight: int, window_s: float) -> dict[str, Json]:
    settings: dict[str, Json] = {
        "run_slots": in_flight,
        "init_slots": 32,
        "ready_slots": in_flight // 2,
        "eval_slots": 64,
    }
    without, beside = list[float](), list[float]()
    async with rig(script(20), latency_s=LATENCY_S, settings=settings) as bench:
        await bench.client.create_run(id="bench")
        for start in range(0, 4 * in_flight, 500):
            many = range(start, min(start + 500, 4 * in_flight))
            await bench.client.submit([task(number) for number in many], run="bench")
        reached = await fill(bench, in_flight)
        for _ in range(PAIRS):
            without.append(await _cpu_percent(bench, window_s))
            async with AsyncExitStack() as stack:
                pages = [asyncio.create_task(_page(bench.client, number)) for number in range(PAGES)]
                stack.callback(lambda pages=pages: [page.cancel() for page in pages])
                beside.append(await _cpu_percent(bench, window_s))
        await bench.client.resize_pools(init=0)
        await bench.client.delete_run("bench")
    differences = [more - less for more, less in zip(beside, without, strict=True)]
    return {
        "live_rollouts_in_flight": reached,
        "live_cpu_percent_without_pages": round(median(without), 2),
        "live_pages_cpu_percent": round(median(differences), 2),
    }


async def _page(client: AsyncClient, number: int) -> None:
    await asyncio.sleep(number * EVERY_S / PAGES)
    while True:
        started_at = time.monotonic()
        await client.overview()
        await client.results(limit=50)
        await asyncio.sleep(max(0.0, EVERY_S - (time.monotonic() - started_at)))


async def _cpu_percent(bench: Rig, window_s: float) -> float:
    """Of one core."""
    started_at, cpu_s = time.monotonic(), bench.service.cpu_s()
    await asyncio.sleep(window_s)
    return 100 * (bench.service.cpu_s() - cpu_s) / (time.monotonic() - started_at)
