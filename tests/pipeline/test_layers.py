"""A set-up runs once and is shared by n rollouts: counted by environments that count their calls."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollyard.core import Blame, Json, Limits, Outcome, Rollout, Run, SandboxOptions, Score, State, Task
from rollyard.core.failure import SandboxStartFailed, SetupFailed
from rollyard.envs import EnvContext, Environment, Environments, Evidence, Plan, Start
from rollyard.envs.base import ArtifactRule
from rollyard.pipeline.attempts import sandbox_start
from rollyard.pipeline.retry import delay_s
from rollyard.sandbox.breaker import FAILURES
from tests.pipeline.site import SETTINGS, Site, finish, open_site, quick, says, shell, shell_task

pytestmark = pytest.mark.slow

DO_IT = says(shell("cat given.txt /tmp/also.txt >> mine.txt"), finish())
EIGHT = replace(SETTINGS, init_slots=8, max_live=32)


class Counted(Environment):
    """Counts its set-ups. RUN adds to what it finds, and EVAL expects exactly one set-up and one RUN."""

    name = "counted"
    tools = ("shell", "finish")

    def __init__(self) -> None:
        self.prepared = 0
        self.started = asyncio.Event()
        self.gate: asyncio.Event | None = None

    def plan(self, task: Task) -> Plan:
        return Plan(artifacts=(ArtifactRule("mine", "/workspace/mine.txt"),))

    async def prepare(self, context: EnvContext) -> None:
        self.prepared += 1
        self.started.set()
        if self.gate is not None:
            await self.gate.wait()
        result = await context.run("echo given > given.txt; echo also > /tmp/also.txt; pwd", timeout_s=10)
        assert result.status == 0

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "do it"},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        result = await context.run("cat mine.txt", timeout_s=10)
        return Score(float(result.stdout == b"given\nalso\n"))


class Failing(Counted):
    async def prepare(self, context: EnvContext) -> None:
        self.prepared += 1
        await asyncio.sleep(0)
        raise SetupFailed("there is no such package")


class Unshared(Counted):
    """Leaves a process, so its set-up cannot be shared."""

    def layer_key(self, task: Task) -> str | None:
        return None


class Slow(Counted):
    async def prepare(self, context: EnvContext) -> None:
        self.prepared += 1
        await context.run("sleep 60", timeout_s=60)


def counted_task(**data: Json) -> Task:
    limits = Limits(init_s=30, run_s=20, eval_s=20, tool_s=10, model_s=10, max_turns=8)
    return Task("counted", {"n": 1, **data}, limits=limits)


def pipeline_of(tmp_path: Path, environment: Environment, **options: Any) -> Any:
    environments = Environments({"counted": environment})
    return open_site(tmp_path, DO_IT, settings=options.pop("settings", EIGHT), environments=environments, **options)


async def group(site: Site, task: Task, size: int = 8) -> list[Rollout]:
    ids = [await site.submit(task) for _ in range(size)]
    return [await site.ended(rollout_id) for rollout_id in ids]


def completed(rollouts: list[Rollout]) -> None:
    for rollout in rollouts:
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending.failure
        assert rollout.ending.score is not None
        assert rollout.ending.score.reward == 1.0


async def test_a_set_up_runs_once_for_a_group_a_later_group_and_a_restarted_service(tmp_path: Path):
    environment = Counted()
    async with pipeline_of(tmp_path, environment) as site:
        first = await group(site, counted_task())
        completed(first)
        assert environment.prepared == 1
        endings = [rollout.ending for rollout in first if rollout.ending]
        assert sorted(ending.summary.layer for ending in endings) == ["found"] * 7 + ["made"]
        (maker,) = (ending for ending in endings if ending.summary.layer == "made")
        assert 0 < maker.timings.prepare_s <= maker.timings.init_s
        completed(await group(site, counted_task(), 4))
        assert environment.prepared == 1
        site.nothing_left()
    again = Counted()
    async with pipeline_of(tmp_path, again) as site:
        completed(await group(site, counted_task(), 2))
        assert again.prepared == 0
        completed(await group(site, counted_task(n=2), 1))
        assert again.prepared == 1, "another task's data: another set-up"
        layers = site.pipeline.resources.layers["bubblewrap"]
        assert (layers.made, len(layers)) == (1, 2)


async def test_members_do_not_see_each_others_files(tmp_path: Path):
    environment = Counted()
    async with pipeline_of(tmp_path, environment) as site:
        completed(await group(site, counted_task()))  # each member's mine.txt was appended to once
        (layer,) = (path for path in site.runtime.layer_root.iterdir() if not path.name.startswith("."))
        assert not list(layer.rglob("mine.txt"))


async def test_a_set_up_that_fails_runs_once_and_fails_each_rollout_with_blame_task(tmp_path: Path):
    environment = Failing()
    async with pipeline_of(tmp_path, environment) as site:
        for rollout in await group(site, counted_task()):
            assert rollout.ending is not None
            failure = rollout.ending.failure
            assert failure is not None
            assert (failure.code, failure.blame) == ("setup_failed", Blame.TASK)
            assert failure.detail == "there is no such package"
            assert rollout.attempt == 1
        assert environment.prepared == 1
        site.nothing_left()
        assert not list(site.runtime.layer_root.glob("[!.]*"))


async def test_a_cancelled_rollouts_set_up_is_made_by_another_rollout(tmp_path: Path):
    environment = Counted()
    environment.gate = asyncio.Event()
    async with pipeline_of(tmp_path, environment) as site:
        first = await site.submit(counted_task())
        await environment.started.wait()
        others = [await site.submit(counted_task()) for _ in range(3)]
        for other in others:
            await site.until(other, State.INIT)
        environment.started.clear()
        await site.pipeline.cancel(first)
        await environment.started.wait()
        environment.gate.set()
        completed([await site.ended(other) for other in others])
        cancelled = await site.ended(first)
        assert cancelled.ending is not None
        assert cancelled.ending.outcome is Outcome.CANCELLED
        assert environment.prepared == 2
        site.nothing_left()


async def test_waiting_for_another_rollouts_set_up_does_not_count_against_init_s(tmp_path: Path):
    environment = Counted()
    environment.gate = asyncio.Event()
    async with pipeline_of(tmp_path, environment) as site:
        maker = await site.submit(counted_task())
        await environment.started.wait()
        waiter = await site.submit(quick(counted_task(), init_s=1.0))
        await site.until(waiter, State.INIT)
        await asyncio.sleep(1.2)  # longer than the waiter's init_s
        environment.gate.set()
        completed([await site.ended(maker), await site.ended(waiter)])


async def test_a_set_up_that_is_too_slow_is_remembered_for_its_deadline_only(tmp_path: Path):
    environment = Slow()
    async with pipeline_of(tmp_path, environment) as site:
        for rollout in await group(site, quick(counted_task(), init_s=1.0), 4):
            assert rollout.ending is not None
            assert rollout.ending.failure is not None
            assert rollout.ending.failure.code == "setup_deadline"
        assert environment.prepared == 1
        longer = await site.rolled(quick(counted_task(), init_s=1.5))
        assert longer.ending is not None
        assert environment.prepared == 2, "it might have been quick enough for this one"
        site.nothing_left()


async def test_an_environment_without_a_layer_key_is_set_up_for_each_rollout(tmp_path: Path):
    environment = Unshared()
    async with pipeline_of(tmp_path, environment) as site:
        rollouts = await group(site, counted_task(), 3)
        completed(rollouts)
        assert environment.prepared == 3
        assert {rollout.ending.summary.layer for rollout in rollouts if rollout.ending} == {""}


async def test_shell_tasks_that_differ_only_in_their_instruction_share_a_set_up(tmp_path: Path):
    async with open_site(tmp_path, says(shell("cp given.txt done"), finish())) as site:
        one = shell_task(files={"given.txt": "given"}, setup=["chmod +x given.txt"])
        other = shell_task("please do it", ["test -x done"], files={"given.txt": "given"}, setup=["chmod +x given.txt"])
        plain = shell_task(checks=["test ! -e done"])
        for task, layer in ((one, "made"), (other, "found"), (plain, "")):
            rollout = await site.rolled(task)
            assert rollout.ending is not None
            assert rollout.ending.score is not None, rollout.ending.failure
            assert (rollout.ending.score.reward, rollout.ending.summary.layer) == (1.0, layer)


async def test_a_set_up_under_other_limits_is_another_one(tmp_path: Path):
    """This one succeeds under each limit, and writes something else."""
    async with open_site(tmp_path, says(finish())) as site:
        task = shell_task(checks=["test $(cat given.txt) -gt 64"], setup=["(ulimit -n) > given.txt"])
        low = await site.rolled(replace(task, sandbox=replace(task.sandbox, open_files=64)))
        assert low.ending is not None and low.ending.score is not None
        assert (low.ending.score.reward, low.ending.summary.layer) == (0.0, "made")
        for layer in ("made", "found"):
            rollout = await site.rolled(task)
            assert rollout.ending is not None and rollout.ending.score is not None
            assert (rollout.ending.score.reward, rollout.ending.summary.layer) == (1.0, layer)


async def test_owners_do_not_share_a_set_up(tmp_path: Path):
    environment = Counted()
    async with pipeline_of(tmp_path, environment) as site:
        for run, prepared in ((Run("a1", owner="a"), 1), (Run("a2", owner="a"), 1), (Run("b", owner="b"), 2)):
            await site.store.put_run(run, {"id": run.id})
            site.pipeline.register_run(run)
            completed([await site.rolled(counted_task(), run=run.id)])
            assert environment.prepared == prepared


async def test_a_layer_beyond_the_bound_is_pruned_once_its_rollouts_are_done(tmp_path: Path):
    environment = Counted()
    async with pipeline_of(tmp_path, environment, layer_bytes=0) as site:
        completed(await group(site, counted_task(n=1)))
        completed(await group(site, counted_task(n=2), 1))
        layers = site.pipeline.resources.layers["bubblewrap"]
        assert (len(layers), layers.pruned) == (1, 1)


async def test_a_runtime_that_keeps_failing_is_not_tried_and_the_reason_is_reported(tmp_path: Path):
    settings = replace(SETTINGS, max_attempts=1)
    async with open_site(tmp_path, DO_IT, settings=settings) as site:
        image = tmp_path / "broken.sif"
        image.write_bytes(b"no image at all")
        broken = replace(shell_task(), sandbox=SandboxOptions(image=str(image)))
        details: list[str] = []
        for _ in range(FAILURES + 1):
            rollout = await site.rolled(broken)
            assert rollout.ending is not None
            assert rollout.ending.failure is not None
            assert rollout.ending.failure.code == "sandbox_start_failed"
            details.append(rollout.ending.failure.detail)
        assert "times in a row" not in details[-2]
        assert "times in a row" in details[-1] and details[-2] in details[-1]
        good = await site.rolled(shell_task(checks=["true"]))
        assert good.ending is not None
        assert good.ending.score is not None, "the breaker is closed for another image"


@pytest.mark.parametrize("has_waited_long", [False, True])
async def test_only_a_start_with_enough_time_counts_against_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_waited_long: bool
):
    if has_waited_long:
        monkeypatch.setattr(sandbox_start, "FAIR_START_S", 0.0)
    async with open_site(tmp_path, DO_IT, settings=replace(SETTINGS, max_attempts=1)) as site:
        for _ in range(FAILURES):
            rollout = await site.rolled(quick(shell_task(), init_s=0.001))
            assert rollout.ending is not None and rollout.ending.failure is not None
            assert rollout.ending.failure.code == "sandbox_start_failed"
        good = await site.rolled(shell_task(checks=["true"]))
        assert good.ending is not None
        assert (good.ending.score is None) == has_waited_long


@pytest.mark.parametrize("retry_after_s", [0.0, 30.0])
def test_a_retry_waits_as_long_as_the_breaker_requires(retry_after_s: float):
    wait_s = delay_s(SandboxStartFailed("open", retry_after_s=retry_after_s).failure("init"), 1, 0, 3)
    assert wait_s is not None
    assert wait_s >= retry_after_s
