"""The door of this wing: an `Environment` says where a task happens, what the agent is told, how it is scored.

`prepare` leaves files only, once per task (they can be forked n times); `init` starts what a fork cannot copy;
`eval` scores, in a sandbox that no process of RUN ever lived in. One instance serves all rollouts and holds no state
of any: after a restart, `eval` may run in another process than `init`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from rollyard.core import Artifact, Message, Score, Task, Trajectory
from rollyard.engines.base import ChatReply
from rollyard.sandbox.base import ExecResult, Sandbox
from rollyard.tools.base import ToolKind


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
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    artifacts: tuple[ArtifactRule, ...] = ()
    is_reevaluable: bool = True  # EVAL needs nothing but what was saved: after a restart it is done again, not RUN
    failing_score: Score = field(default_factory=lambda: Score(0.0))


@dataclass(frozen=True, slots=True)
class Start:
    """What `init` hands to the agent."""

    messages: tuple[Message, ...]
    tools: tuple[ToolKind, ...] = ()  # those that the environment brings, beside the agent's own


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

    async def run(self, command: str, *, timeout_s: float, env: Mapping[str, str] | None = None) -> ExecResult:
        """A set-up or check command: a fresh process whose status the sandbox cannot touch."""
        if self.sandbox is None:
            raise RuntimeError("this environment's plan asked for no sandbox")
        return await self.sandbox.exec(command, timeout_s=timeout_s, env=env)


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

    async def prepare(self, context: EnvContext) -> None:
        """Files only; once per task. Raise SetupFailed if the task cannot be set up."""

    async def init(self, context: EnvContext) -> Start:
        raise TypeError(f"{type(self).__name__} does not define init")

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        raise TypeError(f"{type(self).__name__} does not define eval")

    async def close(self) -> None:
        """Ends what the instance shared between rollouts. Called once, when the service stops."""
