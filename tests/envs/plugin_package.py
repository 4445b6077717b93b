"""An installed package whose environments and agent have mistakes, on disk and found by its entry points."""

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

PACKAGE = "flawed_yard"

INIT = '''from rollyard.agents import Agent
from rollyard.envs import Environment, Plan, Score, Solution, Start


class Flawed(Environment):
    """Raises an exception in the method that the task names."""

    name = "flawed"

    def flaw(self, task, method):
        if task.data.get("where") == method:
            return undefined_name

    def check(self, task):
        self.flaw(task, "check")

    def plan(self, task):
        self.flaw(task, "plan")
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context):
        self.flaw(context.task, "init")
        return Start(({"role": "user", "content": "do it"},))

    async def solve(self, context, tools):
        self.flaw(context.task, "solve")
        return Solution("42")

    async def eval(self, context, evidence):
        self.flaw(context.task, "eval")
        if context.task.data.get("where") == "eval, by what it evaluates":
            return Score(float([][len(evidence.answer)]))
        return Score(float(evidence.answer == "42"))

    def generate(self, options):
        yield {"data": {}}
        yield {"data": {"numbers": [1, 2][5]}}


class FlawedAgent(Agent):
    name = "flawed"
    needs_model = False

    async def run(self, context, messages):
        if context.task.data.get("where") == "run, by a connection":
            raise ConnectionError("refused")
        return messages.missing
'''

METADATA = "Metadata-Version: 2.1\nName: flawed-yard\nVersion: 0.3\n"

POINTS = f"""[rollyard.environments]
flawed = {PACKAGE}:Flawed
unloadable = {PACKAGE}.unloadable:Unloadable
absent = {PACKAGE}:Absent
[rollyard.agents]
flawed = {PACKAGE}:FlawedAgent
unloadable = {PACKAGE}.unloadable:UnloadableAgent
"""

UNLOADABLE = "import json\n\nimport a_missing_module\n"


@pytest.fixture
def flawed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path, None, None]:
    """Its folder. As installed in site-packages: modules, and metadata beside them."""
    site = tmp_path / "site"
    for path, text in {
        f"{PACKAGE}/__init__.py": INIT,
        f"{PACKAGE}/unloadable.py": UNLOADABLE,
        "flawed_yard-0.3.dist-info/METADATA": METADATA,
        "flawed_yard-0.3.dist-info/entry_points.txt": POINTS,
    }.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    monkeypatch.syspath_prepend(site)
    yield site / PACKAGE
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
