"""A rollout with the `ipython` tool: Rollyard's Python is built when first needed, and bound if the image has none."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.core import Outcome
from rollyard.core.task import AgentSpec, SandboxOptions
from rollyard.sandbox.python import INSIDE, PythonBuilds
from tests.pipeline.site import finish, open_site, says, shell_task
from tests.tools.busybox import busybox_image

pytestmark = pytest.mark.slow


def cell(code: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": "ipython", "arguments": {"code": code}}) + "\n</tool_call>"


async def test_ipython_cells_share_variables_in_an_image_without_python(tmp_path: Path) -> None:
    script = says(cell("import sys\nx = 41"), cell("open('done', 'w').write(sys.prefix)\nx + 1"), finish())
    task = replace(
        shell_task(checks=[f"grep -qx {INSIDE} done"]),
        agent=AgentSpec(options={"tools": ["ipython", "finish"]}),
        sandbox=SandboxOptions(image=str(busybox_image(tmp_path / "image"))),
    )
    cache = tmp_path / "python"
    async with open_site(tmp_path, script, pythons=PythonBuilds(cache)) as site:
        assert not cache.exists()
        rollout = await site.rolled(task)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending
        assert rollout.ending.score is not None and rollout.ending.score.reward == 1.0
        trajectory = await site.store.trajectory(rollout.id)
        assert trajectory is not None
        tool_outputs = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
        assert tool_outputs[0] == "(no output)" and str(tool_outputs[1]).endswith("42")
        site.nothing_left()
    shutil.rmtree(cache)
