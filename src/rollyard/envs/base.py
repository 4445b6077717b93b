"""The interface of this package: `Environment`, which prepares a task, gives the agent its instruction, and scores.

`prepare` writes files only, once per task (n rollouts share them); `init` starts what cannot be shared, such as
processes; `eval` scores, in a sandbox in which no process of RUN has ever run. One instance serves all rollouts and
holds no state of any rollout: after a restart, `eval` may run in a different process than `init`.

The plan's `eval_mode` decides what EVAL's sandbox contains. `fresh`: the image and the declared artifacts, nothing else
from RUN. `same`: all files that RUN left, except those that decide *what is executed* (`protected`): programs,
libraries and start-up files are the image's again, and `eval_binds` mounts the verifier's own files over them. RUN's
files survive neither the end of the rollout nor a restart, so such an EVAL is not repeated later.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from rollyard.core import Artifact, DataField, Json, Message, Score, Task, Trajectory
from rollyard.core.failure import TaskInvalid
from rollyard.core.json import encode_container
from rollyard.engines.base import ChatReply
from rollyard.envs.findings import Findings
from rollyard.envs.protected import PROTECTED
from rollyard.sandbox.base import WORKDIR, Bind, ExecResult, Sandbox
from rollyard.tools.base import Tool, ToolKind, ToolSource

COLLECT_S = 120.0
"""The time limit of `collect`. It does not count towards RUN's deadline."""


@dataclass(frozen=True, slots=True)
class ArtifactRule:
    """A path in RUN's sandbox that is saved for EVAL, up to a size.

    One that is missing, too large or unreadable is not in the evidence; `eval` decides what that means for the score.
    """

    name: str
    path: str
    limit_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What an environment needs for a task, decided without I/O, before anything starts."""

    needs_sandbox: bool = True
    eval_needs_sandbox: bool = True
    workdir: str = WORKDIR  # where the agent and the checks start; may be a path of the image
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    artifacts: tuple[ArtifactRule, ...] = ()
    is_reevaluable: bool = True  # EVAL needs only what was saved: after a restart EVAL is repeated, not RUN
    eval_mode: Literal["fresh", "same"] = "fresh"
    protected: tuple[str, ...] = PROTECTED  # with `same`: EVAL does not have RUN's changes below these paths
    eval_binds: tuple[Bind, ...] = ()  # in EVAL only: the verifier's tests and programs, from the host
    failing_score: Score = field(default_factory=lambda: Score(0.0))


@dataclass(frozen=True, slots=True)
class Start:
    """What `init` returns: the agent's first messages and the environment's tools."""

    messages: tuple[Message, ...]
    tools: tuple[ToolKind | ToolSource, ...] = ()  # the environment's, in addition to the agent's
    info: dict[str, Json] = field(default_factory=dict[str, Json])
    """Passed to EVAL, which may run in another process, as `Trajectory.info`. Tools may change it until RUN ends."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer and messages of a perfect agent; `solve` has already done the work in the sandbox."""

    answer: str | None = None  # as if passed to the finish tool
    messages: tuple[Message, ...] = ()  # the agent's messages; if empty, the answer is the last message


class Judge(Protocol):
    """An engine of role judge. Its tokens are in no trace; a failure of it raises JudgeUnreachable."""

    async def ask(self, messages: Sequence[Message]) -> ChatReply:
        """Returns the judge's reply. Raises JudgeUnreachable if no judge answers."""
        ...


@dataclass(frozen=True, slots=True)
class EnvContext:
    """What an environment may use in a stage. `sandbox` is None if the plan requests no sandbox."""

    task: Task
    rollout_id: str
    sandbox: Sandbox | None
    judge: Judge | None = None
    findings: Findings = field(default_factory=Findings)  # for people who look at the rollout; `eval` adds to it
    owner: str = ""  # of the run; graders that all share serve owners in turn

    @property
    def box(self) -> Sandbox:
        """The sandbox, for an environment whose plan requests one."""
        if self.sandbox is None:
            raise RuntimeError("this environment's plan requests no sandbox")
        return self.sandbox

    async def run(self, command: str, *, timeout_s: float, env: Mapping[str, str] | None = None) -> ExecResult:
        """Runs a set-up or check command in a new process, whose status nothing in the sandbox can change."""
        return await self.box.exec(command, timeout_s=timeout_s, env=env, cwd=self.box.spec.workdir)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What `eval` scores: the trajectory, and the saved artifacts, which are already in its sandbox."""

    trajectory: Trajectory
    artifacts: Mapping[str, Artifact]

    @property
    def answer(self) -> str:
        """The answer passed to the finish tool, else the last assistant message that is not blank."""
        finish_answer = self.trajectory.info.get("answer")
        if isinstance(finish_answer, str):
            return finish_answer
        for message in reversed(self.trajectory.messages):
            content = message.get("content")
            if message.get("role") == "assistant" and isinstance(content, str) and content.strip():
                return content
        return ""


class Environment:
    """Subclass, set `name`, and register under the entry point group `rollyard.environments`."""

    name: ClassVar[str] = ""
    tools: ClassVar[tuple[str, ...]] = ()  # the agent's tools if the task names none
    data_fields: ClassVar[tuple[DataField, ...]] = ()  # of a task's data, for `rollyard tasks fields`

    def check(self, task: Task) -> None:
        """Raises TaskInvalid for data that can never work. Called when a task is submitted: no I/O."""

    def plan(self, task: Task) -> Plan:
        """Returns what the task needs, such as a sandbox or artifacts. Called when a task is submitted: no I/O."""
        return Plan()

    def layer_key(self, task: Task) -> str | None:
        """Identifies the files that `prepare` writes: tasks with the same key and image share one set-up per machine.

        By default it covers this environment's source, the task's data and the plan's `env`. If it is None, `prepare`
        runs for each rollout, in the rollout's own sandbox; return None if `prepare` leaves processes running. If
        several tasks share a set-up, return `key_of` of what the set-up depends on.
        """
        return self.key_of(task.data, self.plan(task).env)

    def key_of(self, *parts: Json | Mapping[str, str]) -> str | None:
        """A layer key of `parts` and this environment's source. None if there is no `prepare` or no source."""
        source = _source_digest(type(self))
        if type(self).prepare is Environment.prepare or source is None:
            return None
        text = json.dumps([self.name, source, *parts], sort_keys=True, default=encode_container)
        return hashlib.sha256(text.encode()).hexdigest()

    async def prepare(self, context: EnvContext) -> None:
        """Writes files only; runs once per task. Raise SetupFailed if the task cannot be set up."""

    async def init(self, context: EnvContext) -> Start:
        """Returns what the agent starts with, and prepares this rollout's sandbox. Must be defined."""
        raise TypeError(f"{type(self).__name__} does not define init")

    async def collect(self, context: EnvContext) -> None:
        """Runs after RUN, in its sandbox, and writes the files that the plan's artifacts name. The agent may have
        replaced any program that it runs there. A file not written within `COLLECT_S` is a missing artifact."""

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        """Solves the task in RUN's sandbox with RUN's tools; the agent `oracle` calls it. Raises TaskInvalid if the
        task contains no solution. If it works through the tools alone and returns its messages, the agent
        `demonstrate` can record it as training data."""
        raise TaskInvalid(f"{self.name}: this task has no solution, so there is no oracle for it")

    def from_row(self, row: Mapping[str, Json], options: Mapping[str, str]) -> Mapping[str, Json]:
        """Converts a dataset's row to a task's body, for `rollyard tasks import`. Raises TaskInvalid with what is
        wrong with the row. `options` are the command's `--set NAME=VALUE`; `check_options` refuses unknown ones."""
        raise TaskInvalid(f"{self.name}: there is no importer for rows")

    def from_folder(self, folder: Path, options: Mapping[str, str]) -> Iterable[Mapping[str, Json]]:
        """Converts a folder that is not a dataset of rows to tasks' bodies. May read files."""
        raise TaskInvalid(f"{self.name}: there is no importer for folders; rows are files of .jsonl, .json or .parquet")

    def generate(self, options: Mapping[str, str]) -> Iterable[Mapping[str, Json]]:
        """Generates tasks' bodies from the options alone, for an environment that makes its own tasks."""
        raise TaskInvalid(f"{self.name} generates no tasks: name a file or a folder of tasks")

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        """Scores what RUN left. Must be defined. Raises VerifierCrashed if the verifier gives no verdict, which is the
        infrastructure's failure and not the policy's."""
        raise TypeError(f"{type(self).__name__} does not define eval")

    async def close(self) -> None:
        """Releases what the instance shares between rollouts. Called once, when the service stops."""


def check_options(environment: str, options: Mapping[str, str], known: Iterable[str] = ()) -> None:
    """Raises TaskInvalid for an unknown option of an importer."""
    names = sorted(known)
    unknown = sorted(set(options) - set(names))
    if unknown:
        there_are = f"there are {', '.join(names)}" if names else "there are none"
        raise TaskInvalid(f"{environment}: unknown option {unknown[0]!r} of its importer; {there_are}")


@cache
def _source_digest(kind: type[Environment]) -> str | None:
    """The digest of all modules that define the class. None if there is no source, which identifies a version."""
    digest = hashlib.sha256()
    for base in kind.__mro__:
        if base in (object, Environment):
            continue
        try:
            module = inspect.getmodule(base)
            if module is None:
                return None
            digest.update(inspect.getsource(module).encode())
        except (OSError, TypeError):
            return None
    return digest.hexdigest()
