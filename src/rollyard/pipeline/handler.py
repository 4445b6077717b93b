"""`Handler`: an environment and its agent in one class, with init, run and eval together.

Rollyard separates the two so that any agent runs in any environment. If a task and its solution loop belong together
(a game loop, a custom scaffold), subclass `Handler` instead of `Environment`, and define `run` too:

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

A task that names such an environment and no agent runs the environment's `run`; with an agent, it runs that agent.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.agents.base import Agent, AgentContext
from rollyard.core import Message
from rollyard.envs.base import Environment


class Handler(Environment, Agent):
    """An environment that is also an agent. `check` validates the whole task."""

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        """Works from the messages of `init`. Returns why it ended ("stop", "finish")."""
        raise TypeError(f"{type(self).__name__} does not define run")
