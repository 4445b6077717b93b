"""A slow judge does not use up the policy's time, and a failing judge gives no score."""

from dataclasses import replace
from pathlib import Path

from rollyard.core import Blame, Limits, Message, Outcome, Score, Task
from rollyard.engines import EngineSpec, Kind, Role
from rollyard.envs import EnvContext, Environment, Environments, Evidence, Plan, Start
from rollyard.testing.script import Reply, Rules
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.pipeline.site import SETTINGS, Site, open_site

QUESTION: Message = {"role": "user", "content": "is it good?"}


class Judged(Environment):
    name = "judged"

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "say something"},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        assert context.judge is not None
        reply = await context.judge.ask([QUESTION])
        return Score(float("good" in str(reply.message["content"])))


TASK = Task("judged", limits=Limits(eval_s=0.3))
HELLO = Rules(default=(Reply("hello"),))


async def add_judge(site: Site, judge: ScriptedEngine) -> None:
    await site.router.add(EngineSpec("judge", judge.url, Kind.OPENAI, model="scripted", role=Role.JUDGE))


async def test_a_judge_may_take_longer_than_eval_s(tmp_path: Path):
    slow = ScriptedEngine(Rules(default=(Reply("it is good", latency_s=1.0),)))
    async with slow, open_site(tmp_path, HELLO, environments=Environments({"judged": Judged()})) as site:
        await add_judge(site, slow)
        rollout = await site.rolled(TASK)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending.failure
        assert rollout.ending.score == Score(1.0)
        trajectory = await site.store.trajectory(rollout.id)
        assert trajectory is not None
        assert [message["content"] for message in trajectory.messages] == ["say something", "hello"], "no judge in it"


async def test_without_a_judge_there_is_no_score_and_the_blame_is_infra(tmp_path: Path):
    settings = replace(SETTINGS, eval_attempts=2)
    async with open_site(tmp_path, HELLO, settings=settings, environments=Environments({"judged": Judged()})) as site:
        rollout = await site.rolled(TASK)
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert (rollout.ending.failure.code, rollout.ending.failure.blame) == ("judge_unreachable", Blame.INFRA)
        assert rollout.ending.score is None
