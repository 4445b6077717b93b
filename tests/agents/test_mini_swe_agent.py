"""The real mini-SWE-agent in a sandbox without a network, through the gateway, against a scripted engine."""

from pathlib import Path
from typing import Any

import pytest

from rollyard.agents.installation import AgentInstalls
from rollyard.agents.registry import Agents
from rollyard.core import Outcome
from rollyard.sandbox.runtimes.apptainer import ApptainerRuntime
from rollyard.sandbox.runtimes.bubblewrap import BubblewrapRuntime
from rollyard.testing.script import Turn
from rollyard.tokens import verify
from tests.agents.harness_parts import call, greeting_task, installed, plays, preset, pythons, reply_text
from tests.pipeline.site import open_site

NAME = "mini-swe-agent"
TURNS = tuple(reply_text(turn) for turn in preset(NAME).try_.turns)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first run downloads it and builds the Python


@pytest.fixture(scope="session")
def installs() -> AgentInstalls:
    return installed(NAME)


@pytest.mark.parametrize("kind", [BubblewrapRuntime, ApptainerRuntime])
async def test_it_edits_a_file_over_several_turns_in_one_exact_trace(
    tmp_path: Path, installs: AgentInstalls, kind: Any
):
    async with open_site(
        tmp_path, plays(TURNS), agents=Agents(installs=installs), pythons=pythons(), kind=kind
    ) as site:
        rollout = await site.rolled(greeting_task(NAME), within_s=90)
        trajectory = await site.store.trajectory(rollout.id)
        await site.idle()
        site.nothing_left()
    assert rollout.ending is not None and trajectory is not None
    harness, gateway = trajectory.info["harness"], trajectory.info["gateway"]
    assert isinstance(harness, dict) and isinstance(gateway, dict)
    assert (rollout.ending.outcome, rollout.ending.failure) == (Outcome.COMPLETED, None), harness["output"]
    assert rollout.ending.score is not None and rollout.ending.score.reward == 1.0
    verify(trajectory)
    assert (len(trajectory.traces), trajectory.turns, rollout.ending.is_trainable) == (1, 4, True)
    assert (harness["version"], harness["exit_status"]) == ("2.4.6", 0)
    assert (gateway["requests"], gateway["joined"], gateway["forks"]) == (4, 0, {})
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["system", "user", *["assistant", "tool"] * 3, "assistant"]


async def test_a_reply_without_a_call_which_it_drops_has_a_trace_of_its_own(tmp_path: Path, installs: AgentInstalls):
    """It reports the missing call to the model, and does not send the reply without it again: that forks, and no
    sampled token is lost. Two calls in one turn do not fork."""
    turns = ("I do not call anything.", f"{TURNS[0]}\n{call('bash', command='ls')}", *TURNS[1:])

    def script(turn: Turn) -> str:
        return turns[min(turn.call, len(turns) - 1)] if turn.session_id else "ok"

    async with open_site(tmp_path, script, agents=Agents(installs=installs), pythons=pythons()) as site:
        rollout = await site.rolled(greeting_task(NAME), within_s=90)
        trajectory = await site.store.trajectory(rollout.id)
    assert rollout.ending is not None and trajectory is not None
    assert rollout.ending.score is not None and rollout.ending.score.reward == 1.0
    verify(trajectory)
    assert trajectory.turns == 5
    assert [sum(span.is_owned for span in trace.spans) for trace in trajectory.traces] == [1, 4]
    assert trajectory.traces[1].fork_reason


async def test_a_full_context_ends_it_as_the_context_limit(tmp_path: Path, installs: AgentInstalls):
    turns = (call("bash", command="seq 3000"),)
    async with open_site(tmp_path, plays(turns), agents=Agents(installs=installs), pythons=pythons()) as site:
        rollout = await site.rolled(greeting_task(NAME, max_context=9000), within_s=90)
    assert rollout.ending is not None and rollout.ending.failure is not None
    assert (rollout.ending.outcome, rollout.ending.failure.code) == (Outcome.TRUNCATED, "context_limit")
    assert rollout.ending.score is not None and rollout.ending.is_trainable
