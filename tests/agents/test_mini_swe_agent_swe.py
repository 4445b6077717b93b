"""A swe task solved by the real mini-SWE-agent: the issue comes from the environment, and swebench grades the patch."""

from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.agents.installation import AgentInstalls
from rollyard.agents.registry import Agents
from rollyard.core import AgentSpec, Outcome
from rollyard.envs.registry import Environments
from rollyard.service.schemas.task import to_task
from rollyard.tokens import verify
from tests.agents.harness_parts import call, installed, plays, pythons
from tests.envs.swe_repos import FAIL_TO_PASS, build
from tests.pipeline.site import open_site

NAME = "mini-swe-agent"
TURNS = (
    "I look at the code first.\n" + call("bash", command="git log --oneline | head -3; cat calc.py"),
    "It subtracts.\n" + call("bash", command="sed -i 's/a - b/a + b/' calc.py && git diff"),
    "I try it.\n" + call("bash", command="python3 -c 'import calc; print(calc.add(2, 3))'"),
    "Done.\n" + call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first run downloads it and builds the Python


@pytest.fixture(scope="session")
def installs() -> AgentInstalls:
    return installed(NAME)


async def test_it_resolves_an_issue_in_one_exact_trace(tmp_path: Path, installs: AgentInstalls):
    calc = build(tmp_path / "calc")
    task = to_task(calc.body(FAIL_TO_PASS=FAIL_TO_PASS[:1]), {})
    limits = replace(task.limits, init_s=60, run_s=60, eval_s=60)
    task = replace(task, agent=AgentSpec(NAME), limits=limits)
    async with (
        Environments() as environments,
        open_site(
            tmp_path, plays(TURNS), agents=Agents(installs=installs), pythons=pythons(), environments=environments
        ) as site,
    ):
        rollout = await site.rolled(task, within_s=120)
        trajectory = await site.store.trajectory(rollout.id)
        await site.idle()
        site.nothing_left()
    assert rollout.ending is not None and trajectory is not None
    assert (rollout.ending.outcome, rollout.ending.failure) == (Outcome.COMPLETED, None), trajectory.info["harness"]
    assert rollout.ending.score is not None
    assert rollout.ending.score.reward == 1.0
    assert rollout.ending.score.components == {"fail_to_pass": 1.0, "pass_to_pass": 1.0}
    verify(trajectory)
    assert (len(trajectory.traces), trajectory.turns, rollout.ending.is_trainable) == (1, 4, True)
    assert [artifact.name for artifact in trajectory.artifacts] == ["patch"]
    instruction = str(trajectory.messages[1]["content"])
    assert "add() subtracts: {add(2, 3)} is -1" in instruction and "test_add" not in instruction
    transcript = "\n".join(str(message.get("content")) for message in trajectory.messages)
    assert "+    return a + b" in transcript and "the fix" not in transcript
