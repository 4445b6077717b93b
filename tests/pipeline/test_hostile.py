"""Results of a model or an environment that cannot be stored end one rollout, never the service."""

import json
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rollyard.core import Blame, Message, Outcome, SandboxOptions, Score, Task
from rollyard.core.score import TurnReward
from rollyard.envs.base import EnvContext, Environment, Evidence, Plan, Start
from rollyard.envs.registry import Environments
from rollyard.pipeline import Handler
from tests.pipeline.site import SETTINGS, finish, open_site, says, shell, shell_task
from tests.sandbox.runtimes import image

pytestmark = pytest.mark.slow

DO_IT = says(shell("touch done"), finish())
ONCE = replace(SETTINGS, max_attempts=1, eval_attempts=1)


def raw_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    "arguments",
    [r'{"answer": "\ud800"}', '{"answer": "a", "more": ' + '{"a": ' * 400 + "1" + "}" * 400 + "}"],
    ids=["half a surrogate pair", "400 levels"],
)
async def test_a_tool_call_that_cannot_be_stored_is_still_scored(tmp_path: Path, arguments: str):
    script = says(shell("touch done"), raw_call("finish", arguments), finish())
    async with open_site(tmp_path, script, settings=ONCE) as site:
        rollout = await site.rolled(shell_task())
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending.failure
        assert rollout.ending.score == Score(1.0, rollout.ending.score.components, rollout.ending.score.metrics)  # type: ignore[union-attr]
        trajectory = await site.store.trajectory(rollout.id)
        assert trajectory is not None
        json.dumps([dict(message) for message in trajectory.messages]).encode()
        site.nothing_left()


async def test_a_workspace_replaced_by_a_file_passes_no_check_and_crashes_nothing(tmp_path: Path):
    script = says(shell("cd / && mv /workspace /elsewhere && echo > /workspace && test -f /workspace"), finish())
    task = replace(shell_task(checks=["true"]), sandbox=SandboxOptions(image=image(is_sif=False)))
    async with open_site(tmp_path, script, settings=ONCE) as site:
        rollout = await site.rolled(task)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending.failure
        assert rollout.ending.score is not None
        assert (rollout.ending.score.reward, rollout.ending.score.metrics) == (0.0, {"workspace_kept": 0.0})


class Odd(Environment):
    """An environment whose `eval` returns what the task's name says."""

    name = "odd"

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "do it"},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Any:
        match context.task.data["case"]:
            case "a bare number":
                return 1.0
            case "nothing":
                return None
            case "a decimal":
                return Score(Decimal("0.5"), {"part": Decimal("0.5")})  # type: ignore[arg-type,dict-item]
            case "a span that is not there":
                return Score(1.0, turn_rewards=(TurnReward(7, 0, 1.0),))
            case _:
                raise RuntimeError("\ud800")


class Untidy(Odd, Handler):
    name = "untidy"

    async def run(self, context: Any, messages: Sequence[Message]) -> str:
        await context.conversation.turn(messages, (), max_tokens=64)
        context.info["object"] = object()
        return "stop"


@pytest.mark.parametrize("case", ["a bare number", "nothing", "a span that is not there", "a text that is none"])
async def test_an_eval_that_returns_no_valid_score_is_a_crashed_verifier(tmp_path: Path, case: str):
    async with open_site(tmp_path, says("hello"), settings=ONCE, environments=Environments({"odd": Odd})) as site:
        task = replace(shell_task(), environment="odd", data={"case": case})
        rollout = await site.rolled(task)
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert (rollout.ending.failure.code, rollout.ending.score) == ("verifier_crashed", None)
        assert len((await site.store.list()).rollouts) == 1, "and the listing can still be read"


async def test_a_reward_of_another_number_type_becomes_a_float(tmp_path: Path):
    async with open_site(tmp_path, says("hello"), environments=Environments({"odd": Odd})) as site:
        rollout = await site.rolled(replace(shell_task(), environment="odd", data={"case": "a decimal"}))
        assert rollout.ending is not None
        assert rollout.ending.score == Score(0.5, {"part": 0.5})


async def test_info_that_is_not_json_fails_only_its_own_rollout(tmp_path: Path):
    async with open_site(tmp_path, says("hello"), settings=ONCE, environments=Environments({"untidy": Untidy})) as site:
        rollout = await site.rolled(replace(shell_task(), environment="untidy", data={"case": "a decimal"}))
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert (rollout.ending.failure.code, rollout.ending.failure.blame) == ("internal_error", Blame.INFRA)
        assert rollout.ending.score is None
        site.nothing_left()
