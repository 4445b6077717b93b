"""A harness: an unmodified agent program in the sandbox, which calls its model through the gateway.

The agent writes the program's files, starts it, and waits for the first of: the program ended, the gateway reports
that the rollout cannot continue, the deadline passed, the sandbox ended. The gateway keeps the tokens exact.

How a rollout ends. A limit or an engine failure that the gateway reports: that failure, as in the native loop. The
context was full and the program gave up: ContextLimit, whatever its exit status. An exit status in the preset's
`end.ok`: "stop". Killed for memory: MemoryLimit. Its last reply was cut off and it gave up: TokenLimit, as in the
native loop. Any other status: AgentCrashed, which is not trained on, since it is unknown whether the model or the
program was at fault. A program that never called the model has failed, whatever its status.

Invariants. When `run` ends, for any reason, the program is dead. RUN's clock runs while the program does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rollyard.agents.base import Agent, AgentContext, SandboxNeeds
from rollyard.agents.installation import AgentInstalls
from rollyard.agents.preset import HOME_INSIDE, INSTALL_INSIDE, Preset
from rollyard.agents.program import Program
from rollyard.agents.template import PYTHON, filled_chars, machine_values, render
from rollyard.core import DataField, DeadlineExpired, Json, Message, Task
from rollyard.core.failure import (
    AgentCrashed,
    AgentMissing,
    MemoryLimit,
    RunDeadline,
    SandboxStartFailed,
    TaskInvalid,
    TokenLimit,
)
from rollyard.gateway.options import NAMES, options_of
from rollyard.gateway.session import GatewaySession
from rollyard.sandbox.base import Bind, Sandbox

log = logging.getLogger("rollyard.agents")

MOST_STRING_BYTES = (128 << 10) - 256
"""Linux's limit of one argument or variable, including its name. The limit of all together, including the sandbox's
own, is 2 MB."""
MOST_STRINGS_BYTES = 1 << 20

MOST_FILLED_CHARS = 16 << 20
"""For one template with its values: it may contain a long instruction many times."""

BEATS = 3  # within limits.stall_s

_NOT_THE_PRESETS = frozenset({*NAMES, "mcp"})  # options of the gateway and of the pipeline

OPTIONS = (
    DataField("args", "list of strings", "Appended to the command.", "[]"),
    DataField("env", "object of strings", "Variables, added to the preset's.", "{}"),
    DataField("files", "list of objects", "Files with path, content, mode and raw, added to the preset's.", "[]"),
    DataField("model", "string", "The model name that the program gets.", "the preset's"),
    DataField("reasoning_history", "as_sent or keep", "Whether reasoning that the program removed stays.", '"as_sent"'),
    DataField("strict", "boolean", "Refuses request fields that would be overridden.", "false"),
    DataField(
        "structured_output", "boolean", "Allows JSON output and forced calls, which are not trained on.", "false"
    ),
    DataField("mcp", "object", "The operator's MCP servers for programs inside, each with `inside`: true.", "{}"),
)
COMMAND_OPTIONS = (
    DataField("command", "list of strings", "The program and its arguments."),
    DataField("stdin", "string", "Its standard input.", '""'),
    DataField("workdir", "string", "Its working directory.", "the environment's"),
    DataField("end", "object", "In `ok`, the exit statuses that mean success.", '{"ok": [0]}'),
)
"""Options of a preset without a command: the task gives it."""


class HarnessAgent(Agent):
    """Runs the program of one preset. It holds no state of a rollout."""

    default_tools: ClassVar[tuple[str, ...]] = ()  # the program has its own tools
    needs_gateway: ClassVar[bool] = True

    def __init__(self, preset: Preset, installs: AgentInstalls | None = None) -> None:
        self.name = preset.name  # pyright: ignore[reportAttributeAccessIssue]  # one class, an instance per preset
        self.preset = preset
        self.installs = installs
        fields = OPTIONS if preset.command else (*COMMAND_OPTIONS, *OPTIONS)
        self.option_fields = fields  # pyright: ignore[reportAttributeAccessIssue]

    def check(self, task: Task) -> None:
        """Raises TaskInvalid, or AgentMissing if the operator has to install the program first."""
        self._with_options(task)
        options_of(task)
        _check_mcp(task)
        if self.preset.is_installable and self._installed is None:
            raise AgentMissing(f"the agent {self.name} {self.preset.version} is not installed on this machine")

    def sandbox_needs(self, task: Task) -> SandboxNeeds:
        """Raises SandboxStartFailed if the program was uninstalled after the task was submitted."""
        binds: tuple[Bind, ...] = ()
        if self.preset.is_installable:
            if self._installed is None:
                raise SandboxStartFailed(f"the agent {self.name} was uninstalled after the task was submitted")
            binds = (Bind(self._installed, INSTALL_INSIDE),)
        return SandboxNeeds(needs_doorway=True, needs_python=self._with_options(task).needs_python, binds=binds)

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        sandbox, gateway = context.sandbox, context.gateway
        if sandbox is None or sandbox.doorway is None:
            raise TaskInvalid(f"the agent {self.name} needs a sandbox with a doorway, which this runtime lacks")
        preset = self._with_options(context.task)
        values = _values(preset, messages, sandbox.doorway.url, sandbox.spec.workdir)
        oom_kills = sandbox.oom_kills
        program = Program(sandbox, context.beat)
        try:
            try:
                async with context.clock.counting():
                    await self._start(program, preset, values, context)
                    await _first(program, context)
            finally:
                await program.end()
        except DeadlineExpired as error:
            raise RunDeadline(f"RUN used up its {context.clock.budget_s:g} s") from error
        finally:
            context.info["model_s"] = round(gateway.model_s, 6)
            context.info["harness"] = self._summary(preset, program)
        return _verdict(preset, program, gateway, has_lost_memory=sandbox.oom_kills > oom_kills)

    async def _start(self, program: Program, preset: Preset, values: Mapping[str, str], context: AgentContext) -> None:
        sandbox = context.sandbox
        assert sandbox is not None
        await _write_files(sandbox, preset, values)
        if preset.needs_python and context.python is None:
            raise SandboxStartFailed(f"the agent {self.name} needs Rollyard's portable Python, which is not available")
        python = [*context.python.argv, "-E", "-s"] if context.python is not None else []
        argv: list[str] = []
        for index, item in enumerate(preset.command):
            argv += python if item == PYTHON else [_string(f"command[{index}]", item, values)]
        env = {name: _string(f"env.{name}", value, values) for name, value in preset.env.items()}
        if sum(len(text.encode()) for text in (*argv, *env, *env.values())) > MOST_STRINGS_BYTES:
            raise TaskInvalid("agent: command and env have more than 1 MB together; pass long texts in files")
        stdin = _filled("stdin", preset.stdin, values).encode()
        log.debug("an agent program starts", extra={"rollout": context.rollout_id, "agent": self.name})
        await program.start(argv, cwd=values["workdir"], env={"HOME": HOME_INSIDE, **env}, stdin=stdin)

    def _with_options(self, task: Task) -> Preset:
        options = {name: value for name, value in task.agent.options.items() if name not in _NOT_THE_PRESETS}
        return self.preset.with_options(options)

    @property
    def _installed(self) -> Path | None:
        return None if self.installs is None else self.installs.folder_of(self.preset)

    def _summary(self, preset: Preset, program: Program) -> dict[str, Json]:
        output, dropped_bytes = program.output()
        return {
            "preset": preset.name,
            "version": preset.version,
            "exit_status": program.status,
            "output": output,
            "dropped_bytes": dropped_bytes,
            "duration_s": round(program.duration_s, 6),
        }


async def _first(program: Program, context: AgentContext) -> None:
    """Waits until the program has ended or the rollout cannot continue. A silent program is not a stall: run_s bounds
    it, and model_s each of its model calls. The stall watch is for work that has no other bound."""
    waiting = [asyncio.ensure_future(program.wait()), asyncio.ensure_future(context.gateway.ended())]
    every_s = context.task.limits.stall_s / BEATS
    done: set[asyncio.Future[Any]] = set()
    try:
        while not done:
            done, _ = await asyncio.wait(waiting, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
            context.beat()
        for future in done:
            future.result()
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.wait(waiting)


def _verdict(preset: Preset, program: Program, gateway: GatewaySession, *, has_lost_memory: bool) -> str:
    """Returns why the program ended, or raises the failure that it ended with."""
    limit = gateway.failure or gateway.overflow
    if limit is not None:
        raise limit
    status, is_ok = program.status, program.status in preset.end.ok
    if not is_ok and has_lost_memory:
        raise MemoryLimit(f"{preset.name} was killed at the sandbox's memory limit")
    if is_ok and gateway.turns:
        return "stop"
    if gateway.finish_reason == "length":
        raise TokenLimit(f"a reply was cut off by its token limit, and {preset.name} gave up (status {status})")
    asked = gateway.info().get("requests")
    had = "" if gateway.turns else f", without a reply from the model ({asked} requests reached the gateway)"
    last_lines = program.last_lines() or "(nothing)"
    raise AgentCrashed(
        f"{preset.name} ended with status {status}{had}. Its last lines: {last_lines}", exit_status=status
    )


async def _write_files(sandbox: Sandbox, preset: Preset, values: Mapping[str, str]) -> None:
    for index, file in enumerate(preset.files):
        path = _filled(f"files[{index}].path", file.path, values)
        content = file.content if file.raw else _filled(f"files[{index}].content", file.content, values)
        try:
            await sandbox.write(path, content.encode("utf-8", "replace"), mode=file.mode_bits)
        except (OSError, ValueError) as error:
            raise TaskInvalid(f"agent: files[{index}]: {path} could not be written: {error}") from error


def _filled(where: str, text: str, values: Mapping[str, str]) -> str:
    """Fills a template. Half a surrogate pair, which cannot be encoded, is replaced."""
    if filled_chars(text, values) > MOST_FILLED_CHARS:
        raise TaskInvalid(f"agent: {where}: with its values it has more than {MOST_FILLED_CHARS} characters")
    return render(text, values).encode("utf-8", "replace").decode()


def _string(where: str, text: str, values: Mapping[str, str]) -> str:
    """Fills an argument or a variable. Checked here because, inside the sandbox, a refusal by the kernel would look
    like a lost sandbox."""
    string = _filled(where, text, values)
    if "\0" in string:
        raise TaskInvalid(f"agent: {where}: contains a NUL; pass such text in a file or on stdin")
    if len(string.encode()) > MOST_STRING_BYTES:
        raise TaskInvalid(f"agent: {where}: is longer than the 128 KB that Linux allows; pass it in a file or on stdin")
    return string


def _values(preset: Preset, messages: Sequence[Message], root_url: str, workdir: str) -> dict[str, str]:
    values = {
        **machine_values(),
        "instruction": instruction_of(messages),
        "root_url": root_url,
        "base_url": f"{root_url}/v1",
        "model": preset.model,
        "home": HOME_INSIDE,
        "install": INSTALL_INSIDE,
    }
    values["workdir"] = render(preset.workdir, values) if preset.workdir else workdir
    return values


def instruction_of(messages: Sequence[Message]) -> str:
    """Joins the environment's messages into one text. Raises TaskInvalid for other roles and other content."""
    texts: list[str] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        parts = [content] if isinstance(content, str) else _texts(content)
        if parts is None or message.get("role") not in ("system", "developer", "user"):
            raise TaskInvalid(f"messages[{index}]: an agent program accepts only text in system and user messages")
        texts += parts
    return "\n\n".join(texts)


def _texts(content: Json) -> list[str] | None:
    if not isinstance(content, Sequence):
        return None
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    strings = [text for text in texts if isinstance(text, str)]
    return strings if len(strings) == len(texts) else None


def _check_mcp(task: Task) -> None:
    """Checks MCP servers. A program connects to them itself: at the doorway, or by starting them."""
    servers = task.agent.options.get("mcp")
    for name, entry in servers.items() if isinstance(servers, Mapping) else ():
        if not isinstance(entry, Mapping) or entry.get("inside") is not True:
            raise TaskInvalid(
                f"agent.options.mcp.{name}: an agent program can use only servers of the operator, with `inside`: true"
                f" ({{{{root_url}}}}/mcp/{name}); configure servers that it starts itself in its own configuration"
            )
