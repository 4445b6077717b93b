"""The door of this wing: an `Agent` drives RUN.

It talks to the model through a `Conversation` (which keeps every token exact, or is text only) and to the world
through tools; or, with `needs_gateway`, somebody else does the talking, through a `GatewaySession`. It ends by
returning; a limit ends it by raising a PolicyFailure, which truncates and never loses what was sampled: the
conversation or the gateway, not the agent, holds the traces.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from rollyard.core import Deadline, Json, LostAttempt, Message, Task, Trace
from rollyard.gateway.session import GatewaySession
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import NO_SPAN, Span
from rollyard.sandbox.base import Bind, Sandbox
from rollyard.sandbox.python import PortablePython
from rollyard.tokens.base import Parsed, ToolSchema
from rollyard.tools.base import Tool


class Solved(Protocol):
    """What an environment's own solution says."""

    @property
    def answer(self) -> str | None: ...

    @property
    def messages(self) -> tuple[Message, ...]: ...


class Conversation(Protocol):
    """One append-only exchange with the policy."""

    @property
    def messages(self) -> Sequence[Message]: ...

    @property
    def sampled_tokens(self) -> int: ...

    @property
    def turns(self) -> int:
        """Model calls that gave something."""
        ...

    @property
    def finish_reason(self) -> str:
        """How the last one ended: stop, length or abort; empty before the first."""
        ...

    async def turn(self, new_messages: Sequence[Message], tools: Sequence[ToolSchema], *, max_tokens: int) -> Parsed:
        """Appends the new messages, samples the next assistant turn, appends and returns it."""
        ...

    def append(self, messages: Sequence[Message]) -> None:
        """Messages that end the conversation: kept in the history, in no trace."""
        ...

    def traces(self) -> tuple[Trace, ...]:
        """What has been sampled so far, at any moment."""
        ...


@dataclass(frozen=True, slots=True)
class AgentContext:
    """All that an agent gets. `beat` tells the stall watch that something moved."""

    task: Task
    rollout_id: str
    model: Conversation | GatewaySession  # as the agent's `needs_gateway` says; read it as one of the two below
    tools: Mapping[str, Tool]
    sandbox: Sandbox | None
    clock: Deadline
    beat: Callable[[], None] = lambda: None
    info: dict[str, Json] = field(default_factory=dict[str, Json])  # ends up in Trajectory.info
    span: Span = NO_SPAN  # of RUN; model and tool calls are its children
    metrics: Metrics | None = None
    lost: Sequence[LostAttempt] = ()  # earlier attempts at this rollout
    seq: int = 0  # of the rollout, in the order of submission: no other has it
    python: PortablePython | None = None  # ours, in the sandbox, if the agent's outfit asked for it
    solve: Callable[[], Awaitable[Solved]] | None = None  # the environment's own solution of the task, done here

    @property
    def conversation(self) -> Conversation:
        if isinstance(self.model, GatewaySession):
            raise RuntimeError("an agent with needs_gateway has no conversation: use context.gateway")
        return self.model

    @property
    def gateway(self) -> GatewaySession:
        if not isinstance(self.model, GatewaySession):
            raise RuntimeError("this agent has a conversation; for a gateway, set needs_gateway on its class")
        return self.model


@dataclass(frozen=True, slots=True)
class SandboxNeeds:
    """What an agent needs of its sandbox, beside what the environment does."""

    needs_doorway: bool = False  # then it gets a sandbox, whatever the plan says
    needs_python: bool = False  # our own
    binds: tuple[Bind, ...] = ()


class Agent(Protocol):
    """Three things more are optional: `needs_gateway: ClassVar[bool]` (then the context has a gateway, and no tools),
    `needs_model: ClassVar[bool]` (False: no engine is asked for, and the conversation has nobody at its other end), and
    `outfit(task) -> Outfit`."""

    name: ClassVar[str]
    default_tools: ClassVar[tuple[str, ...]]

    def check(self, task: Task) -> None:
        """Raises TaskInvalid for options that can never work. Called at submit: no I/O."""
        ...

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        """Works from the environment's messages; returns why it ended ("stop", "finish")."""
        ...


def needs_gateway(agent: Agent) -> bool:
    return bool(getattr(agent, "needs_gateway", False))


def needs_model(agent: Agent) -> bool:
    return bool(getattr(agent, "needs_model", True))


def is_head_only(agent: Agent) -> bool:
    """It works only in the process that has the service's port: other nodes cannot have its rollouts."""
    return bool(getattr(agent, "is_head_only", False))


def outfit_of(agent: Agent, task: Task) -> SandboxNeeds:
    find: Callable[[Task], SandboxNeeds] | None = getattr(agent, "outfit", None)
    return SandboxNeeds() if find is None else find(task)
