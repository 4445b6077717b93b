"""The described fields of an environment's data are those that it reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollyard.agents.registry import Agents
from rollyard.core import AgentSpec, Task
from rollyard.core.failure import TaskInvalid
from rollyard.core.task import REQUIRED
from rollyard.envs import Environments
from rollyard.envs.fields import Fields

TASKS = Path(__file__).parents[2] / "examples" / "environments.jsonl"

MORE: list[dict[str, Any]] = [
    {"environment": "shell", "data": {"instruction": "x", "checks": [{"command": "true"}]}},
    {"environment": "harbor", "data": {"instruction": "x", "tests": {"test.sh": "true"}, "setup": [{"run": "true"}]}},
    {"environment": "harbor", "data": {"instruction": "x", "tests": {"test.sh": "true"}, "setup": [{"files": {}}]}},
    {"environment": "swe", "data": {"repo": "a/b", "problem_statement": "x", "FAIL_TO_PASS": ["t"], "PASS_TO_PASS": [],
                                    "test_command": "t", "log_parser": "parse_log_pytest"}},
    {"environment": "swe", "data": {"repo_name": "b", "problem_statement": "x", "expected_output_json": {"t": "ok"}}},
    {"environment": "gym", "data": {"server": "s", "row": {"responses_create_params": {"input": "x"}}}},
    {"environment": "session", "data": {}, "agent": "session"},
]  # fmt: skip
BELOW_A_LIST = ("outputs",)  # read only if it is there


def read_by(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Returns the names that the environments read in the checks of valid tasks; below a list as `name[].inner`."""
    read: dict[str, set[str]] = {}
    get = Fields.get

    def noted(self: Fields, name: str) -> Any:
        where = self._where.partition("[")[0].removeprefix("data").lstrip(".")
        read.setdefault(self._task.environment, set()).add(f"{where}[].{name}" if where else name)
        return get(self, name)

    monkeypatch.setattr(Fields, "get", noted)
    environments = Environments()
    examples = [json.loads(line) for line in TASKS.read_text().splitlines() if line.startswith("{")]
    for example in (*examples, *MORE):
        task = Task(example["environment"], example["data"], agent=AgentSpec(example.get("agent", "")))
        try:
            environments.get(task.environment).check(task)
        except TaskInvalid as error:  # there is no image and no server here, which is checked after the data
            assert ": data." not in error.detail or "there is no resources server" in error.detail, error.detail
    return read


def test_the_described_fields_are_those_that_are_read(monkeypatch: pytest.MonkeyPatch):
    environments, read = Environments(), read_by(monkeypatch)
    for name in ("shell", "math", "stem", "code", "swe", "reasoning_gym", "harbor", "gym", "session", "yardwork"):
        fields = environments.get(name).data_fields
        described = {field.name for field in fields if not field.name.endswith(BELOW_A_LIST)}
        assert described == read[name], name
        assert len(fields) == len({field.name for field in fields})
        for field in fields:
            assert field.kind and field.default and field.about.endswith("."), field


@pytest.mark.parametrize("name", ["native", "command", "codex"])
def test_the_described_options_of_an_agent_are_those_that_it_accepts(name: str):
    agent = Agents().get(name)
    described = {field.name for field in agent.option_fields}
    required = {field.name: ["x"] for field in agent.option_fields if field.default == REQUIRED}
    with pytest.raises(TaskInvalid) as caught:
        agent.check(Task("shell", agent=AgentSpec(name, {**required, "zzz": 1})))
    listed = caught.value.detail.partition("there are ")[2].split(", ")
    assert described - set(listed) <= {"reasoning_history", "strict", "structured_output", "mcp"}
    assert set(listed) <= described
