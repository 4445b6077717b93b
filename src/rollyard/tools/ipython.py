"""Python that lasts for a rollout: a process in the sandbox that runs cells; names and imports persist.

It is the image's own `python3`, because the agent needs its packages: with IPython if the image has it, plain
otherwise. If the image has no Python, Rollyard's portable Python is used (`rollyard.sandbox.python`), with IPython. A
cell is passed in a file that is read-only in the sandbox; its output and its end are returned on pipes. There is no
port and no polling.

Invariants. The output only informs the model: code in the same process can forge it. A call ends within its timeout
plus bounded steps: an interrupt, then a new process (`INTERRUPT_S`, `EXIT_S`, `START_S`). When the process is lost, the
model is informed that its state is lost, and its code is not run in the new process. Only the end of the sandbox
raises. Opening does not wait: the process starts while INIT continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from rollyard.core import Json, new_id
from rollyard.sandbox.base import WORKDIR, Sandbox
from rollyard.tools._ipython_process import REPLIES, REQUESTS, PythonProcess
from rollyard.tools._output import Output
from rollyard.tools.base import ToolContext, ToolResult, ToolSpec

INTERRUPTS, INTERRUPT_S = 2, 1.0
"""How often a cell is interrupted, and how long it may take to end each time; then its process is killed. The first
interrupt may arrive before the cell has started."""

START_S = 30.0
"""How long one Python may take to start. IPython needs 0.6 s, more on a busy machine."""

EXIT_S = 2.0
"""How long to wait for the exit status of a process that has closed its pipes. A busy machine reports it late."""

_ENV = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "NO_COLOR": "1", "COLUMNS": "120", "MPLBACKEND": "Agg"}

Command = tuple[Sequence[str], Mapping[str, str]]
"""How a Python is started: its arguments and environment variables."""

IMAGES_OWN: Command = (("python3",), {})


class CellOutcome(StrEnum):
    COMPLETED = "completed"  # it ended by itself; see `is_raised`
    TIMEOUT = "timeout"  # it was interrupted at its deadline
    DIED = "died"  # its process ended, or no longer responds


@dataclass(frozen=True, slots=True)
class CellResult:
    outcome: CellOutcome
    output: str
    is_raised: bool = False  # it ended by an exception, which is in the output
    status: int | None = None  # the exit status of the process, if it ended
    omitted_bytes: int = 0
    is_restarted: bool = False  # a new process was started; the old one's state is lost


class NoPython(Exception):
    """The sandbox is alive, but no Python starts in it."""


class PythonSession:
    """A persistent Python: the constructor starts it in the background; then `run`, one cell at a time; end with
    `close()`."""

    def __init__(self, sandbox: Sandbox, pythons: Sequence[Command], *, output_bytes: int, cwd: str = WORKDIR) -> None:
        self._sandbox, self._pythons, self._cwd = sandbox, pythons, cwd
        self._output = Output(output_bytes)
        self._turn = asyncio.Lock()
        self._numbers = itertools.count(1)
        name = new_id("ipython")
        self._worker, self._path = f"{sandbox.control_path}/{name}.py", f"{sandbox.control_path}/{name}"
        with contextlib.closing(_Shown(sandbox.control_dir / f"{name}.py")) as worker:
            worker.write(Path(__file__).with_name("_ipython_worker.py").read_bytes())
        self._file = _Shown(sandbox.control_dir / name)
        self._live: PythonProcess | None = None
        self.about = ""  # "ipython 9.0.2" or "python 3.12.1", once it runs
        self._starting: asyncio.Task[PythonProcess] | None = asyncio.get_running_loop().create_task(self._start())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
            _forget(self._starting)
        if self._live is not None:
            await self._live.close()
        self._file.close()

    # --- start ---

    async def _start(self) -> PythonProcess:
        """Starts a process and waits for its first reply. Raises NoPython if none starts."""
        # The agent may have made its working directory inaccessible; use the root then.
        for cwd, (argv, env) in itertools.product((self._cwd, "/"), self._pythons):
            live = self._live = PythonProcess(self._output)
            hello = live.expect(0)
            try:
                process = await self._sandbox.spawn(
                    [*argv, self._worker, str(REQUESTS), str(REPLIES), self._path],
                    fds=live.fds,
                    cwd=cwd,
                    env={**_ENV, **env},
                )
                live.started(process)
                await asyncio.wait([hello], timeout=START_S)
            except BaseException:
                await live.close()
                raise
            if hello.done() and (about := hello.result()) is not None:
                self.about = about
                self._output.clear()  # warnings of imports
                return live
            await live.close()
        output, _ = self._output.text()
        self._output.clear()
        raise NoPython(f"no Python starts in this sandbox: {output.strip()[-500:]}")

    async def _ready(self) -> PythonProcess:
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        await asyncio.wait([self._starting])  # not cancelled with this call: the next call uses it
        if self._starting.cancelled() or self._starting.exception() is not None:
            failed, self._starting = self._starting, None  # the next call tries again
            return failed.result()
        return self._starting.result()

    async def _renew(self) -> None:
        if self._live is not None:
            await self._live.close()
        if self._starting is not None:
            _forget(self._starting)
        self._starting = None
        await self._ready()

    # --- cells ---

    async def run(self, code: str, timeout_s: float, *, restart: bool = False) -> CellResult:
        """Runs a cell, in a new process if `restart`. Raises NoPython, or SandboxLost etc. if the sandbox has ended."""
        async with self._turn:
            if restart and self._starting is not None and self._starting.done():
                self._output.clear()
                await self._renew()
            live = await self._ready()
            if live.is_lost:
                return await self._lost(live, CellOutcome.DIED)
            data = code.encode("utf-8", "replace")  # models sometimes write half a surrogate pair
            self._file.write(data)
            answer = live.ask(next(self._numbers), len(data))
            outcome = CellOutcome.COMPLETED
            try:
                done, _ = await asyncio.wait([answer], timeout=max(timeout_s, 0.0))
                if not done:
                    outcome = CellOutcome.TIMEOUT
                    for _ in range(INTERRUPTS):
                        live.interrupt()
                        done, _ = await asyncio.wait([answer], timeout=INTERRUPT_S)
                        if done:
                            break
            except asyncio.CancelledError:
                await live.close()  # its state is unknown; a later call reports the loss
                raise
            word = answer.result() if done else None
            if word is None:
                return await self._lost(live, outcome if outcome is CellOutcome.TIMEOUT else CellOutcome.DIED)
            text, omitted = self._output.text()
            self._output.clear()
            return CellResult(outcome, text, word != "ok", None, omitted)

    async def _lost(self, live: PythonProcess, outcome: CellOutcome) -> CellResult:
        """Kills the process and starts another. The output so far is kept."""
        status = await live.ended(EXIT_S) if live.is_lost else None
        text, omitted = self._output.text()
        self._output.clear()
        await self._renew()
        return CellResult(outcome, text, True, status, omitted, is_restarted=True)


def _forget(task: asyncio.Task[PythonProcess]) -> None:
    """Marks a task's exception as retrieved, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


class _Shown:
    """A file in the control folder that any user of the sandbox can read; rewritten in place."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        os.fchmod(self._fd, 0o644)

    def write(self, data: bytes) -> None:
        os.ftruncate(self._fd, 0)
        view, at = memoryview(data), 0
        while at < len(data):
            at += os.pwrite(self._fd, view[at:], at)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# --- the tool -----------------------------------------------------------------------------------------

SPEC = ToolSpec(
    name="ipython",
    description=(
        "Runs Python code in a persistent interpreter and returns what it prints and the value of its last expression."
        " Variables, functions and imports persist between calls. Nobody can type: input() fails."
    ),
    parameters={
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "The Python code to run; may have several lines."},
            "restart": {"type": "boolean", "description": "First start a new interpreter; all state is lost."},
        },
        "required": ["code"],
        "additionalProperties": False,
    },
)


class IPythonTool:
    """The Python of one rollout."""

    def __init__(self, session: PythonSession) -> None:
        self._session = session

    @property
    def spec(self) -> ToolSpec:
        return SPEC

    async def call(self, arguments: Mapping[str, Json], *, timeout_s: float) -> ToolResult:
        code, restart = arguments.get("code", ""), arguments.get("restart", False)
        if unknown := arguments.keys() - {"code", "restart"}:
            return ToolResult(f"Unknown argument: {', '.join(sorted(unknown))}.", is_error=True)
        if not isinstance(restart, bool):
            return ToolResult("`restart` must be true or false.", is_error=True)
        if not isinstance(code, str) or ("code" not in arguments and not restart):
            return ToolResult("`code` must be a string.", is_error=True)
        try:
            result = await self._session.run(code, timeout_s, restart=restart)
        except NoPython as error:  # the next call tries again
            return ToolResult(f"[{error}]", is_error=True)
        notes: list[str] = []
        if restart:
            notes.append("Python was started anew, as asked")
        if result.outcome is CellOutcome.TIMEOUT:
            notes.append(f"timed out after {timeout_s:g} s and was interrupted")
        elif result.outcome is CellOutcome.DIED:
            notes.append(f"the Python process {_describe_exit(result.status)}")
        if result.is_restarted:
            notes.append("Python was started anew: variables, functions and imports are lost")
        text = result.output.rstrip("\n")
        content = "\n".join(filter(None, [text, f"[{'; '.join(notes)}]" if notes else ""])) or "(no output)"
        info: dict[str, Json] = {
            "outcome": str(result.outcome),
            "is_raised": result.is_raised,
            "status": result.status,
            "omitted_bytes": result.omitted_bytes,
            "is_restarted": result.is_restarted,
            "python": self._session.about,
        }
        return ToolResult(content, is_error=result.outcome is not CellOutcome.COMPLETED, info=info)

    async def close(self) -> None:
        await self._session.close()


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "stopped answering"
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}" + (", perhaps for want of memory" if -status == signal.SIGKILL else "")


@dataclass(frozen=True, slots=True)
class IPythonKind:
    """Opens Python sessions; see `rollyard.tools.base.ToolKind`."""

    spec: ToolSpec = SPEC
    needs_sandbox: bool = True
    needs_python: bool = True

    async def open(self, context: ToolContext) -> IPythonTool:
        if context.sandbox is None:
            raise RuntimeError("ipython needs a sandbox")
        pythons = [IMAGES_OWN]
        if context.python is not None:
            pythons.append((context.python.argv, context.python.env))
        cwd = context.sandbox.spec.workdir
        return IPythonTool(PythonSession(context.sandbox, pythons, output_bytes=context.output_bytes, cwd=cwd))


IPYTHON = IPythonKind()
