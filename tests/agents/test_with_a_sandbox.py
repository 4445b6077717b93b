"""The native loop with real parts: an engine over HTTP, a sandbox, a shell."""

import tempfile
from pathlib import Path

import pytest

from rollyard.core import Trajectory
from rollyard.sandbox import WORKDIR, LocalRuntime, SandboxSpec
from rollyard.tokens import verify
from rollyard.tools import ToolContext, tool_kind

from .conftest import call


@pytest.fixture
async def sandbox():
    with tempfile.TemporaryDirectory() as folder:
        async with LocalRuntime(root=Path(folder) / "root") as runtime:
            yield await runtime.start(SandboxSpec(owner="test"), lease_s=60.0)


@pytest.mark.parametrize(
    ("options", "replies"),
    [
        ({}, [call("shell", command="echo 42 > out; x=5"), call("shell", command="echo x is $x"), "done"]),
        ({"format": "bash_block"}, ["```bash\nx=5\necho hi > out\n```", "```bash\necho x is $x\n```", "done"]),
    ],
)
async def test_it_works_in_a_shell_that_keeps_its_state(scene, sandbox, options, replies):
    tool = await tool_kind("shell").open(ToolContext(sandbox))
    try:
        async with scene(replies, options=options, tools=[tool]) as s:
            assert await s.run() == "stop"
            assert "x is 5" in str(s.conversation.messages[-2]["content"])
            assert await sandbox.read(f"{WORKDIR}/out", limit_bytes=100) is not None
            verify(Trajectory("r1", 1, traces=s.conversation.traces()))
            assert len(s.conversation.traces()) == 1
    finally:
        await tool.close()
