"""Tests of the environment PROJECT with real sandboxes and without a model. Run them with `make test`."""

import asyncio
import json
import sys
import unittest
from pathlib import Path

from environment import Commands

from rollyard.testing import FolderTokenizer, Rules, ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir

TASKS = [json.loads(line) for line in Path("tasks.jsonl").read_text().splitlines()]


async def rollyard(*arguments: str) -> tuple[int, list[dict]]:
    """Runs a command line. Returns its exit status and the objects that it printed."""
    argv = [sys.executable, "-m", "rollyard", *arguments, "--json"]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return process.returncode or 0, [json.loads(line) for line in output.splitlines()]


async def reward_of(reply: str) -> float:
    """Returns the reward of the first task if a model gives this reply. The engine is scripted, the rest is real."""
    tokenizer = FolderTokenizer(tokenizer_dir())
    async with ScriptedEngine(script=Rules.read({"default": [reply]}), tokenizer=tokenizer) as engine:
        options = ("--engine", engine.url, "--tokenizer", str(tokenizer_dir()))
        _, (result,) = await rollyard("tasks", "try", "tasks.jsonl:1", *options)
    return result["reward"]


class EnvironmentTest(unittest.IsolatedAsyncioTestCase):
    async def test_the_oracle_solves_every_task_and_doing_nothing_solves_none(self) -> None:
        status, findings = await rollyard("tasks", "validate", "tasks.jsonl", "--run")
        self.assertEqual((status, len(findings)), (0, len(TASKS)), findings)

    async def test_the_reply_of_a_model_is_scored(self) -> None:
        self.assertEqual(await reward_of(TASKS[0]["data"]["command"]), 1.0)
        self.assertEqual(await reward_of("echo wrong"), 0.0)

    def test_training_and_held_out_tasks_differ(self) -> None:
        train, held_out = (
            {task["data"]["instruction"] for task in Commands().generate({"split": split, "count": "500"})}
            for split in ("train", "held_out")
        )
        self.assertFalse(train & held_out)


if __name__ == "__main__":
    unittest.main()
