"""A rollout whose policy is paused: the pause counts against no bound, and nothing is lost."""

import asyncio
from pathlib import Path

from rollyard.core import Outcome
from rollyard.engines import Health, RouterSettings
from rollyard.testing.script import Reply
from rollyard.tokens import verify
from tests.pipeline.site import finish, open_site, quick, says, shell, shell_task


async def test_a_rollout_that_waited_for_new_weights_has_not_stalled(tmp_path: Path):
    async with open_site(tmp_path, says(Reply(shell("touch done"), stall_after=5), finish())) as site:
        rollout_id = await site.submit(quick(shell_task(), stall_s=2.0))
        await site.engines[0].busy()
        await site.router.policies.pause("default", holder="trainer")
        await asyncio.sleep(2.5)  # more than its stall bound, all of it in the pause
        # long enough for a stall check, and short enough for every bound
        site.engines[0].script = says(Reply(shell("touch done"), latency_s=0.3), finish())
        await site.router.policies.resume("default", 1)
        rollout = await site.ended(rollout_id)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED and rollout.attempt == 1 and not rollout.lost
        trajectory = await site.store.trajectory(rollout_id)
        assert trajectory is not None
        (trace,) = trajectory.traces
        first = trace.spans[0]
        assert list(trace.versions[first.start : first.end]) == [0] * 5 + [1] * (first.end - first.start - 5)
        site.nothing_left()


async def test_a_rollout_whose_engine_was_started_again_keeps_its_reward_but_is_not_trained_on(tmp_path: Path):
    no_watch = RouterSettings(engine_wait_s=20.0, watch_s=600.0)  # so that only a reply can reveal it
    async with open_site(tmp_path, says(shell("touch done"), finish()), router_settings=no_watch) as site:
        (engine,) = site.engines
        await site.router.policies.pause("default", holder="trainer")
        await site.router.policies.resume("default", 1)
        before = await site.rolled(shell_task())
        assert before.ending is not None and before.ending.is_trainable

        await engine.restart()
        rollout_id = await site.submit(shell_task())
        async with asyncio.timeout(30):
            while site.router.list()[0].health is not Health.QUARANTINED:
                await asyncio.sleep(0.02)
        await site.router.policies.resume("default", 2)
        rollout = await site.ended(rollout_id)
        trajectory = await site.store.trajectory(rollout_id)
        assert rollout.ending is not None and trajectory is not None
        verify(trajectory)
        (trace,) = trajectory.traces
        assert not trace.is_trainable and "was it restarted?" in (trace.untrainable_reason or "")
        assert 1 not in trace.versions, "no token has the version of the weights that are gone"
        assert rollout.ending.score is not None and not rollout.ending.is_trainable
        site.nothing_left()
