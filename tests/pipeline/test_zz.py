import asyncio
from dataclasses import replace
from pathlib import Path
from rollyard.core import *
from rollyard.core.failure import *
from tests.pipeline.site import SETTINGS, Site, finish, quick, says, shell, shell_task, site
from rollyard.testing.script import Reply

async def test_sur(tmp_path: Path):
    bad = '<tool_call>\n{"name": "finish", "arguments": {"answer": "\\ud800"}}\n</tool_call>'
    async with site(tmp_path, says(bad), settings=replace(SETTINGS, max_attempts=1)) as yard:
        rollout = await yard.rolled(shell_task())
        print(rollout)

async def test_sur2(tmp_path: Path):
    bad = '<tool_call>\n{"name": "shell", "arguments": {"command": "echo \\ud800"}}\n</tool_call>'
    async with site(tmp_path, says(bad, finish()), settings=replace(SETTINGS, max_attempts=1)) as yard:
        rollout = await yard.rolled(shell_task())
        print(rollout)
