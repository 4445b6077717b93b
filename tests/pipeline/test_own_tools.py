"""An environment may bring its own tools in addition to the agent's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollyard.core import Json, Outcome, Score, Task
from rollyard.envs import EnvContext, Environment, Environments, Evidence, Plan, Start
from rollyard.testing.script import Reply, Rules
from rollyard.tools.base import ToolContext, ToolResult, ToolSpec
from tests.pipeline.site import finish, open_site

SPEC = ToolSpec("weigh", "Weighs a thing.", {"type": "object", "properties": {"thing": {"type": "string"}}})


@dataclass
class Scales:
    """Opened for one rollout, and closed with it."""

    weighed: list[str]
    closed: list[str]
    spec: ToolSpec = SPEC

    async def call(self, arguments: Mapping[str, Json], *, timeout_s: float) -> ToolResult:
        self.weighed.append(str(arguments["thing"]))
        return ToolResult("7 kg")

    async def close(self) -> None:
        self.closed.append("scales")


@dataclass
class ScalesKind:
    weighed: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    spec: ToolSpec = SPEC
    needs_sandbox: bool = False
    needs_python: bool = False

    async def open(self, context: ToolContext) -> Scales:
        return Scales(self.weighed, self.closed)


class Market(Environment):
    name = "market"
    tools = ("finish",)

    def __init__(self, kind: ScalesKind) -> None:
        self._kind = kind

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "Weigh the anvil."},), tools=(self._kind,))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        return Score(float(evidence.answer == "7 kg"))


async def test_the_model_is_offered_the_environments_tool_and_can_call_it(tmp_path: Path):
    kind = ScalesKind()
    call = "<tool_call>\n" + json.dumps({"name": "weigh", "arguments": {"thing": "anvil"}}) + "\n</tool_call>"
    script = Rules(rules=(("Weigh the anvil", (Reply(call), Reply(finish("7 kg")))),))
    async with open_site(tmp_path, script, environments=Environments({"market": Market(kind)})) as site:
        rollout = await site.rolled(Task("market"))
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED
        assert rollout.ending.score == Score(1.0)
        assert (kind.weighed, kind.closed) == (["anvil"], ["scales"])
        trajectory = await site.store.trajectory(rollout.id)
        assert trajectory is not None
        names = {schema["function"]["name"] for schema in trajectory.tools}  # type: ignore[index,call-overload]
        assert names == {"weigh", "finish"}


class Jammed(Scales):
    """Works, and cannot be closed."""

    async def close(self) -> None:
        raise RuntimeError("the lid is stuck")


class JammedKind(ScalesKind):
    needs_sandbox = True
    needs_python = False

    async def open(self, context: ToolContext) -> Jammed:
        return Jammed(self.weighed, self.closed)


class JammedMarket(Market):
    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=True, eval_needs_sandbox=False)


async def test_a_tool_that_cannot_be_closed_costs_no_place_if_its_sandbox_is_gone(tmp_path: Path):
    script = Rules(rules=(("Weigh the anvil", (Reply(finish("7 kg")),)),))
    environments = Environments({"market": JammedMarket(JammedKind())})
    async with open_site(tmp_path, script, environments=environments) as site:
        for _ in range(3):
            rollout = await site.rolled(Task("market"))
            assert rollout.ending is not None
            assert rollout.ending.outcome is Outcome.COMPLETED
            assert any("the lid is stuck" in note for note in rollout.ending.summary.notes)
        assert site.pipeline.quarantined == 0
        site.nothing_left()
