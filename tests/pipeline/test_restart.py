"""What a restart recovers, and what a drain leaves."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.core import Outcome, State
from tests.pipeline.site import SETTINGS, finish, open_site, quick, says, shell, shell_task

pytestmark = pytest.mark.slow

DO_IT = says(shell("touch done"), finish())


async def test_rollouts_given_back_at_a_stop_run_after_the_restart_and_lose_no_attempt(tmp_path: Path):
    settings = replace(SETTINGS, max_attempts=1)
    async with open_site(tmp_path, says(shell("sleep 60")), settings=settings) as site:
        rollout_id = await site.submit(shell_task())
        await site.until(rollout_id, State.RUN)
    async with open_site(tmp_path, DO_IT, settings=settings) as site:
        rollout = await site.ended(rollout_id)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED
        assert (rollout.attempt, rollout.excused) == (2, 1)
        assert [lost.code for lost in rollout.lost] == ["drained"]


async def test_a_rollout_that_had_ended_run_is_only_evaluated_after_a_restart(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, settings=replace(SETTINGS, eval_slots=0)) as site:
        rollout_id = await site.submit(shell_task())
        await site.until(rollout_id, State.EVAL)
    async with open_site(tmp_path, says("must not be asked")) as site:
        rollout = await site.ended(rollout_id)
        assert rollout.ending is not None
        assert rollout.ending.score is not None
        assert rollout.ending.score.reward == 1.0
        assert rollout.attempt == 1
        assert rollout.ending.summary.turns == 2
        assert not [call for call in site.engines[0].requests if call.session_id == rollout_id]


async def test_many_orderly_restarts_do_not_lose_a_waiting_evaluation(tmp_path: Path):
    waiting = replace(SETTINGS, eval_slots=0, max_attempts=1)
    async with open_site(tmp_path, DO_IT, settings=waiting) as site:
        rollout_id = await site.submit(shell_task())
        await site.until(rollout_id, State.EVAL)
    for _ in range(3):
        async with open_site(tmp_path, DO_IT, settings=waiting) as site:
            assert site.store.recovered.evals == (rollout_id,)
    async with open_site(tmp_path, DO_IT, settings=replace(waiting, eval_slots=1)) as site:
        rollout = await site.ended(rollout_id)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending.failure


async def test_a_drain_lets_run_end_and_gives_back_what_has_not_started_it(tmp_path: Path):
    settings = replace(SETTINGS, run_slots=1)
    async with open_site(tmp_path, DO_IT, settings=settings) as site:
        site.engines[0]._work.open.clear()  # its calls wait
        running = await site.submit(quick(shell_task(), run_s=60, model_s=60))
        await site.until(running, State.RUN)
        waiting = await site.submit(shell_task())
        await site.until(waiting, State.READY)
        queued = [await site.submit(shell_task()) for _ in range(6)]
        drain = asyncio.create_task(site.pipeline.drain(within_s=60))
        await asyncio.sleep(0)  # it has stopped what has not started RUN
        site.engines[0]._work.open.set()
        await drain
        assert (await site.store.get(running)).state is State.ENDED
        requeued = await site.store.get(waiting)
        assert (requeued.state, requeued.attempt, requeued.excused) == (State.QUEUED, 2, 1)
        assert {(await site.store.get(other)).state for other in queued} == {State.QUEUED}
        site.nothing_left()


async def test_a_second_signal_ends_at_once_and_loses_nothing(tmp_path: Path):
    async with open_site(tmp_path, says(shell("sleep 60"))) as site:
        rollout_id = await site.submit(shell_task())
        await site.until(rollout_id, State.RUN)
        drain = asyncio.create_task(site.pipeline.drain(within_s=60))
        await asyncio.sleep(0)
        site.pipeline.stop_now()
        await drain
        assert (await site.store.get(rollout_id)).state is State.QUEUED
        site.nothing_left()
