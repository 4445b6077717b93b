"""An engine is restarted during an evaluation, and has lost the weights that the evaluation is pinned to.

The evaluation can only continue if these weights are written again: the pause for that is admitted, though the
evaluation delays any other."""

import asyncio
from pathlib import Path

import pytest

from rollyard.testing.scripted_engine import ScriptedEngine
from tests.service.site import Site, engine_table, open_site
from tests.service.skill import skilled
from tests.service.test_evals import SKILL, begin, by_hand, over, solves, tasks
from tests.worker import free_port

pytestmark = pytest.mark.slow

PAUSE, RESUME = "/v1/policies/default/pause", "/v1/policies/default/resume"


def slow_after_the_first_task(**options: object) -> ScriptedEngine:
    return skilled(solves, lambda rollout: 0.0 if rollout.startswith("e.0") else 60.0, **options)


def port_of(engine: ScriptedEngine) -> int:
    return int(engine.url.rpartition(":")[2])


async def engine_is(site: Site, state: str) -> None:
    async with asyncio.timeout(90):
        while (await site.get("/v1/policies/default")).body["engines"][0]["state"] != state:
            await asyncio.sleep(0.01)


async def start_at_version_7(site: Site, engine: ScriptedEngine) -> None:
    """Starts an evaluation at version 7. The first of three tasks has ended, with all four samples."""
    assert (await site.post(RESUME, {"version": 7})).status == 200
    await begin(site, tasks(3), k=4)
    await engine.busy()
    for index in range(4):
        await site.ended(f"e.0-{index}")
    assert (await site.post(PAUSE, {"wait_s": 0})).code == "policy_pinned", "its engine is healthy"


async def ends_with(site: Site, version: int) -> None:
    """Resumes the paused policy with that version and checks the end of the evaluation."""
    assert (await site.post(RESUME, {"version": version})).body["state"] == "running"
    ended = await over(site)
    assert ended["version"] == 7
    if version != 7:
        assert (ended["state"], ended["reason"]) == ("failed", "version_changed")
        return
    assert (ended["state"], ended["done"], ended["result"]["missing"]) == ("done", 12, {})
    assert ended["result"]["all"]["pass_at"]["2"]["mean"] == pytest.approx(by_hand(4, SKILL, 2))
    for number in range(12):
        summary = (await site.get(f"/v1/rollouts/e.{number // 4}-{number % 4}")).body["summary"]
        assert summary["oldest_version"] == 7


@pytest.mark.parametrize("version", [7, 8])
async def test_engine_and_service_are_restarted(tmp_path: Path, version: int) -> None:
    async with slow_after_the_first_task(port=free_port()) as engine:
        table = engine_table(engine)
        async with open_site(tmp_path, engines=[table], drain_s=0.1) as site:
            await start_at_version_7(site, engine)
    async with skilled(solves, port=port_of(engine)) as engine, open_site(tmp_path, engines=[table]) as site:
        await engine_is(site, "quarantined")
        assert (await site.post(PAUSE, {})).body["state"] == "paused"
        await ends_with(site, version)


@pytest.mark.parametrize("version", [7, 8])
async def test_the_engine_is_restarted_while_a_pause_waits(tmp_path: Path, version: int) -> None:
    async with (
        slow_after_the_first_task(port=free_port()) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await start_at_version_7(site, engine)
        waiting = asyncio.create_task(site.post(PAUSE, {"wait_s": 40}))
        await engine.stop()
        await engine_is(site, "down")
        async with skilled(solves, port=port_of(engine)):
            assert (await waiting).body["state"] == "paused"
            await ends_with(site, version)


async def test_a_service_restarted_during_that_pause_delays_the_next(tmp_path: Path) -> None:
    async with slow_after_the_first_task(port=free_port()) as engine:
        table = engine_table(engine)
        async with open_site(tmp_path, engines=[table], drain_s=0.1) as site:
            await start_at_version_7(site, engine)
    async with slow_after_the_first_task(port=port_of(engine)) as engine:
        async with open_site(tmp_path, engines=[table], drain_s=0.1) as site:
            await engine_is(site, "quarantined")
            assert (await site.post(PAUSE, {})).body["state"] == "paused"
        async with open_site(tmp_path, engines=[table], drain_s=0.1) as site:
            assert (await site.post(RESUME, {"version": 7})).body["state"] == "running"
            await engine.busy()
            assert (await site.post(PAUSE, {"wait_s": 0})).code == "policy_pinned"
