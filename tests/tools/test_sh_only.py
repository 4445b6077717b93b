"""The persistent shell in images that have no bash: busybox alone, and dash with a few programs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from rollyard.sandbox import BubblewrapRuntime, Sandbox, SandboxSpec
from rollyard.testing.sandbox_conformance import alive, eventually, marked
from rollyard.tools import ToolContext
from rollyard.tools.shell import SH_SPEC, SHELL, Shell, ShellOutcome
from tests.tools.busybox import busybox_image
from tests.tools.test_shell import check_an_unread_line, image_without_bash, output_of

pytestmark = pytest.mark.slow

PROGRAMS = ("sh", "cat", "sleep", "ls", "stty", "head", "yes", "wc")


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("images")
    return {
        "busybox": busybox_image(folder / "busybox"),
        "dash": image_without_bash(folder / "dash", *PROGRAMS),
    }


@pytest.fixture(params=["busybox", "dash"])
async def sandbox(
    request: pytest.FixtureRequest, images: dict[str, Path], tmp_path: Path
) -> AsyncGenerator[Sandbox, None]:
    async with BubblewrapRuntime(root=tmp_path / "root") as runtime:
        yield await runtime.start(SandboxSpec(image=str(images[request.param])), lease_s=60.0)


@pytest.fixture
async def shell(sandbox: Sandbox) -> AsyncGenerator[Shell, None]:
    shell = await Shell.open(sandbox)
    assert shell.program == "sh"
    yield shell
    await shell.close()


async def test_the_description_mentions_that_there_is_no_bash(sandbox: Sandbox) -> None:
    tool = await SHELL.open(ToolContext(sandbox))
    assert tool.spec is SH_SPEC and "no bash" in tool.spec.description and tool.spec.name == "shell"
    assert (await tool.call({"command": "echo hi"}, timeout_s=20.0)).content == "hi"
    assert (await tool.call({"command": "cd /tmp; false"}, timeout_s=20.0)).content == "[exit 1; cwd /tmp]"
    await tool.close()


async def test_the_first_output_is_only_that_of_the_command(shell: Shell) -> None:
    assert await output_of(shell, "echo first") == "first\n"
    assert (await shell.run("exit", 20.0)).is_restarted
    assert await output_of(shell, "echo first") == "first\n"


async def test_directory_variables_and_functions_persist(shell: Shell) -> None:
    first = await shell.run("cd /tmp; x=5; export y=6; f() { echo f:$1; }", 20.0)
    assert (first.output, first.status, first.cwd) == ("", 0, "/tmp")
    assert await output_of(shell, "echo $x $PWD; f a; sh -c 'echo $y'") == "5 /tmp\nf:a\n6\n"


async def test_the_status_is_that_of_the_command(shell: Shell) -> None:
    for command, status in (("true", 0), ("false", 1), ("(exit 42)", 42), ("nosuchthing", 127), ("if", 2), ("'", 2)):
        result = await shell.run(command, 20.0)
        assert (result.outcome, result.status, result.is_restarted) == (ShellOutcome.COMPLETED, status, False), command
    assert await output_of(shell, "echo lives") == "lives\n"


async def test_long_and_odd_commands_arrive_unchanged(shell: Shell) -> None:
    assert await output_of(shell, "cat <<'E'\n$x `y` \\ 'z'\nE") == "$x `y` \\ 'z'\n"
    assert await output_of(shell, f"v={'x' * 1_000_000}; echo ${{#v}}") == "1000000\n"
    assert await output_of(shell, "echo 'é漢🙂'; printf '\\303\\251\\377\\n'") == "é漢🙂\né\ufffd\n"
    assert await output_of(shell, "printf '\\000\\001a\\n'; head -c 3000 /dev/zero") == "a\n"
    assert await output_of(shell, "") == ""


async def test_a_timeout_interrupts_and_the_shell_survives(shell: Shell) -> None:
    await output_of(shell, "x=kept")
    for command in ("sleep 1000", "while :; do :; done", "stty raw; sleep 1000", "PS1=mine; sleep 1000 | cat"):
        result = await shell.run(command, 0.2)
        assert result.outcome is ShellOutcome.TIMEOUT, command
        if "PS1" not in command:
            assert (result.status, result.is_restarted) == (130, False), command
            assert await output_of(shell, "echo $x") == "kept\n"
    assert await output_of(shell, "echo on") == "on\n"


async def test_a_timeout_before_the_shell_has_read_its_line_interrupts_the_command(shell: Shell) -> None:
    await check_an_unread_line(shell)


async def test_a_shell_that_does_not_return_is_replaced(shell: Shell) -> None:
    result = await shell.run("x=lost; trap '' INT QUIT; while :; do :; done", 1.0)
    assert (result.outcome, result.is_restarted) == (ShellOutcome.TIMEOUT, True)
    assert await output_of(shell, "echo .$x") == ".\n"


@pytest.mark.parametrize("command", ["read x", "cat", "head -1 | cat"])
async def test_waiting_for_input_is_detected(shell: Shell, command: str) -> None:
    result = await shell.run(command, 30.0)
    assert (result.outcome, result.is_restarted) == (ShellOutcome.AWAITING_INPUT, False)
    assert await output_of(shell, "echo on") == "on\n"


@pytest.mark.parametrize("sandbox", ["busybox"], indirect=True)
async def test_an_editor_that_polls_its_terminal_waits_for_input_too(shell: Shell) -> None:
    result = await shell.run("vi x", 30.0)
    assert (result.outcome, result.is_restarted) == (ShellOutcome.AWAITING_INPUT, False)
    assert await output_of(shell, "echo on") == "on\n"


async def test_a_silent_command_is_not_mistaken_for_one_that_waits(shell: Shell) -> None:
    assert await output_of(shell, "sleep 1.2; echo done") == "done\n"


@pytest.mark.parametrize(
    ("command", "status"), [("exit 3", 3), ("set -e; false", 1), ("kill -9 $$", -9), ("exec sleep 1000", None)]
)
async def test_the_end_of_the_shell_is_reported_and_a_new_one_started(
    shell: Shell, command: str, status: int | None
) -> None:
    result = await shell.run(f"echo before; {command}", 20.0)
    assert (result.outcome, result.status, result.is_restarted) == (ShellOutcome.SHELL_DIED, status, True)
    assert result.output.startswith("before\n")
    assert await output_of(shell, "echo on") == "on\n"


@pytest.mark.parametrize(
    "command",
    [
        "unset PS1",
        "PS1='$ '; PS2='> '",
        'OLD=$PS1; PS1="(venv) $PS1"',
        "printf() { :; }; cat() { :; }",
        "PATH=",
        "exec >/dev/null 2>&1",
        "exec 9>&-",
        "stty raw echo -isig",
        "set -u",
        "IFS=0123456789",
    ],
)
async def test_changes_of_a_command_to_the_shell_do_not_break_the_next(shell: Shell, command: str) -> None:
    first = await shell.run(f"{command}; (exit 4)", 20.0)
    assert (first.outcome, first.status, first.output) == (ShellOutcome.COMPLETED, 4, "")
    second = await shell.run("echo on; PS1=$OLD; (exit 5)" if "OLD" in command else "echo on; (exit 5)", 20.0)
    assert (second.outcome, second.status, second.output) == (ShellOutcome.COMPLETED, 5, "on\n")
    assert await output_of(shell, "echo on") == "on\n"


async def test_background_work_continues(shell: Shell) -> None:
    mark = marked()
    await output_of(shell, f"sleep {mark} >/dev/null 2>&1 &")
    await eventually(lambda: bool(alive(mark)), "it runs")
    assert mark in await output_of(shell, "jobs")
    await output_of(shell, "kill %1; wait")
    assert not alive(mark)


async def test_floods_are_cut_in_the_middle_and_counted(sandbox: Sandbox) -> None:
    shell = await Shell.open(sandbox, output_bytes=1000)
    result = await shell.run("echo first; yes | head -c 500000; echo last", 30.0)
    assert result.output.startswith("first\ny\n") and result.output.endswith("y\nlast\n")
    assert result.omitted_bytes > 490_000
    await shell.close()
