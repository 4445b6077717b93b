"""`rollyard init` writes a project whose own tests pass and whose trainer runs, and overwrites nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rollyard.cli
from rollyard.cli import main
from rollyard.cli.commands.init import FILES
from rollyard.cli.rig import service
from rollyard.envs import Environment
from rollyard.service.machine import all_environments
from rollyard.service.settings import Settings, SettingsError
from tests.cli.conftest import Cli
from tests.embedded.environment import environ, serving
from tests.trainers.environment import trainer_python

TEMPLATES = Path(rollyard.cli.__file__).parent / "project"


async def test_all_files_are_written_with_the_name_of_the_environment(cli: Cli, tmp_path: Path):
    result = await cli("init", "My-Project.2", "--json")
    assert result.status == 0, result.err
    folder = tmp_path / "My-Project.2"
    assert {path.name for path in TEMPLATES.iterdir() if path.is_file()} == FILES.keys()
    assert {path.name for path in folder.iterdir()} == set(FILES.values())
    assert "PROJECT" not in "".join(path.read_text() for path in folder.iterdir())
    tasks = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
    assert [task["environment"] for task in tasks] == ["my_project_2"] * 10
    assert len({task["data"]["kind"] for task in tasks}) == 5


async def test_the_last_lines_say_what_to_do_next(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    steps = ["cd project", "make test", "rollyard tasks try tasks.jsonl:1 --agent oracle"]
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:{os.environ['PATH']}")
    lines = [line.strip() for line in (await cli("init", "project")).out.splitlines()]
    assert lines[lines.index("Next:") + 1 : -1] == steps
    assert "`make train`" in lines[-1]
    monkeypatch.setenv("PATH", "/usr/bin")  # another Python than the one that Rollyard is installed in
    lines = [line.strip() for line in (await cli("init", "other/project")).out.splitlines()]
    assert lines[lines.index("Next:") + 1] == f". {sys.prefix}/bin/activate"


async def test_json_names_the_files_and_the_next_steps(cli: Cli, tmp_path: Path):
    (written,) = (await cli("init", "here/there", "--name", "mine", "--json")).json
    assert (written["folder"], written["name"]) == (str(tmp_path / "here" / "there"), "mine")
    assert all((tmp_path / "here" / "there" / file).is_file() for file in written["files"])
    assert "make test" in written["next"]


@pytest.mark.slow
async def test_the_tests_of_a_new_project_pass(cli: Cli, tmp_path: Path):
    await cli("init", "project")
    command = ["make", "test", f"PYTHON={sys.executable}"]
    completed = subprocess.run(command, cwd=tmp_path / "project", capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "Ran 3 tests" in completed.stderr and completed.stderr.endswith("OK\n")


@pytest.mark.parametrize(
    ("target", "path", "says"),
    [
        ("test", "", "{python} has no Rollyard: activate its virtual environment, or add PYTHON=PATH\n"),
        ("train", "{source}", "train.py needs torch and transformers: pip install 'rollyard[local]'\n"),
    ],
)
async def test_a_missing_package_is_reported_by_the_makefile(
    cli: Cli, tmp_path: Path, target: str, path: str, says: str
):
    await cli("init", "project")
    python = f"{sys.executable} -S"  # without installed packages
    completed = subprocess.run(
        ["make", "--no-print-directory", target, f"PYTHON={python}"],
        cwd=tmp_path / "project",
        env={**os.environ, "PYTHONPATH": path.format(source=Path(rollyard.cli.__file__).parent.parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, *_ = completed.stderr.splitlines(keepends=True)
    assert (completed.returncode, completed.stdout, first) == (2, "", says.format(python=python))
    assert "Traceback" not in completed.stderr


@pytest.mark.local
@pytest.mark.slow
async def test_the_trainer_of_a_new_project_trains_an_adapter(tiny_model: Path, tmp_path: Path):
    """The tiny model gets no reward: `--keep all` delivers such groups, too."""
    project = tmp_path / "project"
    assert main(["init", str(project)]) == 0
    small = ["--epochs", "2", "--steps", "1", "--groups", "1", "--held-out", "2", "--keep", "all"]
    environments = {"project": f"{project}/environment.py:Commands"}
    (tmp_path / "log").mkdir()
    with serving(tiny_model, tmp_path / "log" / "engine", "--cache-gib", "0.1") as engine:
        settings = {"engines": [engine["url"]], "environments": environments}
        async with service(tmp_path, settings) as served:
            completed = subprocess.run(
                [trainer_python("local"), "train.py", "--engine", engine["url"], "--model", tiny_model, *small],
                cwd=project,
                env=environ(tmp_path) | {"ROLLYARD_URL": served.url, "ROLLYARD_TOKEN": served.token},
                capture_output=True,
                text=True,
                timeout=150,
            )
    assert completed.returncode == 0, completed.stderr
    phases = [json.loads(line)["phase"] for line in (project / "log.jsonl").read_text().splitlines()]
    assert phases == ["base", "warm", "warm", "warm", "rl", "rl"]
    assert {path.name for path in (project / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


async def test_a_folder_with_files_is_refused_and_unchanged(cli: Cli, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "Makefile").write_text("mine")
    result = await cli("init", "full")
    assert (result.status, result.err) == (
        1,
        "rollyard: full is not empty — give a new folder; nothing was written\n",
    )
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["Makefile"]
    assert (tmp_path / "full" / "Makefile").read_text() == "mine"


async def test_a_file_is_refused(cli: Cli, tmp_path: Path):
    (tmp_path / "file").touch()
    assert (await cli("init", "file")).err == "rollyard: file is a file — give a new folder; nothing was written\n"
    assert "rollyard: file/below cannot be written: Not a directory" in (await cli("init", "file/below")).err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Upper", "'Upper' cannot be the name of an environment — give one with --name: a lower case letter, then"),
        ("a.b", "'a.b' cannot be the name"),
        ("math", "there is an environment math already — give another name with --name"),
    ],
)
async def test_a_name_that_cannot_be_used_is_refused(cli: Cli, tmp_path: Path, name: str, says: str):
    result = await cli("init", "project", "--name", name)
    assert result.status == 2 and f"rollyard: {says}" in result.err
    assert not (tmp_path / "project").exists()


# --- environments of the settings


async def test_an_environment_of_the_settings_is_found_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    Path("beside.py").write_text("WORD = 'apple'")
    Path("words_of_mine.py").write_text(
        "from beside import WORD\nfrom rollyard.envs import Environment\nclass Words(Environment):\n    name = WORD\n"
    )
    for place in ("words_of_mine.py:Words", "words_of_mine:Words"):  # then it is a module like any other
        async with all_environments(Settings(environments={"words": place})) as environments:
            assert "words" in environments.names and "math" in environments.names
            assert isinstance(environments.get("words"), Environment)
            assert environments.get("words").name == "apple"


def test_a_file_that_does_not_exist_is_an_error_of_the_settings(tmp_path: Path):
    place = f"{tmp_path}/missing.py:Words"
    with pytest.raises(SettingsError, match=f"environments: there is no file {tmp_path}/missing.py"):
        all_environments(Settings(environments={"words": place}))


def test_a_service_whose_environment_is_missing_does_not_start(tmp_path: Path):
    (tmp_path / "rollyard.toml").write_text('[environments]\nwords = "missing.py:Words"\n')
    command = [sys.executable, "-m", "rollyard", "serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    completed = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 1 and "Traceback" not in completed.stderr, completed.stderr
    assert f"environments: there is no file {tmp_path}/missing.py" in completed.stderr
