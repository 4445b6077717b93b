"""A draw and its waiters are woken at once, not with the next poll or the next unrelated event."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from rollyard.core import Group, id_of
from tests.service.site import open_site, task
from tests.service.skill import skilled
from tests.service.test_draws import closed, draw, mixed, site_with


async def test_a_closed_batch_is_announced_before_its_surplus_is_cancelled(tmp_path: Path, monkeypatch: Any) -> None:
    """Each cancel is a write of its own, and a batch may leave hundreds."""

    def slow(rollout_id: str) -> float:
        return 0.0 if int(rollout_id.split(".")[2]) < 2 else 30.0

    async with skilled(mixed, slow) as engine, site_with(tmp_path, engine) as site:
        pipeline, may_cancel, asked = site.served.app_state.pipeline, asyncio.Event(), list[str]()
        cancel = pipeline.cancel

        async def delayed_cancel(rollout_id: str, detail: str) -> Any:
            asked.append(rollout_id)
            await may_cancel.wait()
            return await cancel(rollout_id, detail)

        monkeypatch.setattr(pipeline, "cancel", delayed_cancel)
        await draw(site, 6, shuffle=False, surplus="cancel", max_staleness=2)
        await site.post("/v1/draws/d/batches", {"want": 2, "number": 1})
        try:
            async with asyncio.timeout(90):
                batch = (await site.get("/v1/draws/d/batches/1?wait_s=60")).body
        finally:
            may_cancel.set()
        assert (batch["state"], batch["delivered"]) == ("closed", 2)
        assert asked, "there was a rollout to cancel"
        async with asyncio.timeout(90):
            await engine.idle()


async def test_a_draw_reopened_by_a_rewind_checks_a_full_queue_again(tmp_path: Path, monkeypatch: Any) -> None:
    """The timer for that ended with the earlier `main`."""
    monkeypatch.setattr("rollyard.sampling.draw_runner.FULL_S", 3.0)
    async with skilled(mixed) as engine, site_with(tmp_path, engine, max_queued=2) as site:
        await site.hold()
        await draw(site)
        await site.post("/v1/draws/d/batches", {"want": 2, "number": 1})  # its first group fills the queue
        keeping = {one for one in asyncio.all_tasks() if one.get_name() == "draw d"}
        assert len(keeping) == 1
        async with asyncio.timeout(90):
            assert (await site.delete("/v1/draws/d")).status == 202
            await asyncio.wait(keeping)
        await site.submit("a", "b")
        assert (await site.post("/v1/draws/d/rewind", {"batch": 0, "version": 0})).status == 200
        await site.post("/v1/draws/d/batches", {"want": 1, "number": 1})
        assert (await site.get("/v1/draws/d")).body["figures"]["open"] == 0, "there is no room yet"
        assert (await site.call("PATCH", "/v1/pools", json={"init": 2})).status == 200
        async with asyncio.timeout(90):
            assert (await closed(site, 1))["delivered"] == 1


async def test_a_due_timer_is_not_postponed_by_a_later_one(tmp_path: Path, monkeypatch: Any) -> None:
    """For example, the end of its seconds by a hold-off that starts in the same turn."""
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site, source={"push": True})
        runner, woken = await site.served.app_state.sampler.runner("d"), asyncio.Event()
        monkeypatch.setattr(runner, "wake", woken.set)
        runner.wake_in(0.0)
        runner.wake_in(3600.0)
        async with asyncio.timeout(90):
            await woken.wait()
        woken.clear()
        runner.wake_in(3600.0)
        runner.wake_in(0.0)
        async with asyncio.timeout(90):
            await woken.wait()


async def test_the_end_of_a_group_wakes_only_its_own_waiters(tmp_path: Path, monkeypatch: Any) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        names = ["ends", "stays"]
        groups = [{"id": name, "task": task(), "size": 1} for name in names]
        assert (await site.post("/v1/groups", {"groups": groups})).status == 202
        store, looks = site.served.app_state.store, Counter[str]()
        get_group = store.get_group

        async def counted(group_id: str) -> Group:
            group = await get_group(group_id)
            looks[id_of(group_id)] += 1
            return group

        monkeypatch.setattr(store, "get_group", counted)
        waits = {name: asyncio.create_task(site.get(f"/v1/groups/{name}?wait_s=60")) for name in names}
        async with asyncio.timeout(60):
            while looks != {"ends": 1, "stays": 1}:
                await asyncio.sleep(0)
        assert (await site.delete("/v1/groups/ends")).status == 202
        assert (await waits["ends"]).body["state"] == "cancelled"
        for _ in range(3):  # time in which a waiter that was woken would look
            assert (await site.get("/v1/groups")).status == 200
        assert looks["stays"] == 1
        assert (await site.delete("/v1/groups/stays")).status == 202
        assert (await waits["stays"]).body["state"] == "cancelled"


async def test_a_draws_group_wakes_those_that_wait_for_it(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await site.hold()
        await draw(site, 2, shuffle=False)
        await site.post("/v1/draws/d/batches", {"want": 1, "number": 1})
        async with asyncio.timeout(60):
            while not (listed := (await site.get("/v1/groups?draw=d&state=open")).body["groups"]):
                await asyncio.sleep(0.01)
        wait = asyncio.create_task(site.get(f"/v1/groups/{listed[0]['id']}?wait_s=60"))
        await site.get("/v1/groups")
        assert (await site.call("PATCH", "/v1/pools", json={"init": 4})).status == 200
        assert (await wait).body["state"] != "open"
