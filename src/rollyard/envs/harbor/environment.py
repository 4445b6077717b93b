"""The `harbor` environment: task folders of Harbor and Terminal-Bench, as `rollyard tasks import harbor` reads them.

The agent works in the task's image; then `tests/` come to /tests, `test.sh` runs in the files that the agent left, and
what it writes to /logs/verifier (reward.json, else reward.txt) is the reward, as it is.

EVAL is `same`: no process of RUN is left; programs, libraries and start-up files, /tests, /logs and /solution are as
the image and the set-up had them. A task that is *done* there (it configures /etc, it installs a program) names those
paths in `keep`: as RUN left them, they are put back before the tests run, and the verifier trusts them.

A verifier that wrote no reward that can be read gives 0, not a failure: else an agent that breaks it would be rid of
its bad attempts. Whether the verifier itself is broken, the oracle tells, which then gets 0, too.
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

from rollyard.core import Json, Message, Score, Task
from rollyard.core.failure import EvalDeadline, SetupDeadline, SetupFailed, TaskInvalid
from rollyard.envs.base import EnvContext, Environment, Evidence, Plan, Solution, Start
from rollyard.envs.harbor.data import ABOVE_TESTS, OURS, HarborData
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
"""A script that never ends is for the stage's deadline to end; its own bound lies behind that."""

OWN_S = 120.0
"""For our own commands in EVAL: folders, and copies of what is kept."""

RUN_THERE = 'cd "$0" 2>/dev/null; exec "$@"'
"""The agent may have deleted the working folder."""

KEPT = "/.harbor-kept"
"""In RUN's files: what `keep` names, set aside where nothing protected is."""


class HarborEnvironment(Environment):
    """See the module."""

    name: ClassVar[str] = "harbor"
    tools: ClassVar[tuple[str, ...]] = ("shell", "finish")

    def check(self, task: Task) -> None:
        HarborData.read(task)
        if task.sandbox.image is None:
            raise TaskInvalid("harbor: sandbox.image: a Harbor task needs an image", field="sandbox.image")

    def plan(self, task: Task) -> Plan:
        data = HarborData.read(task)
        protected = (*PROTECTED, *OURS, *(ABOVE_TESTS if data.workdir != "/" else ()))
        return Plan(workdir=data.workdir, env=data.env, eval_mode="same", protected=protected)

    def layer_key(self, task: Task) -> str | None:
        """Not the tests: tasks that differ only in what is asked and judged share a set-up."""
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
        found = await context.run(f"command -v {shlex.quote(program)}", timeout_s=context.task.limits.init_s)
        if found.status != 0:
            raise SetupFailed(f"tests/test.sh is run by {program}, which the image does not have")
        message: Message = {"role": "user", "content": data.instruction}
        return Start((message,))

    async def collect(self, context: EnvContext) -> None:
        """Sets aside what `keep` names. It may be the agent's `cp` that does it: the files are the agent's anyway."""
        data = HarborData.read(context.task)
        if not data.keep:
            return
        lines = [f"rm -rf {KEPT}; mkdir -p {KEPT}"]
        for number, path in enumerate(data.keep):
            lines.append(f"test -e {shlex.quote(path)} && cp -a {shlex.quote(path)} {KEPT}/{number}")
        await context.box.exec("\n".join(lines), timeout_s=OWN_S, cwd="/")

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        data, sandbox = HarborData.read(context.task), context.box
        if not data.solution:
            raise TaskInvalid("harbor: the task has no solution/solve.sh, so there is no oracle for it")
        await _upload(sandbox, data.solution, "/solution", "solve.sh")
        command = command_of(text_of(data.solution, "solve.sh"), "/solution/solve.sh")
        timeout_s = context.task.limits.run_s + GRACE_S
        done = await sandbox.exec(command, timeout_s=timeout_s, cwd=data.workdir, env=data.solution_env)
        said = f"solve.sh ended with status {done.status}\n{_tail(done)}"
        return Solution(messages=({"role": "assistant", "content": said.strip()},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        data, sandbox = HarborData.read(context.task), context.box
        if not await _laid_out(sandbox, data):
            log.info("RUN's files kept the verifier from starting", extra={"rollout": context.rollout_id})
            return Score(0.0, metrics={"verifier_ran": 0.0, "reward_written": 0.0})
        command = command_of(text_of(data.tests, "test.sh"), "/tests/test.sh")
        done = await sandbox.exec(
            ["sh", "-c", RUN_THERE, data.workdir, *command],
            timeout_s=context.task.limits.eval_s + GRACE_S,
            cwd="/",
            env={"PYTHONPATH": _python_path(sandbox), **data.verifier_env},
        )
        if done.is_timed_out:
            raise EvalDeadline("tests/test.sh did not end in time")
        metrics = {"verifier_ran": 1.0, "verifier_status": float(done.status)}
        verdict = await read_verdict(sandbox, data.tests)
        if verdict is None:
            log.info("the verifier wrote no reward", extra={"rollout": context.rollout_id, "status": done.status})
            return Score(0.0, metrics={**metrics, "reward_written": 0.0})
        others = {name: number for name, number in verdict.items() if name != "reward"}
        return Score(verdict["reward"], components=others, metrics={**metrics, "reward_written": 1.0})

    def from_folder(self, folder: Path, options: Mapping[str, str]) -> Iterable[Mapping[str, Json]]:
        return bodies(folder, options)


async def _laid_out(sandbox: Sandbox, data: HarborData) -> bool:
    """The verifier's folders and what is kept, in EVAL's sandbox. False: RUN's files stand in the way; in the image
    alone, `prepare` did the same."""
    lines: list[str] = []
    for number, path in enumerate(data.keep):
        to, kept = shlex.quote(path), f"{KEPT}/{number}"
        above = shlex.quote(dirname(path))
        lines.append(f"rm -rf {to} && mkdir -p {above} && {{ test ! -e {kept} || cp -a {kept} {to}; }} || exit 1")
    # last: what is kept may have come here, over a link of the agent's
    lines.append(f"rm -rf /tests {FOLDER} && mkdir -p /tests {FOLDER} || exit 1")
    done = await sandbox.exec("\n".join(lines), timeout_s=OWN_S, cwd="/")
    if done.status != 0:
        return False
    async with _on_host(data.tests, "test.sh") as folder:  # a host whose disk is full is not the policy's doing
        try:
            await sandbox.upload(folder, "/tests")
        except (OSError, ValueError):
            return False
    return True


async def _set_up(sandbox: Sandbox, command: str, cwd: str, env: Mapping[str, str] | None, timeout_s: float) -> None:
    done = await sandbox.exec(command, timeout_s=timeout_s, cwd=cwd, env=env)
    if done.is_timed_out:
        raise SetupDeadline(f"{command!r} did not end within {timeout_s:g} s")
    if done.status != 0:
        tail = _tail(done)
        raise SetupFailed(f"{command!r} ended with status {done.status}: {tail}", command=command, status=done.status)


async def _upload(sandbox: Sandbox, files: Files, path: str, script: str = "") -> None:
    async with _on_host(files, script) as folder:
        await sandbox.upload(folder, path)


@asynccontextmanager
async def _on_host(files: Files, script: str) -> AsyncGenerator[Path, None]:
    """A folder to be uploaded as a whole: a link in it is never followed here."""
    with tempfile.TemporaryDirectory() as folder:
        await asyncio.to_thread(write_files, files, Path(folder), script)
        yield Path(folder)


def _python_path(sandbox: Sandbox) -> str:
    """EVAL's Python does not look beside a script for what it imports; the tests' own modules are to be found."""
    return ":".join(filter(None, ("/tests", sandbox.spec.env.get("PYTHONPATH"))))


def _tail(done: ExecResult) -> str:
    return (done.stderr or done.stdout)[-TAIL_BYTES:].decode("utf-8", "replace").strip()
