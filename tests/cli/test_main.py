"""The command line as a whole: help, errors, exit statuses, imports, and the reference page."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from rollyard import __version__
from rollyard.cli import _commit
from rollyard.cli._reference import reference
from rollyard.cli.app import app, app_for
from tests.cli.conftest import Cli

pytestmark = pytest.mark.slow

HEAVY = {"aiohttp", "pyarrow", "fastapi", "torch", "numpy", "msgspec", "orjson", "tokenizers"}


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    children = getattr(command, "commands", None)
    if not children:
        return [path]
    return [leaf for name, child in children.items() for leaf in leaves(child, (*path, name))]


COMMANDS = leaves(get_command(app))


def test_the_commands_are_complete():
    names = {path[0] for path in COMMANDS}
    assert names == {
        *("serve", "submit", "eval", "tasks", "rollouts", "agents", "engines", "images", "runs", "tokens", "top"),
        *("shell", "doctor", "bench", "config", "demo", "gym-agent", "policies", "draws", "engine", "weights"),
        *("slurm", "node", "nodes", "access", "pools", "init", "open", "view"),
    }
    assert {path[1] for path in COMMANDS if path[0] == "rollouts"} == {"list", "show", "cancel", "traces", "rescore"}
    assert {path[1] for path in COMMANDS if path[0] == "engines"} == {"list", "add", "remove", "clear"}
    assert {path[1] for path in COMMANDS if path[0] == "policies"} == {"list", "pause", "resume"}
    assert {path[1] for path in COMMANDS if path[0] == "images"} == {"pull", "build", "list", "prune", "remove"}
    assert {path[1] for path in COMMANDS if path[0] == "runs"} == {"list", "create", "plot", "export", "delete"}
    assert {path[1] for path in COMMANDS if path[0] == "tokens"} == {"check"}
    assert {path[1] for path in COMMANDS if path[0] == "weights"} == {"fetch", "list"}
    assert {path[1] for path in COMMANDS if path[0] == "nodes"} == {"list", "drain", "resume"}
    assert {path[1] for path in COMMANDS if path[0] == "slurm"} == {"up", "status", "down"}
    assert {path[1] for path in COMMANDS if path[0] == "pools"} == {"list", "resize"}


@pytest.mark.parametrize("name", dict.fromkeys(path[0] for path in COMMANDS))
def test_a_line_prepares_only_its_own_command(name: str):
    assert leaves(get_command(app_for([name, "--json"]))) == [path for path in COMMANDS if path[0] == name]


@pytest.mark.parametrize("line", [[], ["--help"], ["runz", "list"], [""]])
def test_other_lines_prepare_all_commands(line: list[str]):
    assert app_for(line) is app


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
async def test_every_help_has_an_example_and_json(cli: Cli, path: tuple[str, ...]):
    result = await cli(*path, "--help")
    assert result.status == 0
    assert f"Example: rollyard {' '.join(path)}" in result.out
    assert "--json" in result.out or path[0] in ("serve", "demo", "gym-agent", "node")


@pytest.mark.parametrize("line", [(), ("runs",)], ids=["no command", "no subcommand"])
async def test_without_a_command_the_help_is_printed_as_help(cli: Cli, line: tuple[str, ...]):
    result = await cli(*line)
    assert (result.status, result.out) == (2, "")
    assert result.err == (await cli(*line, "--help")).out


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from rollyard.cli import main
assert main(["--help"]) == 0 and main(["submit", "--help"]) == 0
heavy = {HEAVY!r} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            "from rollyard.cli import main; assert main(['tasks', 'validate', sys.argv[1]]) == 0",
            {"fastapi", "starlette"},
        ),
        ("import rollyard.service.app", {"numpy", "pyarrow", "torch", "transformers"}),
    ],
    ids=["tasks validate", "the service"],
)
def test_a_start_imports_only_what_it_needs(code: str, heavy: set[str]):
    tasks = Path(__file__).parents[2] / "examples" / "tasks.jsonl"
    check = f"import sys; {code}; unneeded = {heavy!r} & set(sys.modules); assert not unneeded, unneeded"
    subprocess.run([sys.executable, "-c", check, tasks], check=True, timeout=30, stdout=subprocess.DEVNULL)


def test_the_reference_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
    assert page.read_text() == reference(), "regenerate it: python -m rollyard.cli._reference > docs/reference/cli.md"


async def test_the_version_is_printed_with_the_commit(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    printed = (await cli("--version")).out
    assert re.fullmatch(rf"rollyard {re.escape(__version__)} \(commit [0-9a-f]{{12}}(-dirty)?\)\n", printed), printed
    package = tmp_path / "site-packages" / "rollyard"
    package.mkdir(parents=True)
    monkeypatch.setattr(_commit, "_PACKAGE", package)
    assert (await cli("--version")).out == f"rollyard {__version__}\n", "neither built from a commit nor in a checkout"
    (package / "_commit.txt").write_text("0123456789ab\n")
    assert (await cli("--version")).out == f"rollyard {__version__} (commit 0123456789ab)\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands_and_options(shell: str):
    words = {"bash": {"COMP_WORDS": "rollyard sub", "COMP_CWORD": "1"}, "zsh": {}, "fish": {}}[shell]
    env = {**os.environ, "_ROLLYARD_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "rollyard sub", **words}
    env["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    argv = [sys.executable, "-m", "rollyard"]
    completed = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=30)
    assert "submit" in completed.stdout and "serve" not in completed.stdout, completed


@pytest.mark.parametrize(
    ("shell", "part"), [("bash", "COMP_WORDS"), ("zsh", "#compdef rollyard"), ("fish", "complete --command rollyard")]
)
async def test_the_completion_of_a_named_shell_is_printed(cli: Cli, shell: str, part: str):
    printed = await cli("--show-completion", shell)
    assert printed.status == 0 and part in printed.out and "_ROLLYARD_COMPLETE" in printed.out, printed


async def test_the_completion_of_a_named_shell_is_installed(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (await cli("--install-completion", "fish")).status == 0
    [script] = tmp_path.rglob("rollyard.fish")
    assert "_ROLLYARD_COMPLETE" in script.read_text()


async def test_an_unknown_shell_is_refused(cli: Cli):
    refused = await cli("--show-completion", "tcsh")
    assert refused.status == 2
    assert refused.err.startswith("rollyard: 'tcsh' is no shell with completion — name one of: bash, zsh, fish")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["sumbit"], "No such command 'sumbit'"),
        (["submit"], "Missing argument"),
        (["submit", "x.jsonl", "--group-size", "0"], "--group-size"),
        (["top", "--fast"], "No such option: --fast"),
        (["bench", "nothing"], "there is no benchmark 'nothing'"),
        (["serve", "--tokenizer", "x"], "--tokenizer needs --engine"),
        (["submit", "x.jsonl", "--no-wait", "--out", "x.jsonl"], "--out needs the rollouts to end"),
        (["submit", "x.jsonl", "--out", "x.parquet"], "unknown file format"),
        (["runs", "create", "--defaults", "{"], "--defaults is not JSON"),
        (["runs", "create", "--overlong-penalty", "8192"], "expected FROM:TO or FROM:TO:MOST"),
    ],
)
async def test_wrong_usage_is_one_line_and_status_2(cli: Cli, argv: list[str], says: str):
    result = await cli(*argv)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("rollyard: ") and says in result.err and " — " in result.err
    assert result.err.count("\n") == 1


async def test_an_unreachable_service_is_one_line_and_status_1(cli: Cli, unused_tcp_port: int):
    result = await cli("top", "--once", "--url", f"http://127.0.0.1:{unused_tcp_port}", "--token", "t")
    assert (result.status, result.out) == (1, "")
    assert "cannot connect to" in result.err and "rollyard serve" in result.err and result.err.count("\n") == 1


async def test_without_a_token_the_searched_places_are_named(cli: Cli, tmp_path: Path):
    result = await cli("engines", "list")
    assert result.status == 1
    assert "ROLLYARD_TOKEN is not set" in result.err and str(tmp_path / "home") in result.err


def test_a_closed_pipe_is_no_error(tmp_path: Path):
    command = f"{sys.executable} -m rollyard config | head -1"
    completed = subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=30
    )
    assert (completed.returncode, completed.stderr) == (0, "")
