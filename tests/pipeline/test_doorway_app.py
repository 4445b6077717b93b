"""The doorway of a task with an agent program: no model before RUN, and a sandbox even if the plan needs none."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollyard.agents.base import AgentContext
from rollyard.core import AgentSpec, Blame, Deadline, Json, Outcome, RollyardError, Score, Task
from rollyard.core.failure import EnvironmentBroken
from rollyard.envs import EnvContext, Environment, Environments, Evidence, Plan, Start
from rollyard.tools.base import ToolKind, ToolResult, ToolSpec
from rollyard.tools.function import tool
from rollyard.tools.mcp import tool_server
from rollyard.tools.mcp.sources import OutsideServer
from tests.agents.harness_parts import PROGRAM, plays, pythons, runs
from tests.pipeline.site import SETTINGS, open_site

pytestmark = pytest.mark.slow

ASK = """
import json, sys, urllib.request, urllib.error
try:
    urllib.request.urlopen(sys.argv[1] + "/v1/models")
except urllib.error.HTTPError as error:
    print(error.code, json.load(error)["error"]["code"], error.headers["x-should-retry"])
"""


@dataclass
class Talk(Environment):
    """Needs no sandbox of its own; its `init` calls the doorway of the one that it gets."""

    name: ClassVar[str] = "talk"
    replies: list[str] = field(default_factory=list)
    brings_tools: bool = False
    kind: ToolKind | None = None

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        if context.sandbox is not None and context.sandbox.doorway is not None:
            python = await pythons().get()
            url = context.sandbox.doorway.url
            result = await context.sandbox.exec([*python.argv, "-c", ASK, url], timeout_s=10, env=python.env)
            self.replies.append((result.stdout + result.stderr).decode().strip())
        return Start(({"role": "user", "content": "say it"},), tools=(self.kind or weigh,) if self.brings_tools else ())

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        return Score(float(evidence.answer == "it"))


@tool
async def weigh(thing: str) -> str:
    """Weighs a thing."""
    return f"{thing}: 7 kg"


def talk_task() -> Task:
    return Task("talk", agent=AgentSpec("command", runs(PROGRAM)))


async def test_an_agent_program_gets_a_sandbox_and_its_model_only_in_run(tmp_path: Path):
    talk = Talk()
    async with open_site(tmp_path, plays(["it"]), environments=Environments({"talk": talk}), pythons=pythons()) as site:
        rollout = await site.rolled(talk_task())
    assert rollout.ending is not None and rollout.ending.score is not None
    assert (rollout.ending.outcome, rollout.ending.score.reward) == (Outcome.COMPLETED, 1.0)
    assert talk.replies == ["503 ended false"]


BY_MCP = """
import json, os, urllib.request
def rpc(number, method, **params):
    body = json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode()
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    url = os.environ["BASE_URL"].removesuffix("/v1") + "/mcp/environment"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["result"]
client = {"name": "test", "version": "1"}
rpc(0, "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=client)
print([tool["name"] for tool in rpc(1, "tools/list")["tools"]])
for name in ("weigh", "lift"):
    result = rpc(2, "tools/call", name=name, arguments={"thing": "anvil"})
    print(result["isError"], result["content"][0]["text"])
"""


async def test_an_agent_program_gets_the_environments_tools_by_mcp(tmp_path: Path):
    environments = Environments({"talk": Talk(brings_tools=True)})
    task = Task("talk", agent=AgentSpec("command", runs(BY_MCP + PROGRAM)))
    async with open_site(tmp_path, plays(["it"]), environments=environments, pythons=pythons()) as site:
        rollout = await site.rolled(task)
        trajectory = await site.store.trajectory(rollout.id)
    assert rollout.ending is not None and rollout.ending.score is not None, rollout.ending
    assert rollout.ending.score.reward == 1.0
    assert trajectory is not None
    harness = trajectory.info["harness"]
    assert isinstance(harness, dict)
    lines = str(harness["output"]).splitlines()[:3]
    assert lines == ["['weigh']", "False anvil: 7 kg", "True there is no tool 'lift'; there are: weigh"]
    calls = trajectory.info["calls"]
    assert isinstance(calls, list)
    assert [(call[0], call[4]) for call in calls] == [("tool", "weigh"), ("model", "e0")]  # type: ignore[index]


async def test_a_tool_whose_server_is_down_ends_the_rollout_without_a_score(tmp_path: Path):
    @tool
    async def broken(thing: str) -> str:
        """Its server is down."""
        raise EnvironmentBroken("the scales' server is down")

    environments = Environments({"talk": Talk(brings_tools=True, kind=broken)})
    ask = BY_MCP.replace('"weigh", "lift"', '"broken",') + PROGRAM
    settings = replace(SETTINGS, max_attempts=1)
    async with open_site(
        tmp_path, plays(["it"]), environments=environments, pythons=pythons(), settings=settings
    ) as site:
        rollout = await site.rolled(Task("talk", agent=AgentSpec("command", runs(ask))))
    assert rollout.ending is not None and rollout.ending.failure is not None
    assert (rollout.ending.failure.code, rollout.ending.score) == ("environment_broken", None)
    assert "server is down" in rollout.ending.failure.detail


@dataclass
class Odd:
    """A tool that hangs or raises."""

    spec: ToolSpec

    async def call(self, arguments: Mapping[str, Json], *, timeout_s: float) -> ToolResult:
        if self.spec.name == "hangs":
            await asyncio.sleep(3600)
        raise ZeroDivisionError("no scales")

    async def close(self) -> None:
        pass


async def test_a_hanging_tool_is_an_observation_and_a_raising_tool_fails_the_rollout(monkeypatch: pytest.MonkeyPatch):
    from mcp_types import CallToolRequestParams

    monkeypatch.setattr(tool_server, "GRACE_S", 0.05)
    failures: list[RollyardError] = []
    server = tool_server.ToolServer({name: Odd(ToolSpec(name, "", {})) for name in ("hangs", "breaks")}, tool_s=0.05)
    server.on_failure = failures.append
    hung = await server._call(None, CallToolRequestParams(name="hangs"))
    assert (hung.content[0].text, hung.is_error) == ("Error: hangs did not answer within 0.05 s", True)
    assert failures == []
    broken = await server._call(None, CallToolRequestParams(name="breaks"))
    assert broken.content[0].text == "this rollout has ended", "the exception is not shown to the program"
    assert [failure.code for failure in failures] == ["environment_broken"], "it is a class of this file"


async def test_the_name_of_the_environments_tools_is_reserved(tmp_path: Path):
    environments = Environments({"talk": Talk(brings_tools=True)})
    options = {**runs(PROGRAM), "mcp": {"environment": {"server": "known", "inside": True}}}
    servers = {"known": OutsideServer("http://127.0.0.1:9/mcp")}
    async with open_site(
        tmp_path, plays(["it"]), environments=environments, pythons=pythons(), mcp_servers=servers
    ) as site:
        rollout = await site.rolled(Task("talk", agent=AgentSpec("command", options)))
    assert rollout.ending is not None and rollout.ending.failure is not None
    assert (rollout.ending.failure.code, rollout.ending.failure.blame) == ("task_invalid", Blame.TASK)
    assert "that name is reserved for talk's own tools" in rollout.ending.failure.detail


def test_a_context_without_a_gateway_names_the_missing_setting():
    model: Any = object()
    context = AgentContext(task=Task("x"), rollout_id="r", model=model, tools={}, sandbox=None, clock=Deadline())
    with pytest.raises(RuntimeError, match="set needs_gateway"):
        _ = context.gateway
    assert context.conversation is context.model
