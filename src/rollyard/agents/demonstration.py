"""The agent `demonstrate`: records the environment's reference solution as if the policy had sampled it.

It has the native agent's options, tools and prompt, and runs the environment's `solve`. Each turn of the solution is
then appended to the prompt in the token ids that this model would have had to sample for it, so a warm start on these
traces trains exactly the tokens that the native agent uses in RL. The engine is needed for its renderer and never
generates; no turn and no token counts as sampled.

Invariants. If the native agent replays the turns of a demonstration, it gets the same ids and the same mask. A solution
that could not be replayed raises TaskInvalid and gets no reward: work done without the tools, a call of a tool that the
task does not offer, more turns or tokens than the task's limits allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rollyard.agents.arguments import wrong_arguments
from rollyard.agents.base import AgentContext, Solved
from rollyard.agents.conversation import TokenConversation
from rollyard.agents.native import NativeAgent, first_messages, offered
from rollyard.core import Limits, Message, Task
from rollyard.core.failure import EngineRefused, TaskInvalid
from rollyard.tokens.base import Parsed
from rollyard.tools.base import Tool


class DemonstrateAgent(NativeAgent):
    """Demonstrates the reference solution. Options: the native agent's, except that `format` can only be `tools`."""

    name: ClassVar[str] = "demonstrate"

    def check(self, task: Task) -> None:
        super().check(task)
        if task.agent.options.get("format", "tools") != "tools":
            raise TaskInvalid("agent.options.format: a demonstration is made of tool calls; only tools was expected")

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        conversation = context.conversation
        if not isinstance(conversation, TokenConversation):
            raise EngineRefused(
                "a demonstration consists of tokens of its engine's model, and this engine returns only text; "
                "use a vllm or sglang engine"
            )
        if context.solve is None:
            raise TaskInvalid("this environment has no reference solution to demonstrate")
        async with context.clock.counting():
            solved = await context.solve()
        context.beat()
        exchanges = _exchanges(solved)
        _check_work(exchanges, context)
        new: Sequence[Message] = first_messages(context.task, messages)
        schemas, budget = offered(context.task, context.tools), _Budget(context.task)
        for exchange in exchanges:
            demonstrated = conversation.demonstrate(new, exchange.turn, schemas)
            budget.spend(len(demonstrated.token_ids))
            _check_calls(demonstrated.parsed, context.tools)
            new = exchange.answered(demonstrated.parsed)
        conversation.append(new)
        if solved.answer is not None:
            context.info["answer"] = solved.answer
        context.info["tool_calls"] = sum(len(exchange.results) for exchange in exchanges)
        return "finish" if new else "stop"


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A turn, and the output of its tools."""

    turn: Message
    results: tuple[Message, ...]

    def answered(self, parsed: Parsed) -> list[Message]:
        """Returns the results under the call ids that the native agent would use: some templates render the ids."""
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.get("content")}
            for call, result in zip(parsed.tool_calls, self.results, strict=False)
        ]


class _Budget:
    """Applies the task's limits to a demonstration."""

    def __init__(self, task: Task) -> None:
        self._limits: Limits = task.limits
        self._per_turn = task.sampling.max_tokens
        self._turns = 0
        self._tokens = 0

    def spend(self, tokens: int) -> None:
        self._turns += 1
        self._tokens += tokens
        limits = self._limits
        if self._turns > limits.max_turns:
            raise TaskInvalid(f"its solution takes more turns than limits.max_turns, {limits.max_turns}")
        if tokens > self._per_turn:
            raise TaskInvalid(f"a turn of its solution has {tokens} tokens, sampling.max_tokens is {self._per_turn}")
        if limits.max_tokens is not None and self._tokens > limits.max_tokens:
            raise TaskInvalid(f"its solution has more tokens than limits.max_tokens, {limits.max_tokens}")


def _exchanges(solved: Solved) -> list[_Exchange]:
    """Splits a solution into turns. All but the last must make calls and have a result for each: otherwise the native
    agent would end there."""
    messages = solved.messages
    if not messages and solved.answer is not None:
        messages = ({"role": "assistant", "content": solved.answer},)
    if not messages:
        raise TaskInvalid("its solution is empty: there are no turns to demonstrate")
    starts = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    if not starts or starts[0] != 0:
        raise TaskInvalid("its solution does not begin with an assistant's turn")
    exchanges = [
        _Exchange(messages[start], tuple(messages[start + 1 : end]))
        for start, end in zip(starts, [*starts[1:], len(messages)], strict=True)
    ]
    for number, exchange in enumerate(exchanges):
        calls = _calls(exchange.turn)
        results = len(exchange.results)
        is_answered = results <= calls if exchange is exchanges[-1] else 0 < results == calls
        if not is_answered or any(message.get("role") != "tool" for message in exchange.results):
            raise TaskInvalid(f"turn {number} of its solution has {calls} calls, but not one result for each after it")
    return exchanges


def _check_work(exchanges: Sequence[_Exchange], context: AgentContext) -> None:
    """Rejects solutions that work in the sandbox without tools: a policy would learn only to say "done"."""
    if context.sandbox is not None and not any(_calls(exchange.turn) for exchange in exchanges):
        raise TaskInvalid(
            "its solution calls no tool, though the task has a sandbox: its work there is in no turn. If no work is "
            "needed there, give the task no tools (agent.options.tools: [])"
        )


def _check_calls(parsed: Parsed, tools: Mapping[str, Tool]) -> None:
    """Rejects calls to which the native agent would return an error."""
    for call in parsed.tool_calls:
        tool = tools.get(call.name)
        if tool is None:
            raise TaskInvalid(f"its solution calls the tool {call.name}, which this task does not have")
        if wrong := wrong_arguments(tool.spec.parameters, call.arguments or {}):
            raise TaskInvalid(f"its solution calls {call.name} with wrong arguments: {wrong}")


def _calls(turn: Message) -> int:
    calls = turn.get("tool_calls")
    return len(calls) if isinstance(calls, Sequence) else 0
