"""Rescoring: what may be scored again, what it holds meanwhile, and what never gets a score."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.agents import Agent
from rollyard.core import Outcome, State
from rollyard.core.failure import InvalidRequest, UnknownAgent
from rollyard.engines import RouterSettings
from rollyard.testing.script import Reply
from tests.pipeline.site import SETTINGS, finish, open_site, says, shell, shell_task

pytestmark = pytest.mark.slow

DO_IT = says(shell("touch done"), finish())


async def test_a_run_interrupted_by_infrastructure_cannot_get_a_reward_later(tmp_path: Path):
    script = says(shell("touch done"), Reply(text="hello", fault="fewer_logprobs"))
    settings = replace(SETTINGS, max_attempts=1)
    async with open_site(
        tmp_path, script, settings=settings, router_settings=RouterSettings(engine_wait_s=0.5)
    ) as site:
        rollout = await site.rolled(shell_task(checks=["true"]))
        assert rollout.ending is not None
        assert rollout.ending.score is None
        assert await site.store.trajectory(rollout.id) is not None, "its tokens are available"
        with pytest.raises(InvalidRequest, match="cut short"):
            await site.pipeline.rescore(rollout.id)
        assert (await site.store.get(rollout.id)).scores == ()


async def test_a_rollout_is_rescored_after_its_agent_was_uninstalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with open_site(tmp_path, DO_IT) as site:
        rollout = await site.rolled(shell_task())

        def uninstalled(name: str) -> Agent:
            raise UnknownAgent(f"there is no agent {name!r}")

        monkeypatch.setattr(site.pipeline.resources.agents, "get", uninstalled)
        again = await site.pipeline.rescore(rollout.id)
        assert [score["reward"] for score in again.scores] == [1.0]


async def test_the_lease_of_a_rescoring_sandbox_is_renewed(tmp_path: Path):
    settings = replace(SETTINGS, lease_s=1.0)
    async with open_site(tmp_path, DO_IT, settings=settings) as site:
        rollout = await site.rolled(shell_task(checks=["sleep 2.5; test -f done"]))
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED
        again = await site.pipeline.rescore(rollout.id)
        assert [score["reward"] for score in again.scores] == [1.0]


async def test_a_rescoring_takes_a_place_in_the_budget_of_live_sandboxes(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, settings=replace(SETTINGS, max_live=1)) as site:
        rollout = await site.rolled(shell_task())
        other = await site.submit(shell_task(setup=["sleep 60"]))
        await site.until(other, State.INIT)
        rescoring = asyncio.create_task(site.pipeline.rescore(rollout.id))
        third = await site.submit(shell_task())
        while not site.pipeline.pools()["live"]["waiting"]:  # type: ignore[index,call-overload]
            await asyncio.sleep(0)
        assert site.pipeline.eval_pool.active == 0, "it waits: the one place is taken"
        await site.pipeline.cancel(other)
        assert len((await rescoring).scores) == 1
        assert (await site.ended(third)).ending.outcome is Outcome.COMPLETED  # type: ignore[union-attr]
        site.nothing_left()
