"""`rollyard agents` with real pip, a real sandbox and a real gateway; the model is scripted."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from rollyard.agents.installation import AgentInstalls
from rollyard.agents.preset import read_preset
from tests.agents.harness_parts import CACHE, PROGRAM
from tests.agents.test_install import wheel
from tests.cli.conftest import Cli

pytestmark = pytest.mark.slow

TINY = """
name = "tiny"
version = "1.0"
about = "Says [bold]tiny[/]."
dialect = "chat"
command = ["{{python}}", "{{install}}", "tiny", "{{instruction}}"]
[env]
BASE_URL = "{{base_url}}"
[install]
kind = "pip"
packages = ["tiny==1.0"]
[try]
[[try.turns]]
say = "I correct it."
calls = [{ name = "sh", arguments = { command = "sed -i s/wrold/world/ greeting.txt" } }]
[[try.turns]]
say = "Done."
"""


@pytest.fixture(scope="module")
def shared_install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed program, shared by tests of other features: pip takes a second."""
    base = tmp_path_factory.mktemp("made")
    wheel(base / "wheels", code=PROGRAM)
    return asyncio.run(AgentInstalls(base / "agents").install(read_preset(TINY), source=base / "wheels"))


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    (folder / "agents").mkdir(parents=True)
    (folder / "agents/tiny.toml").write_text(TINY)
    (folder / "python").symlink_to(CACHE / "python")  # building one takes seconds
    (CACHE / "python").mkdir(parents=True, exist_ok=True)
    wheel(tmp_path / "wheels", code=PROGRAM)
    monkeypatch.setenv("ROLLYARD_DATA_DIR", str(folder))
    return folder


@pytest.fixture
def installed(shared_install: Path, data_dir: Path) -> None:
    shutil.copytree(shared_install, data_dir / "agents" / shared_install.name)


async def test_list_show_and_install(cli: Cli, tmp_path: Path, data_dir: Path):
    rows = {row["name"]: row for row in (await cli("agents", "list", "--json")).json}
    assert {"claude-code", "codex", "command", "mini-swe-agent", "tiny"} <= set(rows)
    assert (rows["command"]["state"], rows["tiny"]["state"], rows["tiny"]["folder"]) == ("in the image", "no", None)
    result = await cli("agents", "list")
    assert "mini-swe-agent" in result.out and "Says [bold]tiny[/]." in result.out

    result = await cli("agents", "show", "tiny")
    assert result.out == TINY and "installed: no" in result.err
    result = await cli("agents", "install", "tiny", "--from", tmp_path / "wheels")
    assert (result.status, result.out) == (0, ""), result.err
    assert "pip installs tiny==1.0" in result.err and "tiny 1.0 is installed: " in result.err
    (row,) = (await cli("agents", "install", "tiny", "--json")).json
    assert row["state"] == "yes" and Path(row["folder"]).parent == data_dir / "agents"
    (shown,) = (await cli("agents", "show", "tiny", "--json")).json
    assert shown["preset"] == TINY and shown["folder"] == row["folder"]


async def test_errors_are_one_line_with_a_remedy(cli: Cli, tmp_path: Path, data_dir: Path):
    (data_dir / "agents/broken.toml").write_text('name = "broken"\ncommand = [1]')
    for words, status, text in (
        (("show", "none"), 1, "none is not a preset"),
        (("show", "native"), 1, "native is part of Rollyard, not a preset"),
        (("install", "command"), 1, "nothing to install"),
        (("install", "broken"), 1, "command[0]: Expected `str`, got `int`"),
        (("install", "tiny", "--from", tmp_path / "nowhere"), 2, "is not a folder"),
        (("install", "tiny", "--from", data_dir), 1, "pip ended with 1"),
        (("try", "command"), 2, "has no [try]"),
        (("try", "tiny", "--task", "x.json"), 2, "give --engine"),
    ):
        result = await cli("agents", *words)
        assert (result.status, result.out) == (status, ""), result
        assert text in result.err and result.err.splitlines()[-1].startswith("rollyard: "), result.err
    (row,) = [row for row in (await cli("agents", "list", "--json")).json if row["name"] == "broken"]
    assert row["state"] == "broken" and "command[0]" in row["about"]


async def test_try_installs_the_program_runs_one_rollout_and_shows_the_result(cli: Cli, tmp_path: Path):
    result = await cli("agents", "try", "tiny", "--from", tmp_path / "wheels")
    assert result.status == 0, result.err
    assert "a scripted engine replaces the model" in result.err
    for line in ("assistant: I correct it.", "→ sh({", "completed", "reward     1.0", "turns      2", "verified   yes"):
        assert line in result.out, result.out
    (body,) = (await cli("agents", "try", "tiny", "--json")).json
    assert (body["outcome"], body["reward"], body["turns"], body["traces"]) == ("completed", 1.0, 2, 1)
    assert body["verified"] and body["forks"] == [] and body["harness"]["exit_status"] == 0
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.usefixtures("installed")
async def test_a_failed_try_shows_the_last_output_of_the_program(cli: Cli, data_dir: Path):
    crashing = TINY.replace('"tiny", "{{instruction}}"', '"no_such_module"')
    (data_dir / "agents/tiny.toml").write_text(crashing)
    result = await cli("agents", "try", "tiny")
    assert result.status == 1
    assert "agent_crashed (task)" in result.out and "no_such_module" in result.out and "reward     none" in result.out


@pytest.mark.usefixtures("installed")
async def test_try_runs_a_given_task_on_a_given_engine(cli: Cli, tmp_path: Path):
    from rollyard.testing.script import FolderTokenizer
    from rollyard.testing.scripted_engine import ScriptedEngine
    from rollyard.testing.tokenizer_files import tokenizer_dir

    task = {"environment": "shell", "data": {"instruction": "x", "checks": ["true"]}, "agent": {"name": "native"}}
    (tmp_path / "task.json").write_text(json.dumps(task))
    async with ScriptedEngine(lambda _: "Done.", tokenizer=FolderTokenizer(tokenizer_dir())) as engine:
        words = ("--task", "task.json", "--engine", engine.url, "--tokenizer", tokenizer_dir(), "--json")
        result = await cli("agents", "try", "tiny", *words)
    assert result.status == 0, result.err
    assert (result.json[0]["agent"], result.json[0]["turns"], result.json[0]["reward"]) == ("tiny", 1, 1.0)
