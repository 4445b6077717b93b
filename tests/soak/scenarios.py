"""The scenarios. Each returns figures, and raises AssertionError if anything was lost, invented or left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.endurance import bench_endurance
from bench.survive import bench_survive
from rollyard.core import Json
from tests.acceptance.test_draw_kill import deaths_on_both_sides
from tests.acceptance.test_kill import killed_service
from tests.fleet.test_chaos import DEEDS, broken_fleet, rows_of
from tests.service.fuzz import resident_bytes, send, target
from tests.soak.steady import hour

Figures = Mapping[str, Json]

MOST_GROWN_MIB = 64
"""Allowed growth of a service's memory between 40,000 and 100,000 requests."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One full-size run, in an empty folder."""

    name: str
    what: str
    run: Callable[[Path], Awaitable[Figures]]


async def _kill(folder: Path) -> Figures:
    return await killed_service(folder, rollouts=500, kills=20)


async def _draw(folder: Path) -> Figures:
    figures: dict[str, Json] = {}
    for on_stale in ("deliver", "wait"):
        (folder / on_stale).mkdir()
        counts = await deaths_on_both_sides(folder / on_stale, on_stale, batches=50, kills=8)
        figures |= {f"{on_stale}_{name}": value for name, value in counts.items()}
    return figures


async def _fleet(folder: Path) -> Figures:
    count = 2000
    deeds = (*DEEDS, "kill_node", "kill_head", "kill_node")
    async with broken_fleet(folder, nodes=4, count=count, deeds=deeds) as fleet:
        pass
    rows = rows_of(fleet)
    assert rows == (count, count, 0, "ended", "ended"), rows
    return {"rollouts": count, "deeds": len(deeds)}


async def _survive(folder: Path) -> Figures:
    figures: dict[str, Json] = {}
    for runtime in ("bubblewrap", "apptainer"):
        metrics = (await bench_survive(runtime=runtime))["metrics"]
        assert isinstance(metrics, dict)
        assert (metrics["survivors"], metrics["left_after_sweep"]) == (0, 0), metrics
        figures |= {f"{runtime}_{name}": metrics[name] for name in ("kills", "survivors", "swept")}
    return figures


async def _endurance(folder: Path) -> Figures:
    figures: dict[str, Json] = {}
    for runtime in ("bubblewrap", "apptainer"):
        metrics = (await bench_endurance(runtime=runtime))["metrics"]
        assert isinstance(metrics, dict)
        leftovers = {name: value for name, value in metrics.items() if name.endswith("_more") and value}
        assert not leftovers, leftovers
        figures |= {f"{runtime}_{name}": metrics[name] for name in ("sandboxes", "per_s")}
    return figures


async def _fuzz(folder: Path) -> Figures:
    resident: list[int] = []
    sent, statuses = 0, Counter[int]()
    async with target(folder) as at:
        for number in range(5):
            outcome = await asyncio.to_thread(send, at, 20_000, number)
            assert not outcome.wrong, outcome.wrong[:5]
            sent, statuses = sent + outcome.sent, statuses + outcome.statuses
            resident.append(resident_bytes(at.pid))
    grown_mib = (resident[-1] - resident[1]) >> 20
    assert grown_mib < MOST_GROWN_MIB, f"its memory, in bytes, after each fifth: {resident}"
    return {
        "requests": sent,
        "grown_mib": grown_mib,
        **{f"status_{status}": count for status, count in statuses.items()},
    }


SCENARIOS = (
    Scenario("kill", "500 rollouts, the service killed 20 times", _kill),
    Scenario("draw", "50 batches of a draw, service and trainer killed 8 times each, twice", _draw),
    Scenario("fleet", "2,000 rollouts on a fleet whose nodes and head are killed and frozen", _fleet),
    Scenario("survive", "60 kills of a service with 50 sandboxes starting, for each runtime", _survive),
    Scenario("endurance", "10,000 sandboxes, for each runtime", _endurance),
    Scenario("steady", "an hour at 50 rollouts/s: nothing that the service holds keeps growing", hour),
    Scenario("fuzz", "100,000 requests made from the OpenAPI document, with a token of every scope", _fuzz),
)
