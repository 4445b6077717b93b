"""Two agents with a known score, with which every environment and task can be checked.

`oracle` applies the environment's reference solution: it gets the highest reward, or the task is broken. `noop` does
nothing: it gets the lowest reward, or the task rewards inaction. Neither needs a model, so neither produces a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rollyard.agents.base import Agent, AgentContext
from rollyard.core import Message, Task, Trace
from rollyard.core.failure import TaskInvalid
from rollyard.tokens.base import Parsed, ToolSchema


class SilentConversation:
    """A conversation without a model: it stores the agent's messages and samples nothing."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    @property
    def messages(self) -> Sequence[Message]:
        return self._messages

    @property
    def sampled_tokens(self) -> int:
        return 0

    @property
    def turns(self) -> int:
        return 0

    @property
    def finish_reason(self) -> str:
        return ""

    @property
    def message_turns(self) -> Mapping[int, int]:
        return {}

    async def turn(self, new_messages: Sequence[Message], tools: Sequence[ToolSchema], *, max_tokens: int) -> Parsed:
        raise RuntimeError("this agent declares that it needs no model")

    def append(self, messages: Sequence[Message]) -> None:
        self._messages += messages

    def traces(self) -> tuple[Trace, ...]:
        return ()


class NoopAgent(Agent):
    """Ends RUN without doing anything."""

    name: ClassVar[str] = "noop"
    default_tools: ClassVar[tuple[str, ...]] = ()
    needs_model: ClassVar[bool] = False

    def check(self, task: Task) -> None:
        """Accepts any task."""

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        context.conversation.append(messages)
        return "stop"


class OracleAgent(NoopAgent):
    """Applies the environment's reference solution."""

    name: ClassVar[str] = "oracle"

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        if context.solve is None:
            raise TaskInvalid("this environment has no reference solution")
        async with context.clock.counting():
            solved = await context.solve()
        solution_messages = solved.messages
        if not solution_messages and solved.answer is not None:
            solution_messages = ({"role": "assistant", "content": solved.answer},)
        context.conversation.append([*messages, *solution_messages])
        if solved.answer is not None:
            context.info["answer"] = solved.answer
        return "finish"
