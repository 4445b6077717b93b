"""Independent pools, a bounded READY buffer, one budget for all live rollouts, resizing while they run."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.core import Outcome, Run, State
from tests.pipeline.site import SETTINGS, Site, finish, new_run, open_site, says, shell, shell_task

pytestmark = pytest.mark.slow

DO_IT = says(shell("touch done"), finish())


async def settled(site: Site) -> dict[str, int]:
    """Returns the states once nothing is in INIT or RUN, and nothing has changed for a while."""
    before: dict[str, int] = {}
    while True:
        await asyncio.sleep(0.5)
        if site.pipeline.init_pool.active or site.pipeline.run_pool.active:
            before = {}
            continue
        counts = dict(await site.store.counts())
        if counts == before:
            return {state: number for state, number in counts.items() if number}
        before = counts


async def test_init_runs_ahead_only_as_far_as_the_ready_buffer(tmp_path: Path):
    settings = replace(SETTINGS, run_slots=0, ready_slots=3, init_slots=2)
    async with open_site(tmp_path, DO_IT, settings=settings) as site:
        ids = [await site.submit(shell_task()) for _ in range(8)]
        assert await settled(site) == {"ready": 3, "queued": 5}
        site.pipeline.resize({"run": 2})
        for rollout_id in ids:
            assert (await site.ended(rollout_id)).ending.outcome is Outcome.COMPLETED  # type: ignore[union-attr]


async def test_a_slow_eval_holds_no_run_slot_but_counts_in_the_budget(tmp_path: Path):
    settings = replace(SETTINGS, run_slots=1, eval_slots=2, ready_slots=1, init_slots=1, max_live=4)
    async with open_site(tmp_path, DO_IT, settings=settings) as site:
        for _ in range(8):
            await site.submit(shell_task(checks=["sleep 60"]))
        assert await settled(site) == {"eval": 4, "queued": 4}
        assert site.pipeline.run_pool.active == 0
        assert site.pipeline.eval_pool.active == 2
        site.pipeline.resize({"live": 6})
        assert await settled(site) == {"eval": 6, "queued": 2}


async def test_in_ready_an_owner_with_one_rollout_is_not_overtaken_by_one_with_many(tmp_path: Path):
    settings = replace(SETTINGS, run_slots=0, ready_slots=3, init_slots=1, eval_slots=1)
    async with open_site(tmp_path, says(shell("sleep 0.5"), finish()), settings=settings) as site:
        ended: list[str] = []
        site.pipeline.on_end.append(lambda rollout: ended.append(rollout.id))
        for owner in ("flood", "small"):
            await new_run(site, Run(owner, owner=owner))
        flood = [await site.submit(shell_task(), f"f{number}", run="flood") for number in range(8)]
        assert await settled(site) == {"ready": 3, "queued": 5}
        await site.submit(shell_task(), "small", run="small")
        site.pipeline.resize({"run": 1})
        for rollout_id in (*flood, "small"):
            await site.ended(rollout_id)
        assert ended.index("small") == 3, ended


async def test_a_stage_of_size_zero_stops_and_continues_when_it_grows(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, settings=replace(SETTINGS, eval_slots=0)) as site:
        rollout_id = await site.submit(shell_task())
        await site.until(rollout_id, State.EVAL)
        assert await settled(site) == {"eval": 1}
        site.pipeline.resize({"eval": 1})
        await site.ended(rollout_id)


async def test_a_runs_quota_leaves_room_for_other_runs(tmp_path: Path):
    async with open_site(tmp_path, says(shell("sleep 60")), run=Run("run", max_live=2)) as site:
        await new_run(site, Run("other"))
        for _ in range(5):
            await site.submit(shell_task())
        await site.submit(shell_task(), "guest", run="other")
        await site.until("guest", State.RUN)
        live = [attempt.run.id for attempt in site.pipeline.live.values()]
        assert sorted(live) == ["other", "run", "run"]
