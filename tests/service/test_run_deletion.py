"""Deleting a run or a group with a long queue: answered at once, and carried out without the caller."""

import asyncio
from pathlib import Path

import pytest

from rollyard.service.routes import runs
from tests.service.site import Site, engine_table, open_site, scripted, task

MANY = 3000


async def fill(site: Site, run: str = "long") -> None:
    await site.hold()
    assert (await site.post("/v1/runs", {"id": run})).status == 201
    for first in range(0, MANY, 1000):
        rollouts = [{"id": f"{run}-{n}", "task": task()} for n in range(first, first + 1000)]
        answer = await site.post("/v1/rollouts", {"rollouts": rollouts, "run": run})
        assert answer.status == 202, answer.body


async def gone(site: Site, run: str = "long") -> None:
    async with asyncio.timeout(90):
        while (await site.get(f"/v1/runs/{run}")).status != 404:
            await asyncio.sleep(0.02)


async def test_a_run_with_a_long_queue_is_being_deleted_when_its_caller_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "DELETE_S", 0.0)
    async with open_site(tmp_path) as site:
        await fill(site)
        answer = await site.delete("/v1/runs/long")
        assert answer.status == 202 and answer.body["state"] == "deleting" and answer.body["left"] == MANY
        assert (await site.delete("/v1/runs/long")).status in (202, 404), "a second time it is the same"
        late = await site.post("/v1/rollouts", {"id": "late", "run": "long", "task": task()})
        assert late.status == 404
        again = await site.post("/v1/runs", {"id": "long"})
        assert again.status in (409, 201)
        await gone(site) if again.status == 409 else None
        assert (await site.get("/v1/status")).body["states"]["queued"] == 0


async def test_a_deletion_that_was_cut_off_goes_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_site(tmp_path) as site:
        await fill(site)
        await site.served.house.yard.doom_run("long")  # and here the service is killed
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await site.submit("mine")
        assert (await site.ended("mine"))["reward"] == 1.0
        await gone(site)
        assert (await site.get("/v1/rollouts/long-0")).status == 404


async def test_a_small_run_is_gone_when_its_caller_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "DELETE_S", 60.0)
    async with open_site(tmp_path) as site:
        assert (await site.post("/v1/runs", {"id": "small"})).status == 201
        assert (await site.get("/v1/runs/small")).body["state"] == "active"
        assert (await site.delete("/v1/runs/small")).status == 204
        assert (await site.get("/v1/runs/small")).status == 404


async def test_a_cancelled_groups_rollouts_end_though_nobody_waits_for_them(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        assert (await site.post("/v1/groups", {"id": "g", "task": task(), "size": 2000})).status == 202
        assert (await site.delete("/v1/groups/g")).body["state"] == "cancelled"
        async with asyncio.timeout(90):
            while (await site.get("/v1/status")).body["states"]["queued"]:
                await asyncio.sleep(0.02)
        assert (await site.get("/v1/rollouts/g-1999")).body["outcome"] == "cancelled"
