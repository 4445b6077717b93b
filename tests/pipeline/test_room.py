"""A machine that is short of memory or disk: rollouts wait, no deadline runs, and the wait is visible."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollyard.core import Outcome, State
from rollyard.sandbox.runtimes.bubblewrap import BubblewrapRuntime
from tests.pipeline.site import finish, open_site, says, shell, shell_task


def set_pressure(runtime: Any, *, is_low: bool) -> None:
    """Reports memory pressure as the resource monitor does."""
    runtime._limiter._on_pressure(is_low, {})


async def test_waiting_for_room_counts_against_no_deadline(tmp_path: Path) -> None:
    async with open_site(tmp_path, says(shell("touch done"), finish())) as site:
        assert isinstance(site.runtime, BubblewrapRuntime)
        set_pressure(site.runtime, is_low=True)
        task = shell_task()
        task = replace(task, limits=replace(task.limits, init_s=3.0))
        rollout_id = await site.submit(task)
        async with asyncio.timeout(30):
            while site.runtime.waiting == 0:
                await asyncio.sleep(0.02)
        await asyncio.sleep(4.0)  # longer than init_s
        assert (await site.store.get(rollout_id)).state is State.INIT
        set_pressure(site.runtime, is_low=False)
        rollout = await site.ended(rollout_id)
        assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED
        assert rollout.attempt == 1 and not rollout.lost and site.runtime.waiting == 0


async def test_a_cancel_ends_the_wait_for_room(tmp_path: Path) -> None:
    async with open_site(tmp_path, says(finish())) as site:
        assert isinstance(site.runtime, BubblewrapRuntime)
        set_pressure(site.runtime, is_low=True)
        rollout_id = await site.submit(shell_task())
        async with asyncio.timeout(30):
            while site.runtime.waiting == 0:
                await asyncio.sleep(0.02)
        await site.pipeline.cancel(rollout_id)
        rollout = await site.ended(rollout_id)
        assert rollout.ending is not None and rollout.ending.outcome is Outcome.CANCELLED
        assert site.runtime.waiting == 0
        set_pressure(site.runtime, is_low=False)
        site.nothing_left()
