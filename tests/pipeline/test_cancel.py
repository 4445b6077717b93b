"""Cancel from every state: acknowledged at once, the sandbox proven gone, the engine freed."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.core import Deadline, Outcome, Rollout, Score, State, Task, Trajectory
from rollyard.core.failure import SetupFailed, Stalled
from rollyard.envs import EnvContext, Environment, Environments, Evidence, Start
from rollyard.pipeline.attempts import stages
from rollyard.pipeline.attempts.evaluation import evaluate
from rollyard.sandbox.launched_sandbox import LaunchedSandbox
from rollyard.testing.script import Reply
from tests.pipeline.site import SETTINGS, finish, open_site, quick, says, shell, shell_task

pytestmark = pytest.mark.slow

DO_IT = says(shell("touch done"), finish())
CASES = {
    "queued": (State.QUEUED, DO_IT, replace(SETTINGS, init_slots=0), {}),
    "init": (State.INIT, DO_IT, SETTINGS, {"setup": ["sleep 60"]}),
    "ready": (State.READY, DO_IT, replace(SETTINGS, run_slots=0), {}),
    "in a tool": (State.RUN, says(shell("sleep 60")), SETTINGS, {}),
    "in a model call": (State.RUN, says(Reply(text="x", latency_s=60.0)), SETTINGS, {}),
    "eval": (State.EVAL, DO_IT, SETTINGS, {"checks": ["sleep 60"]}),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_cancelled_rollout_ends_once_and_leaves_nothing(tmp_path: Path, name: str):
    state, script, settings, data = CASES[name]
    async with open_site(tmp_path, script, settings=settings) as site:
        rollout_id = await site.submit(quick(shell_task(**data), tool_s=60, eval_s=60))
        await site.until(rollout_id, state)
        if name == "in a model call":
            await site.engines[0].busy()
        await site.pipeline.cancel(rollout_id)
        rollout = await site.ended(rollout_id)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.CANCELLED
        assert rollout.ending.score is None
        await site.idle()
        site.nothing_left()
        assert not list((tmp_path / "sandboxes").glob("sbx_*")), "its folder is gone"
        await site.engines[0].idle()  # the engine has stopped the call


async def test_a_cancel_is_idempotent_and_does_not_change_an_ended_rollout(tmp_path: Path):
    async with open_site(tmp_path, DO_IT) as site:
        rollout = await site.rolled(shell_task())
        again = await site.pipeline.cancel(rollout.id)
        assert again is not None
        assert again.ending == rollout.ending


async def test_a_cancel_before_the_submit_applies(tmp_path: Path):
    async with open_site(tmp_path, DO_IT) as site:
        assert await site.pipeline.cancel("early", run="run") is None
        rollout = await site.rolled(shell_task(), rollout_id="early")
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.CANCELLED


async def test_deleting_a_run_ends_all_its_rollouts(tmp_path: Path):
    async with open_site(tmp_path, says(shell("sleep 60"))) as site:
        ids = [await site.submit(shell_task()) for _ in range(12)]
        await site.until(ids[0], State.RUN)
        await site.pipeline.delete_run("run")
        await site.idle()
        site.nothing_left()
        assert (await site.store.list(runs=["run"])).rollouts == ()


async def test_a_cancel_during_admission_wakes_waiters(tmp_path: Path):
    async with open_site(tmp_path, DO_IT) as site:
        for number in range(30):
            rollout_id = await site.submit(shell_task(), f"r{number}")
            waiting = asyncio.create_task(site.pipeline.wait(rollout_id, 60))
            for _ in range(number % 5):
                await asyncio.sleep(0)
            await site.pipeline.cancel(rollout_id)
            async with asyncio.timeout(90):
                rollout = await waiting
            assert rollout.ending is not None
            assert rollout.ending.outcome is Outcome.CANCELLED
        await site.idle()
        ended = [event for event in site.pipeline.event_log._ring if event and event.state is State.ENDED]
        assert len(ended) == 30, "each end is published once"


async def test_a_cancel_while_an_attempt_is_given_back_is_not_lost(tmp_path: Path):
    async with open_site(tmp_path, says(shell("sleep 60"))) as site:
        rollout_id = await site.submit(quick(shell_task(), tool_s=60))
        await site.until(rollout_id, State.RUN)
        site.pipeline.live[rollout_id].stop(Stalled("no progress"))  # it will be retried
        await site.pipeline.cancel(rollout_id)
        rollout = await site.ended(rollout_id)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.CANCELLED
        assert [lost.code for lost in rollout.lost] == ["stalled"]
        await site.idle()
        site.nothing_left()
        assert [event.state for event in site.pipeline.event_log._ring if event].count(State.ENDED) == 1


class Failing(Environment):
    """Fails in the stage that it is given, or in no stage."""

    name = "failing"
    tools = ("shell", "finish")

    def __init__(self, fails_in: str) -> None:
        self._fails_in = fails_in

    async def prepare(self, context: EnvContext) -> None:
        assert context.sandbox is not None
        await context.sandbox.write("/workspace/a", b"a")
        if self._fails_in == "prepare":
            raise SetupFailed("as told")

    async def init(self, context: EnvContext) -> Start:
        if self._fails_in == "init":
            raise SetupFailed("as told")
        return Start(({"role": "user", "content": "do it"},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        return Score(1.0)


@pytest.mark.parametrize("stage", ["prepare", "init", "eval"])
async def test_a_cancel_while_a_stage_ends_its_sandbox_waits_until_it_is_gone(tmp_path: Path, stage: str):
    async with open_site(tmp_path, DO_IT, environments=Environments({"failing": Failing(stage)})) as site:
        rollout = Rollout("r", site.run.id, Task("failing"))
        resources, clock = site.pipeline.resources, Deadline(30)
        if stage == "eval":
            trajectory = Trajectory("r", 1, (), ())
            work = evaluate(
                resources.resolve(rollout.task), rollout.id, trajectory, clock, lease_s=60, watch=lambda _: None
            )
        else:
            work = stages.init(resources.resolve(rollout.task), rollout.id, clock, owner="", lease_s=60)
        task = asyncio.ensure_future(work)
        ending: list[LaunchedSandbox] = []
        while not ending:
            await asyncio.sleep(0)
            live = site.runtime._live.values()
            ending = [it for it in live if it.ending is not None and bool(it.spec.layers) == (stage == "init")]
        assert ending[0].end is None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ending[0].end is not None
        (layers,) = resources.layers.values()
        assert [layer.leases for layer in layers._entries.values()] == ([0] if stage == "init" else [])
