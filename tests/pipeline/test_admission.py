"""Independent pools, a bounded READY buffer, one budget for all live rollouts, resizing while they run."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.core import Outcome, Run, State
from tests.pipeline.site import SETTINGS, Site, finish, says, shell, shell_task, site

pytestmark = pytest.mark.slow

DO_IT = says(shell("touch done"), finish())


async def settled(pipeline: Site) -> dict[str, int]:
    """Returns the states once nothing has changed for a while."""
    before: dict[str, int] = {}
    while True:
        await asyncio.sleep(0.5)
        counts = dict(await pipeline.store.counts())
        if counts == before and not pipeline.pipeline.init_pool.active:
            return {state: number for state, number in counts.items() if number}
        before = counts


async def test_init_runs_ahead_only_as_far_as_the_ready_buffer(tmp_path: Path):
    settings = replace(SETTINGS, run_slots=0, ready_slots=3, init_slots=2)
    async with site(tmp_path, DO_IT, settings=settings) as pipeline:
        ids = [await pipeline.submit(shell_task()) for _ in range(8)]
        assert await settled(pipeline) == {"ready": 3, "queued": 5}
        pipeline.pipeline.resize({"run": 2})
        for rollout_id in ids:
            assert (await pipeline.ended(rollout_id)).ending.outcome is Outcome.COMPLETED  # type: ignore[union-attr]


async def test_a_slow_eval_holds_no_run_slot_but_counts_in_the_budget(tmp_path: Path):
    settings = replace(SETTINGS, run_slots=1, eval_slots=2, ready_slots=1, init_slots=1, max_live=4)
    async with site(tmp_path, DO_IT, settings=settings) as pipeline:
        for _ in range(8):
            await pipeline.submit(shell_task(checks=["sleep 60"]))
        assert await settled(pipeline) == {"eval": 4, "queued": 4}
        assert pipeline.pipeline.run_pool.active == 0
        assert pipeline.pipeline.eval_pool.active == 2
        pipeline.pipeline.resize({"live": 6})
        assert await settled(pipeline) == {"eval": 6, "queued": 2}


async def test_a_stage_of_size_zero_stops_and_continues_when_it_grows(tmp_path: Path):
    async with site(tmp_path, DO_IT, settings=replace(SETTINGS, eval_slots=0)) as pipeline:
        rollout_id = await pipeline.submit(shell_task())
        await pipeline.until(rollout_id, State.EVAL)
        assert await settled(pipeline) == {"eval": 1}
        pipeline.pipeline.resize({"eval": 1})
        await pipeline.ended(rollout_id)


async def test_a_runs_quota_leaves_room_for_other_runs(tmp_path: Path):
    async with site(tmp_path, says(shell("sleep 60")), run=Run("run", max_live=2)) as pipeline:
        await pipeline.store.put_run(Run("other"), {"id": "other"})
        pipeline.pipeline.know(Run("other"))
        for _ in range(5):
            await pipeline.submit(shell_task())
        await pipeline.submit(shell_task(), "guest", run="other")
        await pipeline.until("guest", State.RUN)
        live = [attempt.run.id for attempt in pipeline.pipeline.live.values()]
        assert sorted(live) == ["other", "run", "run"]
