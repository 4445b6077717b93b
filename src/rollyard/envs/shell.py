"""The `shell` environment: set-up commands and files, an instruction, and check commands that score what was left.

    {"instruction": "Write 42 into answer.txt",
     "files": {"notes.txt": "…"},
     "setup": ["mkdir -p out"],
     "checks": ["grep -qx 42 answer.txt", {"command": "test ! -e junk", "weight": 0.5, "name": "tidy"}],
     "solution": ["echo 42 > answer.txt"]}

The reward is the weighted share of checks that exit with 0. They run in a fresh sandbox that contains only the files of
the workspace: no process, no PATH and no other file of RUN reaches them. If the workspace could not be saved (it is
too large, for example), no check passes: in an empty workspace, checks that a file is absent would pass.

With `"eval": "same"` the checks run in the whole file system as RUN left it, for tasks that change files outside the
workspace; but programs, libraries and start-up files are the image's (`envs.protected`), and no process is left.
Such a rollout cannot be scored again later.

`solution` contains the commands that the oracle runs; they pass every check. No agent sees it.

The agent can change everything *in* the workspace, including the given `files`. A check that runs code from there (a
test file, Python's imports, git's hooks) trusts that code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from posixpath import isabs, join, normpath
from typing import ClassVar

from rollyard.core import DataField, Message, Score, Task
from rollyard.core.failure import EvalDeadline, SetupDeadline, SetupFailed, TaskInvalid
from rollyard.envs.base import ArtifactRule, EnvContext, Environment, Evidence, Plan, Solution, Start
from rollyard.envs.fields import Fields
from rollyard.sandbox.base import WORKDIR
from rollyard.tools.base import Tool

TAIL_BYTES = 2000
"""How much of a failed set-up command's errors is reported: enough for the end of a traceback."""

WORKSPACE = "workspace"
"""The name of the only artifact."""

CHECK_GRACE_S = 60.0
"""Added to the EVAL deadline for a check's own timeout, so that the deadline ends a check that hangs."""


FIELDS = (
    DataField("instruction", "string", "What the agent is asked to do: the user's message."),
    DataField("system_prompt", "string or null", "The system message.", "null"),
    DataField(
        "files", "object of strings", "Files by path, absolute or below /workspace, written before `setup`.", "{}"
    ),
    DataField(
        "setup", "list of strings", "Commands that prepare the workspace; one that fails ends the rollout.", "[]"
    ),
    DataField("checks", "list, at least 1", "Commands that score: strings, or objects as below."),
    DataField("checks[].command", "string", "Passes if it exits with 0."),
    DataField("checks[].name", "string", "Its name among the score's components; each once.", '"check_N"'),
    DataField("checks[].weight", "number above 0", "Its share of the reward.", "1"),
    DataField(
        "eval", "fresh or same", "Where checks run: with the workspace's files only, or with all of RUN's.", '"fresh"'
    ),
    DataField("solution", "list of strings", "Commands that solve the task, for the oracle; no agent sees them.", "[]"),
)


@dataclass(frozen=True, slots=True)
class ShellCheck:
    command: str
    name: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ShellData:
    """A task's data, parsed."""

    instruction: str
    setup: tuple[str, ...]
    files: Mapping[str, str]
    checks: tuple[ShellCheck, ...]
    system_prompt: str | None
    is_same: bool = False
    solution: tuple[str, ...] = ()

    @classmethod
    def read(cls, task: Task) -> ShellData:
        """Parses the data. Raises TaskInvalid with the field that is wrong."""
        fields = Fields(task)
        data = cls(
            instruction=fields.text("instruction"),
            setup=fields.texts("setup"),
            files=_files(fields),
            checks=_checks(task, fields),
            system_prompt=fields.optional_text("system_prompt"),
            is_same=_is_same(fields),
            solution=fields.texts("solution"),
        )
        fields.done()
        return data


class ShellEnvironment(Environment):
    """Runs set-up commands, passes on the task's instruction, and scores with check commands."""

    name: ClassVar[str] = "shell"
    tools: ClassVar[tuple[str, ...]] = ("shell", "finish")
    data_fields: ClassVar[tuple[DataField, ...]] = FIELDS

    def check(self, task: Task) -> None:
        ShellData.read(task)

    def plan(self, task: Task) -> Plan:
        if ShellData.read(task).is_same:
            return Plan(eval_mode="same")
        return Plan(artifacts=(ArtifactRule(WORKSPACE, WORKDIR),))

    def layer_key(self, task: Task) -> str | None:
        """Tasks that differ only in instruction or checks share a set-up. None if there is no set-up."""
        data = ShellData.read(task)
        if not data.setup and not data.files:
            return None
        return self.key_of(data.setup, dict(data.files))

    async def prepare(self, context: EnvContext) -> None:
        data = ShellData.read(context.task)
        for path, text in data.files.items():
            await context.box.write(path, text.encode("utf-8", "surrogateescape"))
        timeout_s = context.task.limits.init_s
        for command in data.setup:
            result = await context.run(command, timeout_s=timeout_s)
            if result.is_timed_out:
                raise SetupDeadline(f"set-up command {command!r} did not end within {timeout_s:g} s")
            if result.status != 0:
                tail = (result.stderr or result.stdout)[-TAIL_BYTES:].decode("utf-8", "replace").strip()
                raise SetupFailed(
                    f"set-up command {command!r} ended with status {result.status}: {tail}",
                    command=command,
                    status=result.status,
                    stderr=tail,
                )

    async def init(self, context: EnvContext) -> Start:
        data = ShellData.read(context.task)
        messages: list[Message] = []
        if data.system_prompt is not None:
            messages.append({"role": "system", "content": data.system_prompt})
        messages.append({"role": "user", "content": data.instruction})
        return Start(tuple(messages))

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        solution = ShellData.read(context.task).solution
        if not solution:
            raise TaskInvalid("shell: data.solution: this task has no solution, so there is no oracle for it")
        for command in solution:
            result = await context.run(command, timeout_s=context.task.limits.run_s)
            if result.status != 0:
                tail = (result.stderr or result.stdout)[-TAIL_BYTES:].decode("utf-8", "replace").strip()
                raise TaskInvalid(f"shell: data.solution: {command!r} ended with status {result.status}: {tail}")
        return Solution()

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        data = ShellData.read(context.task)
        checks = data.checks
        if not data.is_same and WORKSPACE not in evidence.artifacts:
            return Score(0.0, components={check.name: 0.0 for check in checks}, metrics={"workspace_kept": 0.0})
        timeout_s = context.task.limits.eval_s + CHECK_GRACE_S
        passed: dict[str, float] = {}
        for check in checks:
            result = await context.run(check.command, timeout_s=timeout_s)
            context.findings.ran("check", check.name, result, passed=result.status == 0 and not result.is_timed_out)
            if result.is_timed_out:
                raise EvalDeadline(f"check {check.name!r} did not end within {timeout_s:g} s")
            passed[check.name] = float(result.status == 0)
        reward = sum(passed[check.name] * check.weight for check in checks) / sum(check.weight for check in checks)
        return Score(reward, components=passed)


def _files(fields: Fields) -> dict[str, str]:
    """Paths below the workspace, or absolute ones."""
    files: dict[str, str] = {}
    for path, text in fields.text_map("files").items():
        normal = normpath(path if isabs(path) else join(WORKDIR, path))
        is_outside = not isabs(path) and not normal.startswith(WORKDIR + "/")
        if not path or path.endswith("/") or "\0" in path or is_outside:
            raise fields.wrong(f"files[{path!r}]", f"the path of a file, absolute or below {WORKDIR},")
        files[normal] = text
    return files


def _is_same(fields: Fields) -> bool:
    mode = fields.optional_text("eval")
    if mode not in (None, "fresh", "same"):
        raise fields.wrong("eval", '"fresh" or "same"')
    return mode == "same"


def _checks(task: Task, fields: Fields) -> tuple[ShellCheck, ...]:
    checks: list[ShellCheck] = []
    for index, item in enumerate(fields.items("checks")):
        where = f"checks[{index}]"
        if isinstance(item, str) and item.strip():
            check = ShellCheck(item, f"check_{index}")
        elif isinstance(item, Mapping):
            own = Fields(task, item, f"data.{where}")
            command, name = own.text("command"), own.optional_text("name")
            check = ShellCheck(command, name or f"check_{index}", own.positive("weight", 1.0))
            own.done()
        else:
            raise fields.wrong(where, "a command, or an object with command, weight and name,")
        if any(check.name == other.name for other in checks):
            raise fields.wrong(f"{where}.name", "a name that no other check has")
        checks.append(check)
    if not checks:
        raise fields.wrong("checks", "a list of at least one check")
    return tuple(checks)
