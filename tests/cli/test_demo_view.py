"""The demo's output for rollouts with several turns: the scripted engine returns the tasks' solutions."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from rollyard.cli.demo.model import DemoModel, DemoResult, demo_tasks, run_tasks
from rollyard.cli.demo.view import DemoBoard, show_best, show_results
from rollyard.cli.rig import rig
from rollyard.client import Record
from rollyard.envs.yardwork import demonstration, make
from rollyard.testing.tokenizer_files import tokenizer_dir

pytestmark = pytest.mark.slow

WRONG = '<tool_call>\n{"name": "finish", "arguments": {"answer": "no idea"}}\n</tool_call>'


def script(tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """Solves the first task as its oracle does, after a command with long output; gives up the others."""
    data = tasks[0]["data"]
    calls = [{"name": "shell", "arguments": {"command": "seq 1 50"}}]
    calls += [{"name": turn.tool, "arguments": dict(turn.arguments)} for turn in demonstration(data)]
    turns: list[Any] = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    return {"rules": [{"if": make(data).instruction, "turns": turns}], "default": [WRONG]}


async def shown(console: Console, tasks: list[dict[str, Any]]) -> DemoResult:
    player = DemoModel("a script", tokenizer_dir(), None, 1.0)
    async with rig(script(tasks)) as bench:
        played = DemoResult(player, await run_tasks(console, bench.client, player, tasks), 2.0)
        show_results(console, played)
        await show_best(console, bench.client, played)
    return played


@pytest.mark.timeout(120)
async def test_the_best_rollout_is_shown_turn_by_turn_with_tool_output():
    tasks, written = demo_tasks(3), io.StringIO()
    played = await shown(Console(file=written, width=120, highlight=False), tasks)
    output = written.getvalue()
    assert (played.solved, len(played.records)) == (1, 3), output
    assert "1 of 3 solved (33%): 6 turns" in output
    assert "turn 1: shell seq 1 50\n" in output
    assert output.count("reward 0, 1 turn, ") == 2 and output.count("reward 1, 4 turns, ") == 1
    assert f"One trajectory: {tasks[0]['data']['family']} (level {tasks[0]['data']['level']}), reward 1" in output
    head, *turns = re.split(r"^turn \d+ tokens \d+ to \d+$", output.partition("One trajectory")[2], flags=re.MULTILINE)
    assert make(tasks[0]["data"]).instruction in " ".join(head.split()) and len(turns) == 4
    for turn in turns:
        assert re.search(r"<tool_call>\(-?\d+\.\d\d\)", turn), turn
    long_output = [line for line in turns[0].splitlines() if line.startswith("   shell │ ")]
    assert long_output[0].endswith("│ 1") and long_output[-1].endswith("│ …") and len(long_output) == 7
    texts = [re.sub(r"\(-?\d+\.\d\d\)\s+", "", turn) for turn in turns]
    assert '"seq·1·50"' in texts[0] and '"finish"' in texts[3]
    sampled = int(re.findall(r"given, (\d+) sampled in 4 turns", head)[0])
    assert len(re.findall(r"\(-?\d+\.\d\d\)", "".join(turns))) == sampled == counted(played.records[0])


@pytest.mark.timeout(120)
async def test_a_terminal_shows_a_live_table_instead_of_lines():
    written = io.StringIO()
    await shown(Console(file=written, width=120, force_terminal=True, color_system="standard"), demo_tasks(2))
    output = written.getvalue()
    assert "0 of 2 ended" in output and "turn 1: " not in output
    assert "finish no idea" in output  # the last turn of the second rollout
    assert "queued" in output  # nothing has started in the first frame
    assert "\x1b[31m" in output and "\x1b[32m" in output  # rewards, and tokens by their logprob


def test_a_narrow_terminal_shortens_the_last_turn_and_no_state_or_number():
    written = io.StringIO()
    task = {"environment": "shell", "data": {"instruction": "Write the number of lines of log.txt."}}
    with DemoBoard(Console(file=written, width=80, force_terminal=True, color_system=None), {"one": task}) as board:
        board.add_turn("one", f"shell {'x' * 54}")
    lines = written.getvalue().splitlines()
    header, row = (next(line for line in reversed(lines) if word in line) for word in ("last", "shell: "))
    assert header.split() == ["task", "state", "turns", "tokens", "reward", "last", "turn"]
    assert re.search(r"shell: Write the .* queued \d\S* m?s +1 +shell x+… *$", row), row


def counted(record: Record) -> int:
    return (record.summary or {})["sampled_tokens"]
