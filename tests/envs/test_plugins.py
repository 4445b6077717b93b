"""Mistakes in the code of another package are blamed on that package: its name, the file and the line are reported."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest

from rollyard.agents.registry import Agents
from rollyard.cli.doctor.plugins import plugin_checks
from rollyard.core import AgentSpec, Blame, Task
from rollyard.core.failure import AgentBroken, EnvironmentBroken
from rollyard.envs import Environments
from rollyard.pipeline.local_rollout import play
from rollyard.service.settings import Settings
from tests.cli.conftest import Cli, cli  # noqa: F401
from tests.cli.test_submit import lines
from tests.envs.plugin_package import INIT, flawed_package  # noqa: F401
from tests.envs.stage_resources import open_resources
from tests.service.site import open_site

pytestmark = pytest.mark.usefixtures("flawed_package")

UNLOADABLE = (
    "its package flawed-yard 0.3 cannot be loaded: ModuleNotFoundError: No module named 'a_missing_module'"
    " (flawed_yard/unloadable.py, line 3, in <module>)"
)
LINE = 1 + INIT.splitlines().index("            return undefined_name")
NAME_ERROR = f"NameError: name 'undefined_name' is not defined (flawed_yard/__init__.py, line {LINE}, in flaw)"


def body(where: str = "", **fields: Any) -> dict[str, Any]:
    return {"environment": "flawed", "data": {"where": where}, **fields}


def test_a_package_that_cannot_be_loaded_is_named_with_file_and_line(monkeypatch: pytest.MonkeyPatch):
    environments, agents = Environments(), Agents()
    with pytest.raises(EnvironmentBroken) as caught:
        environments.get("unloadable")
    assert caught.value.detail == f"the environment 'unloadable' cannot be used: {UNLOADABLE}"
    with pytest.raises(AgentBroken) as caught:
        agents.get("unloadable")
    assert caught.value.detail == f"the agent 'unloadable' cannot be used: {UNLOADABLE}"
    with pytest.raises(EnvironmentBroken, match="AttributeError: module 'flawed_yard' has no attribute 'Absent'"):
        environments.get("absent")
    assert set(environments.load_all()) == {"unloadable", "absent"} and set(agents.load_all()) == {"unloadable"}
    assert environments.get("flawed").name == "flawed" and environments.get("shell").name == "shell"
    monkeypatch.setattr(importlib, "import_module", None)
    with pytest.raises(EnvironmentBroken):  # it is not imported again
        environments.get("unloadable")


async def test_an_exception_is_blamed_on_the_code_that_raised_it():
    async with open_resources("bubblewrap") as resources:
        for where, agent, code, blame, detail in (
            ("plan", "noop", "environment_broken", Blame.TASK, f"flawed.plan raised {NAME_ERROR}"),
            ("init", "noop", "environment_broken", Blame.TASK, f"flawed.init raised {NAME_ERROR}"),
            ("solve", "oracle", "environment_broken", Blame.TASK, f"flawed.solve raised {NAME_ERROR}"),
            ("eval", "noop", "environment_broken", Blame.TASK, f"flawed.eval raised {NAME_ERROR}"),
            (
                "eval, by what it evaluates",
                "noop",
                "verifier_crashed",
                Blame.INFRA,
                "flawed.eval raised IndexError: list index out of range (flawed_yard/__init__.py, line ",
            ),
            (
                "run, by a connection",
                "flawed",
                "internal_error",
                Blame.INFRA,
                "the agent flawed raised ConnectionError: refused (flawed_yard/__init__.py, line ",
            ),
            (
                "",
                "flawed",
                "agent_broken",
                Blame.TASK,
                "the agent flawed raised AttributeError: 'tuple' object has no attribute 'missing'"
                " (flawed_yard/__init__.py, line ",
            ),
        ):
            task = Task("flawed", {"where": where}, agent=AgentSpec(agent))
            failure = (await play(resources, task)).failure
            assert failure is not None, where
            assert (failure.code, failure.blame) == (code, blame), where
            assert failure.detail.startswith(detail)
        with pytest.raises(EnvironmentBroken) as caught:
            await play(resources, Task("flawed", {"where": "check"}, agent=AgentSpec("noop")))
        assert caught.value.detail == f"flawed.check raised {NAME_ERROR}"


async def test_the_service_logs_at_its_start_what_cannot_be_loaded_and_refuses_its_tasks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with open_site(tmp_path) as site:
        logged = {
            (record.message, getattr(record, "environment", "") or getattr(record, "agent", ""))
            for record in caplog.records
            if record.levelno >= logging.ERROR
        }
        assert logged >= {
            ("an environment cannot be loaded", "unloadable"),
            ("an environment cannot be loaded", "absent"),
            ("an agent cannot be loaded", "unloadable"),
        }
        caplog.clear()
        refused = await site.post("/v1/rollouts", {"task": {"environment": "unloadable"}})
        assert (refused.status, refused.code) == (422, "environment_broken")
        assert refused.body["detail"].endswith(UNLOADABLE)
        refused = await site.post("/v1/rollouts", {"task": body("check")})
        assert (refused.code, refused.body["detail"]) == ("environment_broken", f"flawed.check raised {NAME_ERROR}")
        late = {**body(), "limits": {"run_s": 0}}
        tasks = [body("check"), body(), body("check"), {"environment": "unloadable"}, late]
        checked = (await site.post("/v1/tasks/check", {"tasks": tasks})).body
        assert (checked["checked"], checked["bad"]) == (5, 4)
        assert [(problem["index"], problem["code"]) for problem in checked["problems"]] == [
            (0, "environment_broken"),
            (2, "environment_broken"),
            (3, "environment_broken"),
            (4, "invalid_request"),
        ]
        assert [record.exc_info is not None for record in caplog.records if record.name == "rollyard.service"] == [True]


async def test_the_doctor_reports_packages_that_cannot_be_loaded(tmp_path: Path):
    checks = await plugin_checks(Settings(data_dir=tmp_path / "data"))
    assert {(check.name, check.state) for check in checks} == {
        ("environment unloadable", "warn"),
        ("environment absent", "warn"),
        ("agent unloadable", "warn"),
    }
    assert UNLOADABLE in checks[0].detail and checks[0].remedy


async def test_commands_report_the_line_and_no_traceback(cli: Cli, tmp_path: Path):  # noqa: F811
    file = lines(tmp_path / "t.jsonl", body("eval"), {"environment": "unloadable"}, body("check"))
    result = await cli("tasks", "validate", file, "--run", "--json", "--runtime", "local")
    assert result.status == 1 and "Traceback" not in result.err, result.err
    in_eval, unloadable, in_check = result.json
    assert in_eval["problems"] == [
        f"oracle: environment_broken in eval: flawed.eval raised {NAME_ERROR}",
        f"no-op: environment_broken in eval: flawed.eval raised {NAME_ERROR}",
    ]
    assert unloadable["problems"] == [f"the environment 'unloadable' cannot be used: {UNLOADABLE}"]
    assert in_check["problems"] == [f"flawed.check raised {NAME_ERROR}"]
    assert "0 not tried for reasons outside the task" in result.err

    tried = await cli("tasks", "try", f"{file}:1", "--agent", "noop", "--runtime", "local")
    assert tried.status == 1 and "environment_broken (blame: task, in eval)" in tried.out and NAME_ERROR in tried.out
    tried = await cli("tasks", "try", f"{file}:2", "--agent", "noop", "--runtime", "local")
    assert tried.status == 1 and UNLOADABLE in tried.err and tried.err.count("\n") == 1

    imported = await cli("tasks", "import", "flawed")
    assert imported.status == 1 and imported.out == "" and "Traceback" not in imported.err
    assert "the importer of flawed raised IndexError: list index out of range (flawed_yard/__init__.py" in imported.err
