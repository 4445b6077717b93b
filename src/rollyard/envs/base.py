"""The door of this wing: an `Environment` says where a task happens, what the agent is told, how it is scored.

`prepare` leaves files only, once per task (they can be forked n times); `init` starts what a fork cannot copy;
`eval` scores, in a sandbox that no process of RUN ever lived in. One instance serves all rollouts and holds no state
of any: after a restart, `eval` may run in another process than `init`.

What EVAL's sandbox holds is the plan's `eval_mode`. `fresh`: the image and the declared artifacts, nothing else of
RUN's. `same`: all the files that RUN left, but for those that decide *what is executed* (`protected`): programs,
libraries and start-up files are the image's again, and `eval_binds` lay the verifier's own over it. RUN's files outlive
neither the rollout nor a restart, so such an EVAL is not repeated later.
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

from rollyard.core import Artifact, Json, Message, Score, Task, Trajectory
from rollyard.core.failure import TaskInvalid
from rollyard.engines.base import ChatReply
from rollyard.envs.protected import PROTECTED
from rollyard.sandbox.base import WORKDIR, Bind, ExecResult, Sandbox
from rollyard.tools.base import Tool, ToolKind, ToolSource

COLLECT_S = 120.0
"""For `collect`, of which RUN's clock does not know."""


@dataclass(frozen=True, slots=True)
class ArtifactRule:
    """What EVAL may see of RUN: a path in RUN's sandbox, bounded.

    What is missing, too large or unreadable is not among the evidence: `eval` says what that means.
    """

    name: str
    path: str
    limit_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What an environment needs for a task, decided without I/O, before anything starts."""

    needs_sandbox: bool = True
    eval_needs_sandbox: bool = True
    workdir: str = WORKDIR  # where the agent begins, and the checks; of the image, where it is not ours
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    artifacts: tuple[ArtifactRule, ...] = ()
    is_reevaluable: bool = True  # EVAL needs nothing but what was saved: after a restart it is done again, not RUN
    eval_mode: Literal["fresh", "same"] = "fresh"
    protected: tuple[str, ...] = PROTECTED  # with `same`: what RUN changed below these is not there in EVAL
    eval_binds: tuple[Bind, ...] = ()  # in EVAL only: the verifier's tests and programs, from outside
    failing_score: Score = field(default_factory=lambda: Score(0.0))


@dataclass(frozen=True, slots=True)
class Start:
    """What `init` hands to the agent."""

    messages: tuple[Message, ...]
    tools: tuple[ToolKind | ToolSource, ...] = ()  # those that the environment brings, beside the agent's own
    info: dict[str, Json] = field(default_factory=dict[str, Json])
    """For EVAL, which may run in another process: as it is when RUN ends, it is in `Trajectory.info`. Tools may
    change it until then."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What a perfect agent says and does, as `solve` has just done it."""

    answer: str | None = None  # as if given to the finish tool
    messages: tuple[Message, ...] = ()  # what it said; where there are none, its answer is the last message


class Judge(Protocol):
    """An engine of role judge. Its tokens are in no trace; its failure is JudgeUnreachable."""

    async def ask(self, messages: Sequence[Message]) -> ChatReply: ...


@dataclass(frozen=True, slots=True)
class EnvContext:
    """What a stage of an environment may use. `sandbox` is None where the plan asked for none."""

    task: Task
    rollout_id: str
    sandbox: Sandbox | None
    judge: Judge | None = None

    @property
    def box(self) -> Sandbox:
        """Its sandbox, for an environment whose plan asked for one."""
        if self.sandbox is None:
            raise RuntimeError("this environment's plan asked for no sandbox")
        return self.sandbox

    async def run(self, command: str, *, timeout_s: float, env: Mapping[str, str] | None = None) -> ExecResult:
        """A set-up or check command: a fresh process whose status the sandbox cannot touch."""
        return await self.box.exec(command, timeout_s=timeout_s, env=env, cwd=self.box.spec.workdir)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What `eval` judges: the trajectory, and the saved artifacts, which are already in its sandbox."""

    trajectory: Trajectory
    artifacts: Mapping[str, Artifact]

    @property
    def answer(self) -> str:
        """What the agent gave as its answer (the finish tool), else the last thing that it said."""
        given = self.trajectory.info.get("answer")
        if isinstance(given, str):
            return given
        for message in reversed(self.trajectory.messages):
            content = message.get("content")
            if message.get("role") == "assistant" and isinstance(content, str) and content.strip():
                return content
        return ""


class Environment:
    """Subclass, set `name`, and register under the entry point group `rollyard.environments`."""

    name: ClassVar[str] = ""
    tools: ClassVar[tuple[str, ...]] = ()  # the agent's tools where a task names none

    def check(self, task: Task) -> None:
        """Raises TaskInvalid for data that can never work. Called at submit: no I/O."""

    def plan(self, task: Task) -> Plan:
        return Plan()

    def layer_key(self, task: Task) -> str | None:
        """What the files that `prepare` leaves depend on: tasks of one key share one set-up, on one machine and image.

        By default this environment's source, the task's data and the plan's `env`. None: `prepare` runs for each
        rollout, in its own sandbox; return it if `prepare` leaves processes. Where several tasks share a set-up, return
        `key_of` what it depends on.
        """
        return self.key_of(task.data, self.plan(task).env)

    def key_of(self, *parts: Json | Mapping[str, str]) -> str | None:
        """A layer key of these and of this environment's source. None if there is no `prepare`, or no source."""
        source = _source_digest(type(self))
        if type(self).prepare is Environment.prepare or source is None:
            return None
        text = json.dumps([self.name, source, *parts], sort_keys=True, default=_plain)
        return hashlib.sha256(text.encode()).hexdigest()

    async def prepare(self, context: EnvContext) -> None:
        """Files only; once per task. Raise SetupFailed if the task cannot be set up."""

    async def init(self, context: EnvContext) -> Start:
        raise TypeError(f"{type(self).__name__} does not define init")

    async def collect(self, context: EnvContext) -> None:
        """After RUN, in its sandbox: makes the files that the plan's artifacts name. Whatever it runs there, the agent
        may have replaced; and what it does not make within `COLLECT_S` is missing, as any artifact may be."""

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        """Does what a perfect agent would, in RUN's sandbox and with RUN's tools: the agent `oracle`. TaskInvalid if
        the task does not hold its own solution. One that works through the tools alone, and says so in its messages,
        can be learned from: the agent `demonstrate`."""
        raise TaskInvalid(f"{self.name}: this task holds no solution, so there is no oracle for it")

    def from_row(self, row: Mapping[str, Json], options: Mapping[str, str]) -> Mapping[str, Json]:
        """A row of a dataset that people have, as a task's body: `rollyard tasks import`. TaskInvalid says what is
        wrong with it. `options` are the command's `--set NAME=VALUE`; `check_options` refuses unknown ones."""
        raise TaskInvalid(f"{self.name}: there is no importer for rows")

    def from_folder(self, folder: Path, options: Mapping[str, str]) -> Iterable[Mapping[str, Json]]:
        """A folder that is no dataset of rows, as tasks' bodies. May read files."""
        raise TaskInvalid(f"{self.name}: there is no importer for folders; rows are files of .jsonl, .json or .parquet")

    def generate(self, options: Mapping[str, str]) -> Iterable[Mapping[str, Json]]:
        """Tasks' bodies out of nothing but the options, for an environment that makes its own."""
        raise TaskInvalid(f"{self.name} makes no tasks of its own: name a file or a folder of them")

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        raise TypeError(f"{type(self).__name__} does not define eval")

    async def close(self) -> None:
        """Ends what the instance shared between rollouts. Called once, when the service stops."""


def check_options(environment: str, options: Mapping[str, str], known: Iterable[str] = ()) -> None:
    """TaskInvalid for an option of an importer that it does not know."""
    names = sorted(known)
    unknown = sorted(set(options) - set(names))
    if unknown:
        there_are = f"there are {', '.join(names)}" if names else "there are none"
        raise TaskInvalid(f"{environment}: unknown option {unknown[0]!r} of its importer; {there_are}")


@cache
def _source_digest(kind: type[Environment]) -> str | None:
    """Of all the modules that the class is made of. None: there is no source to tell one version from the next."""
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


def _plain(value: object) -> object:
    """Task data may hold mappings and sequences that are no dict and no list."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
