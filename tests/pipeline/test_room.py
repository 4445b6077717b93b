"""A machine that is short of memory or disk: rollouts wait, no deadline runs, and the wait is visible."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollyard.core import Outcome, State
from rollyard.sandbox.runtimes.bubblewrap import BubblewrapRuntime
from tests.pipeline.site import finish, says, shell, shell_task, site


def set_pressure(runtime: Any, *, is_low: bool) -> None:
    """Reports memory pressure as the resource monitor does."""
    runtime._limiter._on_pressure(is_low, {})


async def test_waiting_for_room_counts_against_no_deadline(tmp_path: Path) -> None:
    async with site(tmp_path, says(shell("touch done"), finish())) as pipeline:
        assert isinstance(pipeline.runtime, BubblewrapRuntime)
        set_pressure(pipeline.runtime, is_low=True)
        task = shell_task()
        task = replace(task, limits=replace(task.limits, init_s=1.0))
        rollout_id = await pipeline.submit(task)
        async with asyncio.timeout(30):
            while pipeline.runtime.waiting == 0:
                await asyncio.sleep(0.02)
        await asyncio.sleep(2.0)  # twice init_s
        assert (await pipeline.store.get(rollout_id)).state is State.INIT
        set_pressure(pipeline.runtime, is_low=False)
        rollout = await pipeline.ended(rollout_id)
        assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED
        assert rollout.attempt == 1 and not rollout.lost and pipeline.runtime.waiting == 0


async def test_a_cancel_ends_the_wait_for_room(tmp_path: Path) -> None:
    async with site(tmp_path, says(finish())) as pipeline:
        assert isinstance(pipeline.runtime, BubblewrapRuntime)
        set_pressure(pipeline.runtime, is_low=True)
        rollout_id = await pipeline.submit(shell_task())
        async with asyncio.timeout(30):
            while pipeline.runtime.waiting == 0:
                await asyncio.sleep(0.02)
        await pipeline.pipeline.cancel(rollout_id)
        rollout = await pipeline.ended(rollout_id)
        assert rollout.ending is not None and rollout.ending.outcome is Outcome.CANCELLED
        assert pipeline.runtime.waiting == 0
        set_pressure(pipeline.runtime, is_low=False)
        pipeline.nothing_left()
