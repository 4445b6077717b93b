"""The `harbor` environment: task folders of Harbor and Terminal-Bench, imported by `rollyard tasks import harbor`.

The agent works in the task's image. Then `tests/` is copied to /tests, `test.sh` runs in the files that the agent left,
and what it writes to /logs/verifier (reward.json, else reward.txt) is the reward.

EVAL is `same`: no process of RUN is left; programs, libraries and start-up files, /tests, /logs and /solution are as
the image and the set-up left them. A task whose result is *in* one of these paths (it configures /etc, or installs a
program) lists them in `keep`: they are restored as RUN left them before the tests run, and the verifier trusts them.

If the verifier writes no readable reward, the score is 0, not a failure: otherwise an agent could discard its bad
attempts by breaking the verifier. If the verifier itself is broken, the oracle scores 0 as well.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import tempfile
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from posixpath import dirname
from typing import ClassVar

from rollyard.core import DataField, Json, Message, Score, Task
from rollyard.core.failure import EvalDeadline, SetupDeadline, SetupFailed, TaskInvalid
from rollyard.envs.base import EnvContext, Environment, Evidence, Plan, Solution, Start
from rollyard.envs.harbor.data import ABOVE_TESTS, FIELDS, RESERVED_FOLDERS, HarborData
from rollyard.envs.harbor.files import Files, text_of, write_files
from rollyard.envs.harbor.folder import bodies
from rollyard.envs.harbor.scripts import command_of, interpreter_of
from rollyard.envs.harbor.verdict import FOLDER, read_verdict
from rollyard.envs.protected import PROTECTED
from rollyard.sandbox.base import ExecResult, Sandbox
from rollyard.tools.base import Tool

log = logging.getLogger(__name__)

TAIL_BYTES = 2000
GRACE_S = 60.0
"""Added to the stage's deadline for a script's own timeout, so that the deadline ends a script that hangs."""

OWN_S = 120.0
"""The timeout of Rollyard's own commands in EVAL: creating folders and copying what `keep` names."""

RUN_THERE = 'cd "$0" 2>/dev/null; exec "$@"'
"""Also works if the agent has deleted the working folder."""

KEEP_FOLDER = "/.harbor-kept"
"""Where `collect` copies the paths of `keep`: a folder that is not protected."""


class HarborEnvironment(Environment):
    """Scores with the task's own `test.sh`."""

    name: ClassVar[str] = "harbor"
    tools: ClassVar[tuple[str, ...]] = ("shell", "finish")
    data_fields: ClassVar[tuple[DataField, ...]] = FIELDS

    def check(self, task: Task) -> None:
        HarborData.read(task)
        if task.sandbox.image is None:
            raise TaskInvalid("harbor: sandbox.image: a Harbor task needs an image", field="sandbox.image")

    def plan(self, task: Task) -> Plan:
        data = HarborData.read(task)
        protected = (*PROTECTED, *RESERVED_FOLDERS, *(ABOVE_TESTS if data.workdir != "/" else ()))
        return Plan(workdir=data.workdir, env=data.env, eval_mode="same", protected=protected)

    def layer_key(self, task: Task) -> str | None:
        """Does not include the tests: tasks that differ only in instruction and tests share a set-up."""
        data = HarborData.read(task)
        return self.key_of(data.workdir, data.env, task.data.get("setup"))

    async def prepare(self, context: EnvContext) -> None:
        data, sandbox = HarborData.read(context.task), context.box
        timeout_s = context.task.limits.init_s
        folders = f"mkdir -p {shlex.quote(data.workdir)} /logs/agent {FOLDER}"
        await _set_up(sandbox, folders, "/", None, timeout_s)
        for step in data.setup:
            if step.run:
                await _set_up(sandbox, step.run, step.cwd, step.env, timeout_s)
            else:
                await _upload(sandbox, step.files, "/")

    async def init(self, context: EnvContext) -> Start:
        data = HarborData.read(context.task)
        program = interpreter_of(text_of(data.tests, "test.sh"))
        result = await context.run(f"command -v {shlex.quote(program)}", timeout_s=context.task.limits.init_s)
        if result.status != 0:
            raise SetupFailed(f"tests/test.sh is run by {program}, which the image does not have")
        message: Message = {"role": "user", "content": data.instruction}
        return Start((message,))

    async def collect(self, context: EnvContext) -> None:
        """Copies the paths of `keep`. The agent may have replaced `cp`, but the files are the agent's anyway."""
        data = HarborData.read(context.task)
        if not data.keep:
            return
        lines = [f"rm -rf {KEEP_FOLDER}; mkdir -p {KEEP_FOLDER}"]
        for number, path in enumerate(data.keep):
            lines.append(f"test -e {shlex.quote(path)} && cp -a {shlex.quote(path)} {KEEP_FOLDER}/{number}")
        await context.box.exec("\n".join(lines), timeout_s=OWN_S, cwd="/")

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        data, sandbox = HarborData.read(context.task), context.box
        if not data.solution:
            raise TaskInvalid("harbor: the task has no solution/solve.sh, so there is no oracle for it")
        await _upload(sandbox, data.solution, "/solution", "solve.sh")
        command = command_of(text_of(data.solution, "solve.sh"), "/solution/solve.sh")
        timeout_s = context.task.limits.run_s + GRACE_S
        result = await sandbox.exec(command, timeout_s=timeout_s, cwd=data.workdir, env=data.solution_env)
        message = f"solve.sh ended with status {result.status}\n{_tail(result)}"
        return Solution(messages=({"role": "assistant", "content": message.strip()},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        data, sandbox = HarborData.read(context.task), context.box
        if not await _laid_out(sandbox, data):
            log.info("RUN's files prevented the verifier from starting", extra={"rollout": context.rollout_id})
            return Score(0.0, metrics={"verifier_ran": 0.0, "reward_written": 0.0})
        command = command_of(text_of(data.tests, "test.sh"), "/tests/test.sh")
        result = await sandbox.exec(
            ["sh", "-c", RUN_THERE, data.workdir, *command],
            timeout_s=context.task.limits.eval_s + GRACE_S,
            cwd="/",
            env={"PYTHONPATH": _python_path(sandbox), **data.verifier_env},
        )
        if result.is_timed_out:
            context.findings.ran("tests", "tests/test.sh", result, passed=False)
            raise EvalDeadline("tests/test.sh did not end in time")
        metrics = {"verifier_ran": 1.0, "verifier_status": float(result.status)}
        verdict = await read_verdict(sandbox, data.tests)
        is_passed = verdict is not None and verdict["reward"] >= 1.0
        context.findings.ran("tests", "tests/test.sh", result, passed=is_passed)
        if verdict is None:
            log.info("the verifier wrote no reward", extra={"rollout": context.rollout_id, "status": result.status})
            return Score(0.0, metrics={**metrics, "reward_written": 0.0})
        others = {name: number for name, number in verdict.items() if name != "reward"}
        return Score(verdict["reward"], components=others, metrics={**metrics, "reward_written": 1.0})

    def from_folder(self, folder: Path, options: Mapping[str, str]) -> Iterable[Mapping[str, Json]]:
        return bodies(folder, options)


async def _laid_out(sandbox: Sandbox, data: HarborData) -> bool:
    """Creates the verifier's folders and restores `keep` in EVAL's sandbox. Returns False if RUN's files prevent it;
    the image does not, because `prepare` did the same."""
    lines: list[str] = []
    for number, path in enumerate(data.keep):
        to, saved = shlex.quote(path), f"{KEEP_FOLDER}/{number}"
        above = shlex.quote(dirname(path))
        lines.append(f"rm -rf {to} && mkdir -p {above} && {{ test ! -e {saved} || cp -a {saved} {to}; }} || exit 1")
    # last: through a link of the agent, a path of `keep` may have been copied here
    lines.append(f"rm -rf /tests {FOLDER} && mkdir -p /tests {FOLDER} || exit 1")
    result = await sandbox.exec("\n".join(lines), timeout_s=OWN_S, cwd="/")
    if result.status != 0:
        return False
    async with _on_host(data.tests, "test.sh") as folder:  # a full disk is not the policy's fault
        try:
            await sandbox.upload(folder, "/tests")
        except (OSError, ValueError):
            return False
    return True


async def _set_up(sandbox: Sandbox, command: str, cwd: str, env: Mapping[str, str] | None, timeout_s: float) -> None:
    result = await sandbox.exec(command, timeout_s=timeout_s, cwd=cwd, env=env)
    if result.is_timed_out:
        raise SetupDeadline(f"{command!r} did not end within {timeout_s:g} s")
    if result.status != 0:
        tail = _tail(result)
        raise SetupFailed(
            f"{command!r} ended with status {result.status}: {tail}", command=command, status=result.status
        )


async def _upload(sandbox: Sandbox, files: Files, path: str, script: str = "") -> None:
    async with _on_host(files, script) as folder:
        await sandbox.upload(folder, path)


@asynccontextmanager
async def _on_host(files: Files, script: str) -> AsyncGenerator[Path, None]:
    """A temporary folder with the files, for upload. Links in it are never followed on the host."""
    with tempfile.TemporaryDirectory() as folder:
        await asyncio.to_thread(write_files, files, Path(folder), script)
        yield Path(folder)


def _python_path(sandbox: Sandbox) -> str:
    """EVAL's Python does not import from a script's folder, so /tests must be in the path."""
    return ":".join(filter(None, ("/tests", sandbox.spec.env.get("PYTHONPATH"))))


def _tail(result: ExecResult) -> str:
    return (result.stderr or result.stdout)[-TAIL_BYTES:].decode("utf-8", "replace").strip()
