"""Agents and hooks for trying environments: oracle, no-op, artifacts made after RUN, and the working directory."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollyard.core import AgentSpec, Blame, Json, Limits, Outcome, Score, Task
from rollyard.core.failure import EvalDeadline, MemoryLimit, TaskInvalid
from rollyard.envs import ArtifactRule, EnvContext, Environment, Environments, Evidence, Plan, Solution, Start
from rollyard.pipeline.attempts import stages
from rollyard.pipeline.local_rollout import play
from rollyard.tools.base import Tool
from tests.pipeline.site import Site, finish, open_site, says, shell, shell_task

pytestmark = pytest.mark.slow

LIMITS = Limits(init_s=20, run_s=20, eval_s=20, tool_s=10, model_s=10, max_turns=8)


class Made(Environment):
    """Its artifact is made after RUN, its workdir is a folder of its own, and its `init` passes info to EVAL."""

    name = "made"
    tools: ClassVar[tuple[str, ...]] = ("shell", "editor", "finish")

    def plan(self, task: Task) -> Plan:
        return Plan(workdir="/workspace/inner", artifacts=(ArtifactRule("made", "/tmp/made"),))

    async def prepare(self, context: EnvContext) -> None:
        assert context.sandbox is not None
        await context.sandbox.write("/workspace/inner/given", b"as given\n")

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "do it"},), info={"told": "by init"})

    async def collect(self, context: EnvContext) -> None:
        assert context.sandbox is not None
        how = context.task.data.get("collect")
        if how == "hang":
            await asyncio.sleep(3600)
        if how == "spend":
            raise MemoryLimit("the sandbox's memory limit")
        if how == "late":
            raise TimeoutError("its own server did not answer")
        if how == "break":
            raise ValueError("no such thing")
        await context.run("pwd > /tmp/made; ls >> /tmp/made", timeout_s=10)

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        if "solution" not in context.task.data:
            raise TaskInvalid("made: no solution")
        result = await tools["shell"].call({"command": str(context.task.data["solution"])}, timeout_s=10)
        assert not result.is_error
        return Solution("42")

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        assert context.sandbox is not None
        info = evidence.trajectory.info
        if context.task.data.get("eval") == "hang":
            raise EvalDeadline("the grader did not decide")
        if "made" not in evidence.artifacts:
            return Score(0.0, metrics={"made": 0.0})
        place, *names = (await context.sandbox.read("/tmp/made", limit_bytes=1000)).decode().split()
        parts = {
            "place": float(place == "/workspace/inner"),
            "done": float("done" in names),
            "told": float(info.get("told") == "by init"),
            "answered": float(evidence.answer == "42"),
        }
        return Score(min(parts.values()), components=parts)


class Nested(Environment):
    """An artifact below another one."""

    name = "nested"
    tools: ClassVar[tuple[str, ...]] = ("shell", "finish")

    def plan(self, task: Task) -> Plan:
        return Plan(artifacts=(ArtifactRule("all", "all"), ArtifactRule("out", "all/a/out")))

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "do it"},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        result = await context.run("test ! -e key && readlink all/a", timeout_s=10)
        return Score(float(result.stdout == b"../key\n"), metrics={"artifacts": len(evidence.artifacts)})


def made_task(agent: str = "", **data: Json) -> Task:
    return Task("made", data, agent=AgentSpec(agent), limits=LIMITS)


def scored(rollout: Any) -> Score:
    assert rollout.ending is not None
    assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending.failure
    assert rollout.ending.score is not None
    return rollout.ending.score


def pipeline_of(folder: Path, *turns: str, engines: int = 1) -> Any:
    return open_site(folder, says(*turns), environments=Environments({"made": Made()}), engines=engines)


async def test_the_oracle_applies_the_environments_solution_and_needs_no_engine(tmp_path: Path):
    async with pipeline_of(tmp_path, engines=0) as site:
        rollout = await site.rolled(made_task("oracle", solution="touch done"))
        assert scored(rollout).reward == 1.0
        trajectory = await site.store.trajectory(rollout.id)
        assert trajectory.traces == ()
        assert [message["role"] for message in trajectory.messages] == ["user", "assistant"]
        assert not rollout.ending.is_trainable, "there is nothing to train on"
        site.nothing_left()


async def test_the_noop_does_nothing(tmp_path: Path):
    async with pipeline_of(tmp_path, engines=0) as site:
        score = scored(await site.rolled(made_task("noop")))
        assert (score.reward, score.components["place"], score.components["done"]) == (0.0, 1.0, 0.0)


async def test_a_task_without_a_solution_has_no_oracle(tmp_path: Path):
    async with pipeline_of(tmp_path, engines=0) as site:
        ending = (await site.rolled(made_task("oracle"))).ending
        assert (ending.failure.code, ending.failure.blame) == ("task_invalid", Blame.TASK)
        assert "no solution" in ending.failure.detail
        assert ending.score is None


async def test_tools_and_checks_start_in_the_plans_workdir(tmp_path: Path):
    edit = {"command": "create", "path": "done", "file_text": "x"}
    edited = "<tool_call>\n" + json.dumps({"name": "str_replace_editor", "arguments": edit}) + "\n</tool_call>"
    async with pipeline_of(
        tmp_path, shell('test "$PWD" = /workspace/inner && cat given'), edited, finish("42")
    ) as site:
        rollout = await site.rolled(made_task())
        assert scored(rollout).components == {"place": 1.0, "done": 1.0, "told": 1.0, "answered": 1.0}
        trajectory = await site.store.trajectory(rollout.id)
        assert "as given" in str([message for message in trajectory.messages if message["role"] == "tool"])


async def test_an_artifact_that_is_not_collected_in_time_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stages, "COLLECT_S", 0.2)
    async with pipeline_of(tmp_path, finish()) as site:
        assert scored(await site.rolled(made_task(collect="hang"))).metrics == {"made": 0.0}


async def test_a_link_in_an_artifact_does_not_redirect_another_artifact(tmp_path: Path):
    """The link made EVAL fail: an agent could avoid its score."""
    forge = "mkdir -p key/out all; echo forged > key/out/f; ln -s ../key all/a"
    environments = Environments({"nested": Nested()})
    async with open_site(tmp_path, says(shell(forge), finish()), environments=environments) as site:
        score = scored(await site.rolled(Task("nested", {}, limits=LIMITS)))
        assert (score.reward, score.metrics) == (1.0, {"artifacts": 2.0})


@pytest.mark.parametrize("how", ["break", "late"])
async def test_a_collect_that_raises_is_the_environments_fault_and_gives_no_score(tmp_path: Path, how: str):
    async with pipeline_of(tmp_path, finish()) as site:
        ending = (await site.rolled(made_task(collect=how))).ending
        assert ending.failure.code == "environment_broken"
        assert "made.collect" in ending.failure.detail
        assert ending.score is None


@pytest.mark.parametrize(
    ("data", "code", "stage"),
    [({"collect": "spend"}, "memory_limit", "run"), ({"eval": "hang"}, "eval_deadline", "eval")],
)
async def test_policy_failures_are_reported_and_scored_alike_with_and_without_a_service(
    tmp_path: Path, data: dict[str, Json], code: str, stage: str
):
    async with pipeline_of(tmp_path, engines=0) as site:
        served = (await site.rolled(made_task("noop", **data))).ending
        local = await play(site.pipeline.resources, made_task("noop", **data))
    assert local.failure is not None
    assert (local.failure.code, local.failure.stage, local.score) == (code, stage, Score(0.0))
    assert (served.failure.code, served.failure.stage) == (code, stage)


async def _shell(site: Site, agent: str, **data: Any) -> Any:
    task = shell_task(**data)
    return await site.rolled(Task("shell", task.data, agent=AgentSpec(agent), limits=task.limits))


async def test_a_shell_task_has_its_own_solution(tmp_path: Path):
    async with open_site(tmp_path, says(), engines=0) as site:
        assert scored(await _shell(site, "oracle", solution=["touch half", "mv half done"])).reward == 1.0
        assert scored(await _shell(site, "noop", solution=["touch done"])).reward == 0.0


async def test_a_shell_solution_that_fails_is_reported(tmp_path: Path):
    async with open_site(tmp_path, says(), engines=0) as site:
        ending = (await _shell(site, "oracle", solution=["echo oh no >&2; false"])).ending
        assert ending.failure.code == "task_invalid"
        assert "data.solution: 'echo oh no >&2; false' ended with status 1: oh no" in ending.failure.detail
        missing = (await _shell(site, "oracle")).ending
        assert "has no solution" in missing.failure.detail
