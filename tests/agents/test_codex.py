"""The real Codex in a bubblewrap sandbox without a network, through the gateway, against a scripted engine."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollyard.agents.installation import AgentInstalls
from rollyard.agents.registry import Agents
from rollyard.core import Outcome, Rollout, Trajectory
from rollyard.testing.script import Script, Turn
from rollyard.tokens import verify
from tests.agents.harness_parts import call, greeting_task, installed, plays, preset, reply_text
from tests.pipeline.site import open_site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # the first run on a machine downloads it

NAME = "codex"
PATCH = "*** Begin Patch\n*** Update File: greeting.txt\n@@\n-Hello, wrold!\n+Hello, world!\n*** End Patch"
CATALOG = {
    "slug": "policy",
    "display_name": "policy",
    "base_instructions": "You are a coding agent.",
    "shell_type": "unified_exec",
    "apply_patch_tool_type": "freeform",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 0,
    "supported_reasoning_levels": [],
    "support_verbosity": False,
    "truncation_policy": {"mode": "tokens", "limit": 10000},
    "experimental_supported_tools": [],
    "input_modalities": ["text"],
}
WITH_PATCH_TOOL: Any = {
    "args": ["-c", 'model_catalog_json="/home/agent/.codex/models.json"'],
    "files": [{"path": "{{home}}/.codex/models.json", "content": json.dumps({"models": [CATALOG]}), "raw": True}],
}


@pytest.fixture(scope="session")
def installs() -> AgentInstalls:
    return installed(NAME)


async def rolled(
    folder: Path, installs: AgentInstalls, turns: Sequence[str] | Script, options: Any = None, **limits: Any
) -> tuple[Rollout, Trajectory]:
    script = turns if callable(turns) else plays(turns)
    async with open_site(folder, script, agents=Agents(installs=installs)) as site:
        rollout = await site.rolled(greeting_task(NAME, options, **limits), within_s=50)
        trajectory = await site.store.trajectory(rollout.id)
        site.nothing_left()
    assert rollout.ending is not None and trajectory is not None
    verify(trajectory)
    return rollout, trajectory


async def test_it_edits_a_file_over_several_turns_in_one_exact_trace(tmp_path: Path, installs: AgentInstalls):
    turns = [reply_text(turn) for turn in preset(NAME).try_.turns]
    rollout, trajectory = await rolled(tmp_path, installs, turns)
    assert rollout.ending is not None
    assert (rollout.ending.outcome, rollout.ending.failure) == (Outcome.COMPLETED, None)
    assert rollout.ending.score is not None and rollout.ending.score.reward == 1.0
    assert trajectory.turns == len(turns) and len(trajectory.traces) == 1
    assert forks_of(trajectory) == {}


async def test_its_own_patch_tool_reasoning_and_mistakes_stay_in_one_trace(tmp_path: Path, installs: AgentInstalls):
    turns = [
        f"<think>\nWhere is it?\n</think>\n\nI look.\n{call('exec_command', cmd='cat greeting.txt')}",
        call("apply_patch", patch="in the wrong argument"),
        '<tool_call>\n{"name": "exec_command", "arguments": "no object"}\n</tool_call>',
        call("no_such_tool", x=None),
        f"<think>\nNow.\n</think>\n\n{call('apply_patch', input=PATCH)}",
        "Done.",
    ]
    rollout, trajectory = await rolled(tmp_path, installs, turns, WITH_PATCH_TOOL)
    assert rollout.ending is not None
    assert (rollout.ending.outcome, rollout.ending.failure) == (Outcome.COMPLETED, None)
    assert rollout.ending.score is not None and rollout.ending.score.reward == 1.0
    assert trajectory.turns == len(turns) and len(trajectory.traces) == 1
    tool_messages = [str(message["content"]) for message in trajectory.messages if message["role"] == "tool"]
    assert "Hello, wrold!" in tool_messages[0]
    assert "invalid patch" in tool_messages[1]
    assert "failed to parse function arguments" in tool_messages[2]
    assert "unsupported call: no_such_tool" in tool_messages[3]
    assert "Success" in tool_messages[4]


async def test_a_context_that_is_full_truncates_the_rollout(tmp_path: Path, installs: AgentInstalls):
    turns = [call("exec_command", cmd="seq 10000"), "never said"]
    rollout, trajectory = await rolled(tmp_path, installs, turns, max_context=12_000)
    assert rollout.ending is not None and rollout.ending.failure is not None
    assert (rollout.ending.outcome, rollout.ending.failure.code) == (Outcome.TRUNCATED, "context_limit")
    assert "ran out of room" in str(trajectory.info["harness"])


async def test_a_compacted_history_continues_in_another_trace(tmp_path: Path, installs: AgentInstalls):
    def script(turn: Turn) -> str:
        if "CONTEXT CHECKPOINT COMPACTION" in turn.text:
            return "SUMMARY: half of it is done."
        return "Done." if "SUMMARY: half" in turn.text else call("exec_command", cmd="seq 1000")

    limit = ["-c", "model_auto_compact_token_limit=11000"]
    rollout, trajectory = await rolled(tmp_path, installs, script, {"args": limit})
    assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED
    assert forks_of(trajectory) == {"other tools": 1, "history rewritten": 1}  # its request for a summary has no tools
    assert sum(trace.sampled_tokens for trace in trajectory.traces) == rollout.ending.summary.sampled_tokens


async def test_a_sub_agent_has_a_trace_of_its_own(tmp_path: Path, installs: AgentInstalls):
    def script(turn: Turn) -> str:
        if "CHILD TASK" in turn.text and turn.number == 0:
            return "The child says 42."
        if turn.number == 0:
            return call("multi_agent_v1__spawn_agent", message="CHILD TASK: say 42")
        match = re.search(r'"agent_id":"([^"]+)"', turn.text)
        return call("multi_agent_v1__wait_agent", targets=[match[1]]) if turn.number == 1 and match else "Done."

    rollout, trajectory = await rolled(tmp_path, installs, script, {"args": ["--enable", "multi_agent"]})
    assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED
    assert trajectory.turns in (4, 5)  # the number of the parent's calls depends on when its child ends
    assert len(trajectory.traces) == 2
    assert any("The child says 42." in str(message["content"]) for message in trajectory.messages)


def forks_of(trajectory: Trajectory) -> Any:
    gateway: Any = trajectory.info["gateway"]
    return gateway["forks"]
