"""Scores: which are refused, what is deducted for length, and what is not trained on."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.core import Outcome, OverlongPenalty, Rollout, Run, Score, Summary, Task, TurnReward
from rollyard.envs.base import EnvContext, Environment, Evidence, Plan, Start
from rollyard.envs.registry import Environments
from rollyard.pipeline.attempts.progress import AttemptProgress
from rollyard.testing.store_conformance import trajectory
from tests.pipeline.site import finish, open_site, quick, says, shell, shell_task

pytestmark = pytest.mark.slow


async def test_a_run_that_masks_truncated_rollouts_does_not_train_on_them_and_reports_why(tmp_path: Path):
    run = Run("run", mask_truncated=True)
    async with open_site(tmp_path, says(shell("touch done")), run=run) as site:
        ending = (await site.rolled(quick(shell_task(), max_turns=3))).ending
        assert ending is not None and ending.failure is not None and ending.score is not None
        assert (ending.failure.code, ending.is_trainable, ending.failure.trainable) == ("turn_limit", False, False)
        assert ending.score.reward == 1.0
        assert ending.untrainable == "its run masks truncated rollouts, and it ended with turn_limit"
    async with open_site(tmp_path / "whole", says(shell("touch done"), finish()), run=run) as site:
        ending = (await site.rolled(shell_task())).ending
        assert ending is not None and ending.is_trainable and not ending.untrainable


async def test_a_slow_check_does_not_make_a_masked_rollout_trainable(tmp_path: Path):
    run = Run("run", mask_truncated=True)
    async with open_site(tmp_path, says(shell("touch done")), run=run) as site:
        ending = (await site.rolled(quick(shell_task(checks=["sleep 60"]), max_turns=2, eval_s=3.0))).ending
        assert ending is not None and ending.failure is not None
        assert (ending.failure.code, ending.is_trainable) == ("eval_deadline", False)


async def test_an_overlong_penalty_is_a_component_of_the_score_even_if_it_is_0(tmp_path: Path):
    script = says(shell("touch done"), finish())
    async with open_site(tmp_path, script) as site:
        ending = (await site.rolled(shell_task())).ending
        assert ending is not None and ending.score is not None
        sampled, components = ending.summary.sampled_tokens, dict(ending.score.components)
    half = OverlongPenalty(sampled - 10, sampled + 10, 0.5)
    async with open_site(tmp_path / "half", script, run=Run("run", overlong_penalty=half)) as site:
        rollout = await site.rolled(shell_task())
        assert rollout.ending is not None and rollout.ending.score is not None and rollout.ending.is_trainable
        assert rollout.ending.score.reward == 0.75
        assert rollout.ending.score.components == {**components, "overlong_penalty": -0.25}
        (again,) = (await site.pipeline.rescore(rollout.id)).scores
        assert again["reward"] == 0.75
    none = OverlongPenalty(sampled, sampled + 10)
    async with open_site(tmp_path / "none", script, run=Run("run", overlong_penalty=none)) as site:
        ending = (await site.rolled(shell_task())).ending
        assert ending is not None and ending.score is not None
        assert (ending.score.reward, ending.score.components["overlong_penalty"]) == (1.0, 0.0)


class Generous(Environment):
    """Returns a given score."""

    name = "generous"

    def __init__(self, score: Callable[[], Score]) -> None:
        self.score = score

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "do it"},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        return self.score()


@pytest.mark.parametrize(
    "score",
    [
        lambda: Score(math.nan),
        lambda: Score(math.inf),
        lambda: Score(1e300),
        lambda: Score(1e16),
        lambda: Score(0.0, {"a": math.nan}),
        lambda: Score(0.0, turn_rewards=(TurnReward(0, 0, -1e16),)),
        lambda: Score(1.0, {"overlong_penalty": 0.0}),
    ],
)
async def test_an_invalid_score_fails_only_its_own_rollout(tmp_path: Path, score: Callable[[], Score]):
    environments = Environments({"generous": Generous(score)})
    async with open_site(tmp_path, says("hello"), environments=environments) as site:
        ending = (await site.rolled(replace(shell_task(), environment="generous"))).ending
        assert ending is not None and ending.failure is not None
        assert (ending.failure.code, ending.score) == ("verifier_crashed", None)


@pytest.mark.parametrize(("finish_reason", "is_trained"), [("stop", True), ("length", False)])
def test_a_truncated_last_reply_is_masked_even_if_the_agent_completed(finish_reason: str, is_trained: bool):
    truncated = trajectory("r")
    (trace,) = truncated.traces
    truncated = replace(
        truncated, traces=(replace(trace, spans=(replace(trace.spans[0], finish_reason=finish_reason),)),)
    )
    for masks in (False, True):
        run = Run("run", mask_truncated=masks)
        ending = AttemptProgress(Rollout("r", "run", Task("shell")), run, Summary(), trajectory=truncated).scored(
            Score(1.0), None
        )
        assert (ending.outcome, ending.is_trainable) == (Outcome.COMPLETED, is_trained or not masks)
        assert ("cut off by a token limit" in ending.untrainable) is (masks and not is_trained)
