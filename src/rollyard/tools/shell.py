"""A shell that lasts for a rollout: directory, variables and functions persist from command to command.

The PTY is on the host. A command is never typed: it is written to a file that is read-only in the sandbox, and one
short line is typed that evaluates it. Its status is returned on a pipe, with a number. So there is no prompt to parse,
no sentinel that could occur by chance, and no polling: an `echo` takes 0.2 ms (measured).

Invariants. The status only informs the model: code in the same shell can forge it. Changes that a command made to the
terminal are undone before the next one. A call ends within its timeout plus the bounds of the escalation (READ_S, INT,
QUIT, KILL, EXIT_S, a new shell: under 10 s). When the shell is lost, the model is informed that its state is lost. Only
the end of the sandbox raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from rollyard.core import Json, new_id
from rollyard.core.failure import SandboxLost
from rollyard.sandbox.base import KILLED, WORKDIR, Sandbox
from rollyard.tools._output import Output
from rollyard.tools._shell_process import BASH, SH, ShellProcess
from rollyard.tools._terminal import COLUMNS, stdin_of
from rollyard.tools.base import ToolContext, ToolResult, ToolSpec

QUIET_S = 0.5
"""Silence before the first check whether a process waits for input; doubled each time."""

UNREAD_S = 8.0
"""Silence after which a shell at its prompt is replaced although it has not reported that it read its line. Only bash
reports that: a POSIX shell that lost the status pipe is always waited for this long."""

LADDER = ((signal.SIGINT, 0.5), (signal.SIGQUIT, 0.5), (signal.SIGKILL, 1.0))
"""The signals to the foreground group, and how long the shell may take to return after each."""

READ_S, READ_POLL_S = 4.0, 0.02
"""How long to wait, before the signals, for a shell that has not read its line yet. An earlier signal is lost: the
shell discards it at its prompt and then runs the command."""

OPEN_S = 30.0
EXIT_S = 2.0
"""How long to wait for the exit status of a shell that has closed its pipes. A busy machine reports it late."""

_ENV = {
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "PS1": "",
    "PS2": "",
    "HISTFILE": "",
    "COLUMNS": str(COLUMNS),
}


class ShellOutcome(StrEnum):
    COMPLETED = "completed"  # it ended by itself, with the status
    TIMEOUT = "timeout"  # it was interrupted at its deadline
    AWAITING_INPUT = "awaiting_input"  # it read the terminal, where there is no input, and was interrupted
    SHELL_DIED = "shell_died"  # the shell itself ended, or no longer responds


@dataclass(frozen=True, slots=True)
class ShellResult:
    outcome: ShellOutcome
    output: str
    status: int | None  # the command's, or the shell's if it died; None if unknown
    cwd: str
    omitted_bytes: int = 0
    is_restarted: bool = False  # a new shell was started; the old one's state is lost


class NoShell(Exception):
    """The sandbox is alive, but no shell starts in it."""


class Shell:
    """A persistent shell: `await Shell.open(sandbox)`, then `run`, one command at a time. Ends with the sandbox, or by
    `close()`."""

    def __init__(self, sandbox: Sandbox, *, output_bytes: int, cwd: str, env: Mapping[str, str]) -> None:
        self._sandbox = sandbox
        self._output = Output(output_bytes)
        self._cwd = cwd
        self._env = {**_ENV, **env}
        self._turn = asyncio.Lock()
        self._dialect = BASH
        name = new_id("shell")
        self._path = f"{sandbox.control_path}/{name}"
        self._file = os.open(sandbox.control_dir / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.fchmod(self._file, 0o644)  # the sandbox may run under another uid; on the host the parent folder is private
        self._live: ShellProcess | None = None
        self.opened_at = ""  # its first working directory, as a path in the sandbox

    @classmethod
    async def open(
        cls,
        sandbox: Sandbox,
        *,
        output_bytes: int = 1 << 20,
        cwd: str = WORKDIR,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """Starts a shell and waits for its first answer: bash, or sh if the image has no bash."""
        shell = cls(sandbox, output_bytes=output_bytes, cwd=cwd, env=env or {})
        try:
            shell.opened_at = await shell._start()
            shell._output.clear()  # a banner, or an error about a missing bash, is not a command's output
        except BaseException:
            await shell.close()
            raise
        return shell

    @property
    def program(self) -> str:
        """`bash`, or `sh` if the image has no bash."""
        return self._dialect.argv[0]

    @property
    def pid(self) -> int:
        """The shell's pid on the host; for /proc only."""
        return self._live.process.pid if self._live and self._live.process else 0

    async def close(self) -> None:
        if self._live is not None:
            self._live.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # --- start ---

    async def _start(self) -> str:
        """Starts a new shell and returns its working directory. Raises NoShell if none starts."""
        preferred = self._dialect
        # The agent may have made its working directory inaccessible; use the root then.
        for dialect, cwd in ((preferred, self._cwd), (SH, self._cwd), (preferred, "/")):
            self._dialect = dialect
            if self._live is not None:
                self._live.close()
            live = self._live = ShellProcess(self._output, dialect)
            process = await self._sandbox.spawn(
                dialect.argv, fds=live.fds, tty=live.terminal.slave, cwd=cwd, env=self._env
            )
            live.started(process)
            try:
                async with asyncio.timeout(OPEN_S):
                    answer = await self._ask("")
            except TimeoutError:
                answer = None
            if answer is not None:
                return answer[1]
            live.close()
        self._dialect = preferred
        output, _ = self._output.text()
        raise NoShell(f"no shell starts in this sandbox: {output.strip()[-500:]}")

    def _ask(self, command: str) -> asyncio.Future[tuple[int, str] | None]:
        assert self._live is not None
        number = secrets.randbits(53)  # a command that could guess it could forge its end
        data = command.encode("utf-8", "replace")  # models sometimes write half a surrogate pair
        if not os.fstat(self._file).st_nlink:  # the shell would read an empty command and report success
            raise SandboxLost("the file that hands commands to the sandbox was deleted")
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))
        return self._live.ask(number, self._dialect.typed(number, self._path))

    # --- commands ---

    async def run(self, command: str, timeout_s: float) -> ShellResult:
        """Runs a command. Raises only if the sandbox has ended (SandboxLost, SandboxEndedByPolicy), or NoShell."""
        if "\0" in command:
            raise ValueError("a command must not contain NUL")
        async with self._turn:
            if self._live is None or self._live.is_dead:
                return await self._lost(ShellOutcome.SHELL_DIED)
            answer = self._ask(command)
            try:
                outcome = await self._watch(answer, timeout_s)
                is_back = answer.done() or (outcome is not ShellOutcome.SHELL_DIED and await self._interrupt(answer))
                if not is_back:
                    return await self._lost(outcome)
                reply = answer.result()
            except asyncio.CancelledError:
                self._live.close()  # its state is unknown; a later call starts a new shell
                raise
            if reply is None:
                return await self._lost(ShellOutcome.SHELL_DIED if outcome is ShellOutcome.COMPLETED else outcome)
            return self._result(outcome, *reply)

    def _result(
        self, outcome: ShellOutcome, status: int | None, cwd: str, *, is_restarted: bool = False
    ) -> ShellResult:
        text, omitted = self._output.text()
        self._output.clear()
        return ShellResult(outcome, text, status, cwd, omitted, is_restarted)

    async def _lost(self, outcome: ShellOutcome) -> ShellResult:
        """Kills the shell and starts another. The output so far is kept."""
        live, status = self._live, None
        if live is not None and live.process is not None:
            if live.is_dead:
                with contextlib.suppress(TimeoutError):  # it may still run without the pipe: `exec something`
                    async with asyncio.timeout(EXIT_S):
                        status = await live.process.wait()
            live.close()
        text, omitted = self._output.text()
        self._output.clear()
        cwd = await self._start()
        self._output.clear()
        return ShellResult(outcome, text, status, cwd, omitted, is_restarted=True)

    async def _watch(self, answer: asyncio.Future[tuple[int, str] | None], timeout_s: float) -> ShellOutcome:
        """Waits until the command ends, the deadline passes, or a process is found to wait for input."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        quiet_s, last_bytes = QUIET_S, self._output.total_bytes
        while True:
            remaining_s = deadline - loop.time()
            done, _ = await asyncio.wait([answer], timeout=max(0.0, min(remaining_s, quiet_s)))
            if done:
                return ShellOutcome.COMPLETED
            if remaining_s <= quiet_s:
                return ShellOutcome.TIMEOUT
            if self._output.total_bytes == last_bytes:
                if (blocked := self._blocked(quiet_s)) is not None:
                    return ShellOutcome.COMPLETED if answer.done() else blocked  # it ended during the check
                quiet_s *= 2
            last_bytes = self._output.total_bytes

    def _blocked(self, quiet_s: float) -> ShellOutcome | None:
        """Checks whether the foreground waits for input. A shell at its own prompt has lost the status pipe, unless the
        machine is so slow that it has not received its line yet."""
        assert self._live is not None and self._live.process is not None
        shell = self._live.process.pid
        reader = self._live.terminal.reader(shell)
        if reader is None:
            return None
        if reader == shell and not self._is_in_command():
            self._live.read_status()
            return ShellOutcome.SHELL_DIED if self._live.has_read_line or quiet_s >= UNREAD_S else None
        return ShellOutcome.AWAITING_INPUT

    def _is_in_command(self) -> bool:
        """During a command the shell's stdin is /dev/tty, which the typed line opens; at its prompt it is the PTY that
        it started with."""
        return stdin_of(self.pid) == "/dev/tty"

    async def _interrupt(self, answer: asyncio.Future[tuple[int, str] | None]) -> bool:
        """Sends the signals of LADDER. Returns True if the shell has answered, or has died, which the answer shows."""
        assert self._live is not None
        for _ in range(int(READ_S / READ_POLL_S)):
            if answer.done() or self._live.has_read_line or self._is_in_command():
                break
            await asyncio.wait([answer], timeout=READ_POLL_S)
        for signum, bound_s in LADDER:
            if answer.done():
                return True
            if signum is signal.SIGKILL:
                self._live.terminal.kill_foreground(spare=self.pid)
            else:
                self._live.terminal.interrupt(signum)
            await asyncio.wait([answer], timeout=bound_s)
        return answer.done()


# --- the tool -----------------------------------------------------------------------------------------

SPEC = ToolSpec(
    name="shell",
    description=(
        "Runs a command in a persistent bash shell and returns its output. The working directory, variables and"
        " functions persist between calls. Nobody can type: give input by a pipe or a file."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "What to run; may have several lines."},
            "timeout_s": {"type": "number", "description": "Interrupt it after that many seconds."},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
)


SH_SPEC = replace(SPEC, description=SPEC.description.replace("bash shell", "POSIX shell (sh; there is no bash here)"))
"""The description for images without bash, in which arrays and [[ ]] would fail."""


class ShellTool:
    """The shell of one rollout."""

    def __init__(self, shell: Shell, sandbox: Sandbox) -> None:
        self._shell = shell
        self._sandbox = sandbox
        self._cwd = shell.opened_at
        self._oom_kills = 0
        self._spec = SPEC if shell.program == "bash" else SH_SPEC

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    async def call(self, arguments: Mapping[str, Json], *, timeout_s: float) -> ToolResult:
        command, requested_s = arguments.get("command"), arguments.get("timeout_s")
        if unknown := arguments.keys() - {"command", "timeout_s"}:
            return ToolResult(f"Unknown argument: {', '.join(sorted(unknown))}.", is_error=True)
        if not isinstance(command, str) or "\0" in command:
            return ToolResult("`command` must be a string without NUL.", is_error=True)
        if requested_s is not None:
            if not isinstance(requested_s, int | float) or isinstance(requested_s, bool) or not requested_s > 0:
                return ToolResult("`timeout_s` must be a positive number.", is_error=True)
            timeout_s = min(timeout_s, requested_s)
        try:
            result = await self._shell.run(command, timeout_s)
        except NoShell as error:  # a command caused it; the next call tries again
            return ToolResult(f"[the shell ended, and {error}]", is_error=True)
        return self._tool_result(result, timeout_s)

    def _tool_result(self, result: ShellResult, timeout_s: float) -> ToolResult:
        notes: list[str] = []
        match result.outcome:
            case ShellOutcome.COMPLETED:
                if result.status:
                    notes.append(f"exit {result.status}")
            case ShellOutcome.TIMEOUT:
                notes.append(f"timed out after {timeout_s:g} s and was interrupted")
            case ShellOutcome.AWAITING_INPUT:
                notes.append("waited for input, which nobody can type, and was interrupted; use a pipe or a file")
            case ShellOutcome.SHELL_DIED:
                how = "stopped answering" if result.status is None else f"ended with status {result.status}"
                notes.append(f"the shell {how}")
        is_out_of_memory = result.status in KILLED and self._sandbox.oom_kills > self._oom_kills
        if is_out_of_memory:
            self._oom_kills = self._sandbox.oom_kills
            notes.append("killed at the sandbox's memory limit")
        if result.is_restarted:
            notes.append("a new shell was started: directory, variables and functions are lost")
        if result.cwd != self._cwd:
            self._cwd = result.cwd
            notes.append(f"cwd {result.cwd}")
        text = result.output.rstrip("\n")
        content = "\n".join(filter(None, [text, f"[{'; '.join(notes)}]" if notes else ""])) or "(no output)"
        info: dict[str, Json] = {
            "outcome": str(result.outcome),
            "status": result.status,
            "omitted_bytes": result.omitted_bytes,
            "is_restarted": result.is_restarted,
        }
        if is_out_of_memory:
            info["limit"] = "memory"
        return ToolResult(content, is_error=result.outcome is not ShellOutcome.COMPLETED, info=info)

    async def close(self) -> None:
        await self._shell.close()


class ShellKind:
    """Opens shells; see `rollyard.tools.base.ToolKind`."""

    @property
    def spec(self) -> ToolSpec:
        return SPEC

    @property
    def needs_sandbox(self) -> bool:
        return True

    @property
    def needs_python(self) -> bool:
        return False

    async def open(self, context: ToolContext) -> ShellTool:
        if context.sandbox is None:
            raise RuntimeError("the shell needs a sandbox")
        sandbox = context.sandbox
        shell = await Shell.open(sandbox, output_bytes=context.output_bytes, cwd=sandbox.spec.workdir)
        return ShellTool(shell, context.sandbox)


SHELL = ShellKind()
