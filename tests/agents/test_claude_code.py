"""The real Claude Code in a bubblewrap sandbox without a network, through the gateway, against a scripted engine."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rollyard.agents.installation import AgentInstalls
from rollyard.agents.registry import Agents
from rollyard.core import Outcome, Rollout, Task, Trajectory
from rollyard.tokens import verify
from tests.agents.harness_parts import call, greeting_task, installed, plays, preset, reply_text
from tests.pipeline.site import open_site

NAME = "claude-code"
FILE = "/workspace/greeting.txt"
READ = call("Read", file_path=FILE)
EDIT = call("Edit", file_path=FILE, old_string="wrold", new_string="world", replace_all=False)
WRITE = call("Write", file_path="/workspace/more.txt", content="é\n")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="session")
def installs() -> AgentInstalls:
    return installed(NAME)


async def rolled(
    folder: Path, installs: AgentInstalls, turns: Sequence[str], task: Task | None = None
) -> tuple[Rollout, Trajectory]:
    """Returns how it ended, and its trajectory, verified."""
    async with open_site(folder, plays(turns), agents=Agents(installs=installs)) as site:
        rollout = await site.rolled(task or greeting_task(NAME), within_s=90)
        await site.idle()
        site.nothing_left()
        trajectory = await site.store.trajectory(rollout.id)
    assert rollout.ending is not None
    assert trajectory is not None
    verify(trajectory)
    return rollout, trajectory


def forks(trajectory: Trajectory) -> object:
    gateway = trajectory.info["gateway"]
    assert isinstance(gateway, dict)
    return gateway["forks"]


async def test_it_edits_a_file_over_several_turns_in_one_exact_trace(tmp_path: Path, installs: AgentInstalls) -> None:
    turns = [reply_text(turn) for turn in preset(NAME).try_.turns]
    rollout, trajectory = await rolled(tmp_path, installs, turns)
    assert rollout.ending is not None
    assert (rollout.ending.outcome, rollout.ending.failure) == (Outcome.COMPLETED, None), trajectory.info
    assert rollout.ending.score is not None
    assert rollout.ending.score.reward == 1.0
    [trace] = trajectory.traces
    assert len(trace.spans) == len(turns)
    assert forks(trajectory) == {}


async def test_thinking_and_parallel_calls_stay_in_one_trace(tmp_path: Path, installs: AgentInstalls) -> None:
    turns = [
        f"<think>\nI look.\n</think>\n\nBoth at once.\n{READ}\n{call('Bash', command='false')}",
        f"<think>\nNow I know.\n</think>\n\n{EDIT}\n{WRITE}",
        call("NoSuchTool", x=1),
        "Done.",
    ]
    _, trajectory = await rolled(tmp_path, installs, turns)
    [trace] = trajectory.traces
    assert len(trace.spans) == 4
    assert forks(trajectory) == {}
    tools = [message["content"] for message in trajectory.messages if message.get("role") == "tool"]
    assert "Error: Exit code 1" in tools, "a failed command is distinguishable from a successful one"


async def test_a_call_that_it_rewrites_in_its_history_forks(tmp_path: Path, installs: AgentInstalls) -> None:
    """It removes `cd` into the current folder: the call differs from the model's, so the history differs."""
    turns = [READ, call("Bash", command="cd /workspace && ls"), EDIT, "Done."]
    rollout, trajectory = await rolled(tmp_path, installs, turns)
    assert rollout.ending is not None
    assert rollout.ending.outcome is Outcome.COMPLETED
    first, second = trajectory.traces
    assert forks(trajectory) == {"history rewritten": 1}
    assert [span.is_owned for span in first.spans] == [True, True]
    assert [span.is_owned for span in second.spans] == [False, True, True]


async def test_a_turn_limit_ends_it(tmp_path: Path, installs: AgentInstalls) -> None:
    rollout, trajectory = await rolled(tmp_path, installs, [READ, EDIT, "Done."], greeting_task(NAME, max_turns=2))
    assert rollout.ending is not None
    assert rollout.ending.failure is not None
    assert (rollout.ending.outcome, rollout.ending.failure.code) == (Outcome.TRUNCATED, "turn_limit")
    assert trajectory.turns == 2


async def test_a_full_context_ends_it(tmp_path: Path, installs: AgentInstalls) -> None:
    """It recognizes the gateway's refusal, tries to compact its history, and gives up: that does not fit either."""
    flood = call("Bash", command="yes 'a line of some length' | head -n 1000")
    rollout, _ = await rolled(tmp_path, installs, [flood, "Done."], greeting_task(NAME, max_context=10_000))
    assert rollout.ending is not None
    assert rollout.ending.failure is not None
    assert (rollout.ending.outcome, rollout.ending.failure.code) == (Outcome.TRUNCATED, "context_limit")
