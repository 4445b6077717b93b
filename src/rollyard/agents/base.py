"""The interface of agents: an `Agent` drives RUN.

It calls the model through a `Conversation` (with exact tokens, or text only) and acts through tools. With
`needs_gateway`, a program elsewhere calls the model through a `GatewaySession` instead. An agent ends by returning. A
limit ends it by raising a PolicyFailure, which truncates the rollout and never loses sampled tokens: the traces belong
to the conversation or the gateway, not to the agent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from rollyard.core import DataField, Deadline, Json, LostAttempt, Message, Task, Trace
from rollyard.gateway.session import GatewaySession
from rollyard.observe.call_log import CallLog
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import NO_SPAN, Span
from rollyard.sandbox.base import Bind, Sandbox
from rollyard.sandbox.python import PortablePython
from rollyard.tokens.base import Parsed, ToolSchema
from rollyard.tools.base import Tool


class Solved(Protocol):
    """An environment's reference solution of a task."""

    @property
    def answer(self) -> str | None:
        """The answer, as if passed to the finish tool; None if there is none."""
        ...

    @property
    def messages(self) -> tuple[Message, ...]:
        """The agent's messages; if they are empty, the answer is the last message."""
        ...


class Conversation(Protocol):
    """One append-only conversation with the policy."""

    @property
    def messages(self) -> Sequence[Message]:
        """All messages so far: the environment's, the policy's and those of tools."""
        ...

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy has sampled."""
        ...

    @property
    def turns(self) -> int:
        """The number of model calls that returned a turn."""
        ...

    @property
    def message_turns(self) -> Mapping[int, int]:
        """The turn of each message that was sampled, by the message's number."""
        ...

    @property
    def finish_reason(self) -> str:
        """How the last turn ended: stop, length or abort; empty before the first."""
        ...

    async def turn(self, new_messages: Sequence[Message], tools: Sequence[ToolSchema], *, max_tokens: int) -> Parsed:
        """Appends the new messages, samples the next assistant turn, appends and returns it. Raises PromptTooLong (for
        the first turn) or ContextLimit if the context is too short, DeadlineExpired if RUN's time is used up, and
        EngineFailure."""
        ...

    def append(self, messages: Sequence[Message]) -> None:
        """Adds messages that end the conversation. They are in the history but in no trace."""
        ...

    def traces(self) -> tuple[Trace, ...]:
        """Returns the traces so far. May be called at any time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentContext:
    """Everything that an agent receives. `beat` reports progress to the stall watch."""

    task: Task
    rollout_id: str
    model: Conversation | GatewaySession  # depends on the agent's `needs_gateway`; use one of the two properties below
    tools: Mapping[str, Tool]
    sandbox: Sandbox | None
    clock: Deadline
    beat: Callable[[], None] = lambda: None
    info: dict[str, Json] = field(default_factory=dict[str, Json])  # stored in Trajectory.info
    span: Span = NO_SPAN  # of RUN; model and tool calls are its children
    metrics: Metrics | None = None
    call_log: CallLog = field(default_factory=CallLog)  # of RUN; the model's calls add themselves
    lost: Sequence[LostAttempt] = ()  # earlier attempts at this rollout
    seq: int = 0  # the rollout's number in the order of submission; unique
    python: PortablePython | None = None  # Rollyard's Python in the sandbox, if `sandbox_needs` requested it
    solve: Callable[[], Awaitable[Solved]] | None = None  # runs the environment's reference solution

    @property
    def conversation(self) -> Conversation:
        """The conversation of an agent without a gateway. Raises RuntimeError for other agents."""
        if isinstance(self.model, GatewaySession):
            raise RuntimeError("an agent with needs_gateway has no conversation: use context.gateway")
        return self.model

    @property
    def gateway(self) -> GatewaySession:
        """The session of an agent with `needs_gateway`. Raises RuntimeError for other agents."""
        if not isinstance(self.model, GatewaySession):
            raise RuntimeError("this agent has a conversation; for a gateway, set needs_gateway on its class")
        return self.model


@dataclass(frozen=True, slots=True)
class SandboxNeeds:
    """What an agent needs in its sandbox, in addition to what the environment needs."""

    needs_doorway: bool = False  # the agent then gets a sandbox even if the environment plans none
    needs_python: bool = False  # Rollyard's portable Python
    binds: tuple[Bind, ...] = ()


class Agent(ABC):
    """Drives RUN. One instance serves all rollouts, so it holds no state of a rollout."""

    name: ClassVar[str]
    default_tools: ClassVar[tuple[str, ...]] = ()
    option_fields: ClassVar[tuple[DataField, ...]] = ()  # of `agent.options`, for `rollyard tasks fields`

    needs_gateway: ClassVar[bool] = False
    """The context then has a gateway, and no tools."""

    needs_model: ClassVar[bool] = True
    """If False, no engine is requested and the conversation cannot sample."""

    is_head_only: ClassVar[bool] = False
    """The agent works only in the process that has the service's port, so other nodes cannot run it."""

    def check(self, task: Task) -> None:  # noqa: B027  # optional
        """Raises TaskInvalid for invalid options. Called when a task is submitted: no I/O."""

    def sandbox_needs(self, task: Task) -> SandboxNeeds:
        """What the agent needs in the task's sandbox. Called when a task is submitted and in INIT: no I/O."""
        return SandboxNeeds()

    @abstractmethod
    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        """Runs the agent on the environment's messages. Returns why it ended ("stop", "finish"). Raises a
        PolicyFailure, such as TurnLimit, to end RUN; what it left is scored."""
