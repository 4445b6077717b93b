"""Independent pools, a bounded READY buffer, one budget for all that lives, live resizing."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.core import Outcome, Run, State
from tests.pipeline.site import SETTINGS, Site, finish, says, shell, shell_task, site

pytestmark = pytest.mark.slow

DO_IT = says(shell("touch done"), finish())


async def settled(yard: Site) -> dict[str, int]:
    """The states, once nothing has changed for a while."""
    before: dict[str, int] = {}
    while True:
        await asyncio.sleep(0.5)
        counts = dict(await yard.store.counts())
        if counts == before and not yard.yard.init_pool.active:
            return {state: number for state, number in counts.items() if number}
        before = counts


async def test_init_runs_ahead_only_as_far_as_the_ready_buffer(tmp_path: Path):
    settings = replace(SETTINGS, run_slots=0, ready_slots=3, init_slots=2)
    async with site(tmp_path, DO_IT, settings=settings) as yard:
        ids = [await yard.submit(shell_task()) for _ in range(8)]
        assert await settled(yard) == {"ready": 3, "queued": 5}
        yard.yard.resize({"run": 2})
        for rollout_id in ids:
            assert (await yard.ended(rollout_id)).ending.outcome is Outcome.COMPLETED  # type: ignore[union-attr]


async def test_a_slow_eval_holds_no_run_slot_but_counts_in_the_budget(tmp_path: Path):
    settings = replace(SETTINGS, run_slots=1, eval_slots=2, ready_slots=1, init_slots=1, max_live=4)
    async with site(tmp_path, DO_IT, settings=settings) as yard:
        for _ in range(8):
            await yard.submit(shell_task(checks=["sleep 60"]))
        assert await settled(yard) == {"eval": 4, "queued": 4}
        assert yard.yard.run_pool.active == 0
        assert yard.yard.eval_pool.active == 2
        yard.yard.resize({"live": 6})
        assert await settled(yard) == {"eval": 6, "queued": 2}


async def test_a_stage_of_size_zero_stands_still_and_goes_on_when_it_grows(tmp_path: Path):
    async with site(tmp_path, DO_IT, settings=replace(SETTINGS, eval_slots=0)) as yard:
        rollout_id = await yard.submit(shell_task())
        await yard.until(rollout_id, State.EVAL)
        assert await settled(yard) == {"eval": 1}
        yard.yard.resize({"eval": 1})
        await yard.ended(rollout_id)


async def test_a_runs_quota_leaves_room_for_others(tmp_path: Path):
    async with site(tmp_path, says(shell("sleep 60")), run=Run("run", max_live=2)) as yard:
        await yard.store.put_run(Run("other"), {"id": "other"})
        yard.yard.know(Run("other"))
        for _ in range(5):
            await yard.submit(shell_task())
        await yard.submit(shell_task(), "guest", run="other")
        await yard.until("guest", State.RUN)
        live = [attempt.run.id for attempt in yard.yard.live.values()]
        assert sorted(live) == ["other", "run", "run"]
