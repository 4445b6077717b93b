"""The persistent shell, in real sandboxes: its state, its output and its failures."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path

import pytest
import uvloop

from rollyard.core.failure import SandboxEndedByPolicy, SandboxLost
from rollyard.sandbox import BubblewrapRuntime, LocalRuntime, Sandbox, SandboxLimits, SandboxSpec
from rollyard.testing.sandbox_conformance import alive, eventually, marked
from rollyard.tools import _shell_process
from rollyard.tools._output import Output, plain
from rollyard.tools._shell_process import DRAIN_BYTES, ShellProcess
from rollyard.tools.base import ToolContext
from rollyard.tools.registry import tool_kind
from rollyard.tools.shell import QUIET_S, SHELL, Shell, ShellOutcome

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("sandbox", [BubblewrapRuntime, LocalRuntime], indirect=True)
"""For tests that depend on the runtime; all others run in bubblewrap."""


@pytest.fixture
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Sandbox, None]:
    kind = getattr(request, "param", BubblewrapRuntime)
    async with kind(root=tmp_path / "root") as runtime:
        yield await runtime.start(SandboxSpec(), lease_s=60.0)


@pytest.fixture
async def shell(sandbox: Sandbox) -> AsyncGenerator[Shell, None]:
    shell = await Shell.open(sandbox)
    yield shell
    await shell.close()


async def output_of(shell: Shell, command: str) -> str:
    result = await shell.run(command, 20.0)
    assert result.outcome is ShellOutcome.COMPLETED, result
    return result.output


# --- state --------------------------------------------------------------------------------------------


@BOTH
async def test_directory_variables_and_functions_persist(shell: Shell) -> None:
    first = await shell.run("cd /tmp; x=5; export y=6; f() { echo f:$1; }", 20.0)
    assert (first.output, first.status, first.cwd) == ("", 0, "/tmp")
    assert await output_of(shell, "echo $x $PWD; f a; sh -c 'echo $y'") == "5 /tmp\nf:a\n6\n"


@BOTH
async def test_the_status_is_that_of_the_command(shell: Shell) -> None:
    for command, status in (("true", 0), ("false", 1), ("(exit 42)", 42), ("nosuchthing", 127), ("if", 2)):
        result = await shell.run(command, 20.0)
        assert (result.outcome, result.status) == (ShellOutcome.COMPLETED, status), command
    assert await output_of(shell, "echo lives") == "lives\n"


async def test_long_and_odd_commands_arrive_unchanged(shell: Shell) -> None:
    assert await output_of(shell, "cat <<'E'\n$x `y` \\ 'z'\nE") == "$x `y` \\ 'z'\n"
    long = "x" * 100_000
    assert await output_of(shell, f"v={long}; echo ${{#v}}") == "100000\n"
    assert await output_of(shell, "echo 'é漢🙂'; printf '\\xc3'; sleep 0.01; printf '\\xa9\\n'") == "é漢🙂\né\n"
    assert await output_of(shell, "printf '\\xff\\n'") == "\ufffd\n"
    assert await output_of(shell, "echo '\ud83d'") == "?\n"
    assert await output_of(shell, "") == ""


async def test_a_command_that_reads_stdin_gets_the_terminal_not_the_typed_lines(shell: Shell) -> None:
    assert await output_of(shell, "head -1 < /dev/null; echo after") == "after\n"
    assert await output_of(shell, "echo one | cat\necho two") == "one\ntwo\n"


@BOTH
async def test_background_work_continues(shell: Shell, tmp_path: Path) -> None:
    mark = marked()
    await output_of(shell, f"sleep {mark} >/dev/null 2>&1 &")
    await eventually(lambda: bool(alive(mark)), "it runs")  # forked before the status, but perhaps not yet `sleep`
    assert mark in await output_of(shell, "jobs")
    await output_of(shell, "kill %1; wait")
    assert not alive(mark)


# --- output -------------------------------------------------------------------------------------------


async def test_floods_are_cut_in_the_middle_and_counted(sandbox: Sandbox) -> None:
    shell = await Shell.open(sandbox, output_bytes=1000)
    result = await shell.run("echo first; yes | head -c 5000000; echo last", 30.0)
    assert result.output.startswith("first\ny\n") and result.output.endswith("y\nlast\n")
    assert len(result.output) < 1100 and result.omitted_bytes == 5_000_011 - 1000
    assert f"{result.omitted_bytes} bytes left out" in result.output
    assert await output_of(shell, "echo calm") == "calm\n"
    await shell.close()


async def test_an_endless_flood_ends_at_its_timeout(shell: Shell) -> None:
    result = await shell.run("yes", 3.0)  # time to write more than is kept
    assert result.outcome is ShellOutcome.TIMEOUT and result.omitted_bytes > 0
    assert await output_of(shell, "echo calm") == "calm\n"


def test_colours_and_progress_bars_are_removed() -> None:
    assert plain(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07\x1b(B.") == "red ."
    assert plain(b"10%\r50%\r100%\r\ndone\r\n") == "100%\ndone\n"
    assert plain(b"a\x08\x00b\tc") == "ab\tc"


@pytest.mark.parametrize("limit", range(2, 24))
def test_a_cut_never_splits_a_character(limit: int) -> None:
    output = Output(limit)
    data = "aé漢🙂".encode() * 5
    for start in range(0, len(data), 3):
        output.feed(data[start : start + 3])
    text, omitted = output.text()
    assert "\ufffd" not in text
    visible = re.sub(r"\n\[… \d+ bytes left out …\]\n", "", text)
    assert len(visible.encode()) + omitted == len(data)


# --- failures -----------------------------------------------------------------------------------------


@BOTH
async def test_a_timeout_interrupts_and_the_shell_lives(shell: Shell) -> None:
    await output_of(shell, "x=kept")
    for command in ("sleep 1000", "while :; do :; done", "stty raw; sleep 1000"):
        result = await shell.run(command, 0.2)
        assert (result.outcome, result.is_restarted) == (ShellOutcome.TIMEOUT, False), command
    assert await output_of(shell, "echo $x") == "kept\n"


async def check_an_unread_line(shell: Shell) -> None:
    """Stops the shell until after the deadline, as on a starved machine."""
    await output_of(shell, "x=kept")
    os.kill(shell.pid, signal.SIGSTOP)
    asyncio.get_running_loop().call_later(1.5, os.kill, shell.pid, signal.SIGCONT)
    result = await shell.run("while :; do :; done", 0.1)
    assert (result.outcome, result.status, result.is_restarted) == (ShellOutcome.TIMEOUT, 130, False)
    assert await output_of(shell, "echo $x") == "kept\n"


async def test_a_timeout_before_the_shell_has_read_its_line_interrupts_the_command(shell: Shell) -> None:
    await check_an_unread_line(shell)


async def test_a_command_that_ignores_sigint_gets_sigquit_then_sigkill(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def until_ready(*_: object) -> ShellOutcome:
        await eventually(lambda: bool(shell._output.total_bytes), "it ignores the signal")
        return ShellOutcome.TIMEOUT

    await output_of(shell, "x=kept")
    monkeypatch.setattr(shell, "_watch", until_ready)
    quit_it = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
    result = await shell.run(f"python3 -c '{quit_it}'", 60.0)
    assert (result.outcome, result.status) == (ShellOutcome.TIMEOUT, 128 + signal.SIGQUIT)
    kill_it = quit_it.replace("; print", "; signal.signal(signal.SIGQUIT, signal.SIG_IGN); print", 1)
    result = await shell.run(f"python3 -c '{kill_it}'", 60.0)
    assert (result.outcome, result.status) == (ShellOutcome.TIMEOUT, 128 + signal.SIGKILL)
    monkeypatch.undo()
    assert await output_of(shell, "echo $x") == "kept\n"


async def test_a_shell_that_does_not_return_is_replaced(shell: Shell) -> None:
    await output_of(shell, "x=lost")
    result = await shell.run("trap '' INT QUIT; while :; do :; done", 1.0)
    assert (result.outcome, result.is_restarted) == (ShellOutcome.TIMEOUT, True)
    assert await output_of(shell, "echo .$x") == ".\n"


@pytest.mark.parametrize("command", ["read x", "cat", "python3 -c 'input()'", "python3"])
async def test_waiting_for_input_is_detected(shell: Shell, command: str) -> None:
    result = await shell.run(command, 30.0)
    assert (result.outcome, result.is_restarted) == (ShellOutcome.AWAITING_INPUT, False)
    assert await output_of(shell, "echo on") == "on\n"


async def test_a_command_that_ends_during_the_check_for_input_is_completed(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = shell._blocked

    def late(quiet_s: float) -> ShellOutcome | None:
        time.sleep(1.0)  # the command ends, and the event loop cannot see its status
        return blocked(quiet_s)

    monkeypatch.setattr(shell, "_blocked", late)
    result = await shell.run("sleep 0.7; (exit 3)", 20.0)
    assert (result.outcome, result.status, result.is_restarted) == (ShellOutcome.COMPLETED, 3, False)


async def test_a_silent_command_is_not_mistaken_for_one_that_waits(shell: Shell) -> None:
    assert await output_of(shell, "sleep 1.2; echo done") == "done\n"
    assert await output_of(shell, "(sleep 0.8; echo piped) | cat") == "piped\n"


@BOTH
@pytest.mark.parametrize(
    ("command", "status"),
    [("exit 3", 3), ("set -e; false", 1), ("kill -9 $$", -9), ("exec sleep 1000", None), ("exec true", 0)],
)
async def test_the_end_of_the_shell_is_reported_and_a_new_one_started(
    shell: Shell, command: str, status: int | None
) -> None:
    result = await shell.run(f"echo before; {command}", 20.0)
    assert (result.outcome, result.status, result.is_restarted) == (ShellOutcome.SHELL_DIED, status, True)
    assert result.output.startswith("before\n")
    assert await output_of(shell, "echo on") == "on\n"


@pytest.mark.parametrize(
    "command", ["unset PROMPT_COMMAND", "builtin() { :; }", "readonly PROMPT_COMMAND", "exec 60>&-; exec 10>&-"]
)
async def test_a_shell_that_no_longer_reports_is_replaced_or_recovers(
    shell: Shell, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard.tools.shell.UNREAD_S", 1.0)
    first = await shell.run(command, 20.0)
    second = await shell.run("echo on", 20.0)
    assert second.output == "on\n" or first.is_restarted or second.is_restarted
    assert await output_of(shell, "echo on") == "on\n"


@pytest.mark.parametrize(
    "command", ["exec >/dev/null 2>&1", "stty raw echo -isig", "PATH=", "PS1='$ '; PS2='> '", "set -x; set +x"]
)
async def test_changes_of_a_command_to_the_shell_do_not_break_the_next(shell: Shell, command: str) -> None:
    assert (await shell.run(command, 20.0)).outcome is ShellOutcome.COMPLETED
    assert await output_of(shell, "echo on") == "on\n"


async def test_a_forged_status_is_ignored(shell: Shell) -> None:
    forge = "for fd in /proc/$$/fd/*; do printf '9999 0 /forged\\0' >&${fd##*/}; done 2>/dev/null; (exit 7)"
    result = await shell.run(forge, 20.0)
    assert (result.status, result.cwd == "/forged") == (7, False)
    assert (await shell.run("(exit 8)", 20.0)).status == 8


async def test_one_command_at_a_time(shell: Shell) -> None:
    results = await asyncio.gather(*[shell.run(f"echo {n}", 20.0) for n in range(20)])
    assert [result.output for result in results] == [f"{n}\n" for n in range(20)]


@BOTH
async def test_a_cancelled_command_is_killed_and_the_next_one_runs(shell: Shell) -> None:
    mark = marked()
    task = asyncio.ensure_future(shell.run(f"sleep {mark}", 60.0))
    await eventually(lambda: bool(alive(mark)), "it runs")
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await eventually(lambda: not alive(mark), "it is gone")
    assert (await shell.run("echo on", 20.0)).is_restarted
    assert await output_of(shell, "echo on") == "on\n"


async def test_two_shells_of_one_sandbox_are_separate(sandbox: Sandbox) -> None:
    one, two = await Shell.open(sandbox), await Shell.open(sandbox)
    await one.run("x=1; cd /", 20.0)
    assert await output_of(two, "echo .$x") == ".\n"
    await one.close()
    await two.close()


# --- hostile commands ---------------------------------------------------------------------------------


async def test_a_background_flood_does_not_block_the_event_loop() -> None:
    """The status has arrived, but the terminal is never empty: a writer as fast as the reader would block it."""
    output = Output(1000)
    live = ShellProcess(output)
    floods = [subprocess.Popen(["cat", "/dev/zero"], stdout=live.terminal.slave) for _ in range(2)]
    try:
        for number in range(200):
            answer = live.ask(number, b"")
            before = output.total_bytes
            os.write(live.status_writer, b"%d 0 /\0" % number)
            live.read_status()  # drains the terminal before it returns
            assert answer.result() == (0, "/")
            assert output.total_bytes - before < DRAIN_BYTES + 65536
    finally:
        for flood in floods:
            flood.kill()
            flood.wait()
        live.close()


@pytest.mark.parametrize("what", ["/dev/zero", "/dev/urandom"])
async def test_a_flooded_status_pipe_ends_only_the_shell(shell: Shell, what: str) -> None:
    find_pipe = "for fd in /proc/$$/fd/*; do case $(readlink $fd) in pipe:*) pipe=$fd; break;; esac; done"
    result = await shell.run(f"{find_pipe}; cat {what} >&${{pipe##*/}}", 20.0)
    assert (result.outcome, result.is_restarted) == (ShellOutcome.SHELL_DIED, True)
    result = await shell.run(f"{find_pipe}; cat {what} >&${{pipe##*/}} & sleep 0.5", 20.0)
    assert (result.outcome, result.is_restarted) == (ShellOutcome.SHELL_DIED, True)
    assert await output_of(shell, "echo on") == "on\n"


async def test_an_invalid_status_is_ignored(shell: Shell) -> None:
    await output_of(shell, "n=1")  # 1 was the opening, this is 2, the next is 3
    digits = "9" * 5000
    forge = f"for fd in /proc/$$/fd/*; do printf '3 {digits} /forged\\0' >&${{fd##*/}}; done 2>/dev/null; (exit 7)"
    assert (await shell.run(forge, 20.0)).status == 7


async def test_an_inaccessible_workspace_does_not_break_the_shell(sandbox: Sandbox) -> None:
    tool = await SHELL.open(ToolContext(sandbox))
    result = await tool.call({"command": "chmod 0 /workspace; exit"}, timeout_s=20.0)
    assert "a new shell was started" in result.content and "cwd /" in result.content
    assert (await tool.call({"command": "chmod 700 /workspace; echo on"}, timeout_s=20.0)).content == "on"
    await tool.close()


async def test_removing_all_shells_is_reported(tmp_path: Path) -> None:
    image = image_without_bash(tmp_path / "image", "sh", "cat", "rm")
    async with BubblewrapRuntime(root=tmp_path / "root") as runtime:
        sandbox = await runtime.start(SandboxSpec(image=str(image)), lease_s=60.0)
        tool = await SHELL.open(ToolContext(sandbox))
        for command in ("rm -f /usr/bin/sh /bin/sh; exit", "echo on"):
            result = await tool.call({"command": command}, timeout_s=20.0)
            assert result.is_error and "no shell starts" in result.content
        await tool.close()


# --- the sandbox's end --------------------------------------------------------------------------------


async def test_the_end_of_the_sandbox_is_an_error_with_its_blame(tmp_path: Path) -> None:
    async with BubblewrapRuntime(root=tmp_path) as runtime:
        mine = await runtime.start(SandboxSpec(), lease_s=60.0)
        shell = await Shell.open(mine)
        with pytest.raises(SandboxEndedByPolicy):
            await shell.run("kill -9 -1; kill -9 $$", 20.0)
        await shell.close()
        other = await runtime.start(SandboxSpec(), lease_s=60.0)
        shell = await Shell.open(other)
        await other.kill()
        with pytest.raises(SandboxLost):
            await shell.run("true", 20.0)
        await shell.close()


async def test_descriptors_are_closed(sandbox: Sandbox) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    for _ in range(3):
        shell = await Shell.open(sandbox)
        await shell.run("exit", 20.0)
        await shell.close()
    assert count() == before


def image_without_bash(image: Path, *programs: str) -> Path:
    for name in programs:
        program = shutil.which(name)
        assert program is not None
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in [program, *re.findall(r"(/\S+) \(0x", listed)]:
            (image / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, image / path.lstrip("/"))
    for name in ("bin", "lib", "lib64"):
        if Path("/", name).is_symlink() and not (image / name).exists():
            (image / name).symlink_to(f"usr/{name}")
    return image


async def test_an_image_without_bash_gets_sh(tmp_path: Path) -> None:
    image = image_without_bash(tmp_path / "image", "sh", "cat", "sleep", "ls")
    async with BubblewrapRuntime(root=tmp_path / "root") as runtime:
        sandbox = await runtime.start(SandboxSpec(image=str(image)), lease_s=60.0)
        shell = await Shell.open(sandbox)
        first = await shell.run("cd /tmp; x=5; (exit 4)", 20.0)
        assert (first.outcome, first.status, first.cwd) == (ShellOutcome.COMPLETED, 4, "/tmp")
        assert await output_of(shell, "echo $x; pwd") == "5\n/tmp\n"
        assert (await shell.run("sleep 1000", 0.2)).outcome is ShellOutcome.TIMEOUT
        assert (await shell.run("if", 20.0)).status == 2
        died = await shell.run("exit 3", 20.0)
        assert (died.outcome, died.status) == (ShellOutcome.SHELL_DIED, 3)
        assert await output_of(shell, "echo .$x") == ".\n"
        await shell.close()


def test_it_works_on_uvloop_too(tmp_path: Path) -> None:
    checks: list[Callable[[Shell], Coroutine[None, None, None]]] = [
        test_directory_variables_and_functions_persist,
        test_a_timeout_interrupts_and_the_shell_lives,
        test_an_endless_flood_ends_at_its_timeout,
        test_one_command_at_a_time,
    ]

    async def main() -> None:
        async with BubblewrapRuntime(root=tmp_path) as runtime:
            for check in checks:
                sandbox = await runtime.start(SandboxSpec(), lease_s=60.0)
                shell = await Shell.open(sandbox)
                await check(shell)
                await shell.close()
                await sandbox.kill()

    uvloop.run(main())


# --- the tool -----------------------------------------------------------------------------------------


@BOTH
async def test_the_tools_output_contains_what_the_model_needs(sandbox: Sandbox) -> None:
    assert tool_kind("shell") is SHELL and SHELL.needs_sandbox
    tool = await SHELL.open(ToolContext(sandbox, output_bytes=2000))

    async def run_tool(command: object, **more: object) -> str:
        result = await tool.call({"command": command, **more}, timeout_s=20.0)  # type: ignore[dict-item]
        return result.content

    assert await run_tool("echo hi") == "hi"
    assert await run_tool("true") == "(no output)"
    assert await run_tool("echo oops; exit_with() { return 3; }; exit_with") == "oops\n[exit 3]"
    assert await run_tool("cd /tmp") == "[cwd /tmp]"
    assert "timed out after 0.2 s" in await run_tool("sleep 100", timeout_s=0.2)
    assert "waited for input" in await run_tool("cat")
    assert "status 5" in (lost := await run_tool("exit 5")) and "are lost" in lost
    assert len(await run_tool("seq 100000")) < 2200
    for bad in ({}, {"command": 3}, {"command": "a\0b"}, {"command": "x", "timeout_s": -1}, {"command": "x", "y": 1}):
        result = await tool.call(bad, timeout_s=20.0)
        assert result.is_error
    await tool.close()
    assert SHELL.spec.schema()["type"] == "function"


async def test_a_kill_at_the_memory_limit_is_reported(tmp_path: Path) -> None:
    hog = "python3 -c 'x = bytearray(1 << 30); x[::4096] = b\"x\" * len(x[::4096])'"
    async with BubblewrapRuntime(root=tmp_path) as runtime:
        limits = SandboxLimits(memory_bytes=128 << 20)
        sandbox = await runtime.start(SandboxSpec(limits=limits), lease_s=60.0)
        if sandbox.limits_in_force["memory"] == "watchdog":
            pytest.skip("there is no memory cgroup here: the watchdog would end the sandbox")
        result = await sandbox.exec(hog, timeout_s=20.0)
        assert result.is_out_of_memory and result.status in (-9, 137)
        assert not (await sandbox.exec("kill -9 $$", timeout_s=5.0)).is_out_of_memory
        tool = await SHELL.open(ToolContext(sandbox))
        tool_result = await tool.call({"command": hog}, timeout_s=20.0)
        assert "memory limit" in tool_result.content and tool_result.info["limit"] == "memory"
        tool_result = await tool.call({"command": "sh -c 'kill -9 $$'"}, timeout_s=20.0)
        assert "memory" not in tool_result.content and "limit" not in tool_result.info
        await tool.close()
        await sandbox.kill()


# --- a starved machine --------------------------------------------------------------------------------


class SlowTerminal:
    """`os` of a machine whose kernel delivers typed lines late."""

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def write(self, fd: int, data: bytes) -> int:
        asyncio.get_running_loop().call_later(QUIET_S * 3.5, os.write, fd, data)
        return len(data)


async def test_a_slow_shell_is_not_mistaken_for_one_that_lost_its_line(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a starved machine a typed line may reach the shell late: the command must not be lost."""
    await output_of(shell, "true")
    await eventually(lambda: Path(f"/proc/{shell.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S", "waits")
    monkeypatch.setattr(_shell_process, "os", SlowTerminal())
    result = await shell.run("echo here", 60.0)
    assert (result.outcome, result.output, result.is_restarted) == (ShellOutcome.COMPLETED, "here\n", False)


async def test_a_command_that_cannot_be_passed_is_not_reported_as_done(sandbox: Sandbox, shell: Shell) -> None:
    assert await output_of(shell, "echo one") == "one\n"
    for file in sandbox.control_dir.iterdir():
        file.unlink()
    with pytest.raises(SandboxLost, match="was deleted"):
        await shell.run("echo two", 20.0)
