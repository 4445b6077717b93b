"""`Handler`: environment and agent in one class, for those who want init, run and eval together.

Rollyard keeps the two apart so that any agent runs in any environment. Where a task and the way to solve it belong
together (a game loop, a scaffold of your own), subclass `Handler` instead of `Environment`, and define `run` too:

    class Riddle(Handler):
        name = "riddle"

        async def init(self, context):
            return Start(({"role": "user", "content": context.task.data["riddle"]},))

        async def run(self, context, messages):
            parsed = await context.conversation.turn(messages, (), max_tokens=context.task.sampling.max_tokens)
            if "hint" in parsed.content:
                hint = {"role": "user", "content": context.task.data["hint"]}
                await context.conversation.turn([hint], (), max_tokens=context.task.sampling.max_tokens)
            return "stop"

        async def eval(self, context, evidence):
            return Score(float(context.task.data["answer"] in evidence.answer))

A task that names such an environment and no agent runs its `run`; one that names an agent runs that one in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rollyard.agents.base import AgentContext
from rollyard.core import Message
from rollyard.envs.base import Environment


class Handler(Environment):
    """See the module. It is an Agent as well: `check` looks at the whole task."""

    default_tools: ClassVar[tuple[str, ...]] = ()

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        """Works from the messages of `init`; returns why it ended ("stop", "finish")."""
        raise TypeError(f"{type(self).__name__} does not define run")
