"""A task's MCP servers in a whole rollout: as tools, through the doorway, and when they are unreachable."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rollyard.core import Blame, Json, Outcome, Score, Task
from rollyard.core.failure import TaskInvalid, UnknownTool
from rollyard.envs import EnvContext, Environment, Environments, Evidence, Plan, Start
from rollyard.sandbox.doorway import DOORWAY_PORT
from rollyard.tools.base import ToolContext, ToolSpec
from rollyard.tools.finish import Finish
from rollyard.tools.mcp.sources import McpSource, OutsideServer
from tests.pipeline.site import Site, finish, open_site, says, shell, shell_task
from tests.tools.mcp_parts import BY_HAND, loopback, outside, served

pytestmark = pytest.mark.slow


def asking(mcp: Json, files: Json = None) -> Task:
    task = shell_task(checks=["true"], files=files or {})
    return replace(task, agent=replace(task.agent, options={"tools": ["shell", "finish"], "mcp": mcp}))


def call(name: str, **arguments: Json) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


async def tool_results(site: Site, rollout_id: str) -> list[str]:
    """Returns the tools' results."""
    trajectory = await site.store.trajectory(rollout_id)
    assert trajectory is not None
    return [str(message["content"]) for message in trajectory.messages if message["role"] == "tool"]


async def test_a_server_in_the_sandbox_is_offered_to_the_model_called_and_ended(tmp_path: Path):
    task = asking({"hand": {"command": ["python3", "server.py"]}}, files={"server.py": BY_HAND})
    async with open_site(tmp_path, says(call("hand__echo", a=1), call("hand__die"), finish())) as site:
        rollout = await site.rolled(task)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED
        echo, died, _ = await tool_results(site, rollout.id)
        assert echo == 'echo 1 {"a": 1}'
        assert "status 3" in died
        trajectory = await site.store.trajectory(rollout.id)
        assert trajectory is not None
        names = [schema["function"]["name"] for schema in trajectory.tools]  # type: ignore[index,call-overload]
        assert {"shell", "finish", "hand__echo"} <= set(names)
        assert len(set(names)) == len(names)
        site.nothing_left()


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "inside", "version": "1"},
    },
}
INSIDE = f"""
import sys, urllib.request
for name in sys.argv[1:]:
    headers = {{"content-type": "application/json", "accept": "application/json, text/event-stream"}}
    url = "http://127.0.0.1:{DOORWAY_PORT}/mcp/" + name
    request = urllib.request.Request(url, {json.dumps(INITIALIZE).encode()!r}, headers)
    try:
        print(urllib.request.urlopen(request, timeout=10).read().decode())
    except urllib.error.HTTPError as error:
        print(error.code)
"""


async def test_a_program_in_the_sandbox_uses_the_server_through_the_doorway_and_eval_has_none(tmp_path: Path):
    task = asking({"out": {"server": "known", "inside": True}}, files={"inside.py": INSIDE})
    check = f"! python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {DOORWAY_PORT}), 5)'"
    task = replace(task, data={**task.data, "checks": [check]})
    async with served(outside().streamable_http_app()) as url:
        servers = {"known": OutsideServer(url), "unasked": OutsideServer(url)}
        script = says(shell("python3 inside.py out known unasked"), call("out__add", number=2), finish())
        async with open_site(tmp_path, script, mcp_servers=servers) as site:
            rollout = await site.rolled(task)
            assert rollout.ending is not None
            assert rollout.ending.outcome is Outcome.COMPLETED
            output, added, _ = await tool_results(site, rollout.id)
            assert '"serverInfo":{"name":"outside"' in output
            assert output.count("404") == 2
            assert added == "count is 2"
            assert rollout.ending.score is not None
            assert rollout.ending.score.reward == 1.0
            site.nothing_left()


async def test_a_task_with_a_wrong_or_unknown_server_is_refused_at_submit(tmp_path: Path):
    async with open_site(tmp_path, says(finish())) as site:
        check = site.pipeline.resources.check
        check(asking({"a": {"command": ["x"]}}), site.run)
        with pytest.raises(TaskInvalid, match="either a command or a server"):
            check(asking({"a": {}}), site.run)
        with pytest.raises(UnknownTool, match="has named: none"):
            check(asking({"a": {"server": "known"}}), site.run)
        twice = asking(None)
        with pytest.raises(TaskInvalid, match="named twice"):
            check(replace(twice, agent=replace(twice.agent, options={"tools": ["shell", "shell"]})), site.run)


async def test_a_server_that_does_not_start_has_blame_task_and_an_unreachable_one_blame_infra(tmp_path: Path):
    with loopback() as closed_port:
        servers = {"away": OutsideServer(f"http://127.0.0.1:{closed_port.getsockname()[1]}/mcp")}
        async with open_site(tmp_path, says(finish()), mcp_servers=servers) as site:
            broken = await site.rolled(asking({"hand": {"command": ["sh", "-c", "echo why >&2; exit 7"]}}))
            assert broken.ending is not None
            assert broken.ending.failure is not None
            assert (broken.ending.failure.code, broken.ending.failure.blame) == ("setup_failed", Blame.TASK)
            assert "why" in broken.ending.failure.detail
            away = await site.rolled(asking({"out": {"server": "away"}}))
            assert away.ending is not None
            assert away.ending.failure is not None
            assert (away.ending.failure.code, away.ending.failure.blame) == ("tool_unreachable", Blame.INFRA)
            assert away.attempt == 3  # it was retried
            site.nothing_left()


@dataclass
class Again:
    """Another tool named finish."""

    spec: ToolSpec = Finish().spec
    needs_sandbox: bool = False
    needs_python: bool = False

    async def open(self, context: ToolContext) -> Finish:
        return Finish()


class Doubled(Environment):
    name = "doubled"
    tools = ("finish",)

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "do it"},), tools=(Again(),))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        return Score(1.0)


class Bringing(Doubled):
    """Brings the tools of a server."""

    def plan(self, task: Task) -> Plan:
        return Plan(eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        assert context.sandbox is not None
        await context.sandbox.write("server.py", BY_HAND.encode())
        source = McpSource("own", ("python3", "server.py"))
        return Start(({"role": "user", "content": "do it"},), tools=(source,))


async def test_two_tools_with_one_name_are_refused_and_an_environment_may_bring_a_server(tmp_path: Path):
    environments = Environments({"doubled": Doubled(), "bringing": Bringing()})
    async with open_site(tmp_path, says(call("own__echo"), finish()), environments=environments) as site:
        rollout = await site.rolled(Task("doubled"))
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert rollout.ending.failure.code == "task_invalid"
        assert "two tools are named 'finish'" in rollout.ending.failure.detail
        brought = await site.rolled(Task("bringing"))
        assert (await tool_results(site, brought.id))[0] == "echo 1 {}"
        site.nothing_left()
