"""Pages of results, searches and the overview over HTTP, beside the same questions answered without the catalog: every
page of `GET /v1/rollouts` is listed and filtered in the client."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from bench._web_store import RUNS, fill
from rollyard.cli._console import note
from rollyard.cli.rig import Served, service
from rollyard.core import Json

CATCH_UP_S = 1800.0
REPEATS = 5
READ = 200
"""Trajectories that the search without a catalog reads; the time for all of them is computed from that."""

SETTINGS: dict[str, Json] = {"runtimes": ["local"], "init_slots": 1, "run_slots": 1}


async def tables(*, rollouts: int, with_versus: bool) -> tuple[dict[str, Json], dict[str, Json]]:
    """Returns the figures with that many stored rollouts, and those without a catalog."""
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as name:
        folder = Path(name)
        (folder / "data").mkdir(mode=0o700)
        note(f"storing {rollouts} rollouts")
        writer = await fill(folder / "data" / "rollyard.db", rollouts)
        common, rare = writer.words[:20:4], writer.words[5_000::2_500]
        started_at = time.monotonic()
        async with service(folder, SETTINGS) as served, _session(served) as http:
            note("waiting for the catalog")
            async with asyncio.timeout(CATCH_UP_S):
                while (await _get(http, "/v1/results?limit=1"))["behind"]:
                    await asyncio.sleep(0.2)
            index_s = time.monotonic() - started_at
            size = sum(file.stat().st_size for file in (folder / "data").glob("catalog.db*"))
            pages = await _pages(http)
            searches = [f"/v1/results?search={quote(text)}" for text in _searches(common, rare)]
            metrics: dict[str, Json] = {
                "rollouts": rollouts,
                "catalog_rollouts_per_s": round(rollouts / index_s, 1),
                "catalog_mb": round(size / 1e6, 1),
                **_percentiles("table", await _times_ms(http, pages)),
                **_percentiles("search", await _times_ms(http, searches)),
                **_percentiles("overview", await _times_ms(http, ["/v1/overview"] * 20)),
                **_percentiles("series", await _times_ms(http, [f"/v1/runs/{run}/series" for run in RUNS], 1)),
            }
            versus: dict[str, Json] = {"list_and_filter": await _without(http, rollouts)} if with_versus else {}
    return metrics, versus


async def _pages(http: aiohttp.ClientSession) -> list[str]:
    """Addresses of pages with several filters, and deep in the table."""
    filters = [
        "",
        "run=grpo-1",
        "run=nightly&environment=math",
        "environment=swe&min_reward=1",
        "outcome=completed&trainable=true",
        "code=sandbox_lost",
        "run=ablation&code=turn_limit",
        "version=3",
        "group=g7",
        "min_reward=0.5&max_reward=0.9",  # none: every row is read
    ]
    addresses = [f"/v1/results?{each}" for each in filters]
    for each in filters[:5]:
        after = ""
        for _ in range(10):
            cursor = (await _get(http, f"/v1/results?limit=200&{each}{after}"))["next"]
            if cursor is None:
                break
            after = f"&after={cursor}"
        addresses.append(f"/v1/results?{each}{after}")
    return addresses


def _searches(common: Sequence[str], rare: Sequence[str]) -> list[str]:
    return [
        *common,  # in nearly every rollout
        *rare,
        *(word[:3] for word in rare),
        *(f"{first} {second}" for first, second in zip(common, rare, strict=False)),
        "fix the failing test",
        "Task 4321",
        f"grep -n {common[0]}",
        "nowhere to be found",
    ]


async def _without(http: aiohttp.ClientSession, rollouts: int) -> dict[str, Json]:
    """What a user does without the catalog."""
    started_at, after, found, ids = time.monotonic(), "e:0", 0, list[tuple[str, str]]()
    while True:
        page = await _get(http, f"/v1/rollouts?state=ended&limit=1000&after={after}")
        if not page["rollouts"]:
            break
        found += sum(one["run"] == "grpo-1" and (one["reward"] or 0) >= 1 for one in page["rollouts"])
        ids += [(one["id"], one["run"]) for one in page["rollouts"]]
        after = page["next"]
    listed_ms = 1000 * (time.monotonic() - started_at)
    started_at = time.monotonic()
    for rollout_id, run in ids[:: max(1, len(ids) // READ)][:READ]:
        await _get(http, f"/v1/rollouts/{rollout_id}?include=trajectory&run={run}")
    read_ms = 1000 * (time.monotonic() - started_at) / min(READ, len(ids))
    return {"table_p50_ms": round(listed_ms, 1), "search_p50_ms": round(listed_ms + read_ms * rollouts, 1)}


def _percentiles(name: str, times_ms: list[float]) -> dict[str, Json]:
    ordered = sorted(times_ms)
    return {
        f"{name}_p50_ms": round(statistics.median(ordered), 2),
        f"{name}_p95_ms": round(ordered[int(0.95 * (len(ordered) - 1))], 2),
    }


async def _times_ms(http: aiohttp.ClientSession, addresses: Sequence[str], repeats: int = REPEATS) -> list[float]:
    times: list[float] = []
    for _ in range(repeats):
        for address in addresses:
            started_at = time.perf_counter()
            await _get(http, address)
            times.append(1000 * (time.perf_counter() - started_at))
    return times


def _session(served: Served) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(served.url, headers={"Authorization": f"Bearer {served.token}"})


async def _get(http: aiohttp.ClientSession, address: str) -> dict[str, Any]:
    async with http.get(address) as reply:
        reply.raise_for_status()
        return await reply.json()
