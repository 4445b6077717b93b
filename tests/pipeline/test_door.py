"""The doorway of a task with an agent program: no model before RUN, and a sandbox whatever the plan says."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from rollyard.agents.base import AgentContext
from rollyard.core import AgentSpec, Blame, Deadline, Outcome, Score, Task
from rollyard.envs import EnvContext, Environment, Environments, Evidence, Plan, Start
from rollyard.tools.function import tool
from tests.agents.harness_parts import PROGRAM, plays, pythons, runs
from tests.pipeline.site import site

ASK = """
import json, sys, urllib.request, urllib.error
try:
    urllib.request.urlopen(sys.argv[1] + "/v1/models")
except urllib.error.HTTPError as error:
    print(error.code, json.load(error)["error"]["code"], error.headers["x-should-retry"])
"""


@dataclass
class Talk(Environment):
    """Needs no sandbox of its own; in `init` it asks the doorway of the one that it gets."""

    name: ClassVar[str] = "talk"
    said: list[str] = field(default_factory=list)
    brings_tools: bool = False

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        if context.sandbox is not None and context.sandbox.doorway is not None:
            python = await pythons().get()
            url = context.sandbox.doorway.url
            done = await context.sandbox.exec([*python.argv, "-c", ASK, url], timeout_s=10, env=python.env)
            self.said.append((done.stdout + done.stderr).decode().strip())
        return Start(({"role": "user", "content": "say it"},), tools=(weigh,) if self.brings_tools else ())

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        return Score(float(evidence.answer == "it"))


@tool
async def weigh(thing: str) -> str:
    """Weighs a thing."""
    return f"{thing}: 7 kg"


def talk_task() -> Task:
    return Task("talk", agent=AgentSpec("command", runs(PROGRAM)))


async def test_a_program_gets_a_sandbox_and_its_model_only_in_run(tmp_path: Path):
    talk = Talk()
    async with site(tmp_path, plays(["it"]), environments=Environments({"talk": talk}), pythons=pythons()) as yard:
        rollout = await yard.rolled(talk_task())
    assert rollout.ending is not None and rollout.ending.score is not None
    assert (rollout.ending.outcome, rollout.ending.score.reward) == (Outcome.COMPLETED, 1.0)
    assert talk.said == ["503 ended false"]


async def test_tools_that_only_we_could_call_are_refused_not_dropped(tmp_path: Path):
    environments = Environments({"talk": Talk(brings_tools=True)})
    async with site(tmp_path, plays(["it"]), environments=environments, pythons=pythons()) as yard:
        rollout = await yard.rolled(talk_task())
    assert rollout.ending is not None and rollout.ending.failure is not None
    assert (rollout.ending.failure.code, rollout.ending.failure.blame) == ("task_invalid", Blame.TASK)
    assert "brings tools of its own" in rollout.ending.failure.detail


def test_a_context_has_one_of_the_two_and_says_which():
    context = AgentContext(Task("x"), "r", object(), {}, None, Deadline())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="set needs_gateway"):
        _ = context.gateway
    assert context.conversation is context.model
