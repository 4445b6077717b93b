"""The native agent: calls the model, runs the tools that it calls and returns their output to it, until it is done.

It uses either the model's own tool calls (`format: tools`) or one fenced ```bash block per turn
(`format: bash_block`), which is easier for small and base models.

Invariants. A malformed call is an observation for the model and never ends the rollout. Limits (turns, sampled tokens,
context, time) end it by raising, which truncates. A reply that was cut off by a token limit and contains nothing to run
is a truncation, not an answer. Several calls in one turn run in order; a final one ends RUN, and the calls
after it do not run. Every model and tool call is reported to the stall watch.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rollyard.agents.arguments import wrong_arguments
from rollyard.agents.base import Agent, AgentContext
from rollyard.core import DataField, DeadlineExpired, Json, Message, Task
from rollyard.core.failure import RunDeadline, TaskInvalid, TokenLimit, TurnLimit
from rollyard.observe.spans import tool_span
from rollyard.tokens.base import Parsed, ToolCall, ToolSchema
from rollyard.tools.base import Tool, ToolResult

log = logging.getLogger("rollyard.agents")

FORMATS = ("tools", "bash_block")
MAX_LATENCY_S = 60.0
OPTIONS = (
    DataField(
        "format", "tools or bash_block", "How the model calls tools: by its template, or in a block of text.", '"tools"'
    ),
    DataField("tools", "list of strings", "Names of tools.", "the environment's"),
    DataField("mcp", "object", "MCP servers whose tools are added, by name.", "{}"),
    DataField("system_prompt", "string or null", "Replaces the environment's system message.", "null"),
    DataField("schemas", "boolean", "If false, the prompt does not describe the tools.", "true"),
    DataField(
        "tool_latency_s", f"number, 0 to {MAX_LATENCY_S:g}", "Delays every tool call, to measure its effect.", "0"
    ),
)
_OPENING = re.compile(r"^```bash[^\S\n]*$", re.MULTILINE)
_CLOSING = re.compile(r"^```[^\S\n]*$", re.MULTILINE)

BASH_BLOCK_PROMPT = (
    "You work in a shell. To run commands, reply with exactly one block:\n\n```bash\nyour commands\n```\n\n"
    "You are then told what they printed. When you are done, reply without such a block: that is your answer."
)


class NativeAgent(Agent):
    """The native agent loop. With the option `schemas` false, the prompt does not contain the tools, for a policy that
    was trained with them."""

    name: ClassVar[str] = "native"
    default_tools: ClassVar[tuple[str, ...]] = ()
    option_fields: ClassVar[tuple[DataField, ...]] = OPTIONS

    tool_grace_s: float = 15.0
    """A tool enforces limits.tool_s itself and needs some more time to stop its process; after this it counts as
    hung."""

    def check(self, task: Task) -> None:
        options = task.agent.options
        known = sorted(field.name for field in OPTIONS)
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TaskInvalid(f"agent.options.{unknown[0]}: unknown; there are {', '.join(known)}")
        if options.get("format", "tools") not in FORMATS:
            raise TaskInvalid(f"agent.options.format: one of {', '.join(FORMATS)} was expected")
        names = options.get("tools", [])
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise TaskInvalid("agent.options.tools: a list of tool names was expected")
        if not isinstance(options.get("system_prompt"), str | None):
            raise TaskInvalid("agent.options.system_prompt: a string or null was expected")
        if not isinstance(options.get("schemas", True), bool):
            raise TaskInvalid("agent.options.schemas: true or false was expected")
        latency_s = options.get("tool_latency_s", 0)
        if isinstance(latency_s, bool) or not isinstance(latency_s, int | float) or not 0 <= latency_s <= MAX_LATENCY_S:
            raise TaskInvalid(f"agent.options.tool_latency_s: seconds from 0 to {MAX_LATENCY_S:g} were expected")
        if options.get("format") == "bash_block" and "tools" in options and "shell" not in names:
            raise TaskInvalid("agent.options.tools: the format bash_block needs the tool shell")

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        loop = _Loop(context, self.tool_grace_s)
        try:
            return await loop.run(messages)
        except DeadlineExpired as error:
            raise RunDeadline(f"RUN used up its {context.clock.budget_s:g} s") from error
        finally:
            context.info["model_s"] = round(loop.model_s, 6)
            context.info["tool_s"] = round(loop.tool_s, 6)
            context.info["tool_calls"] = loop.tool_calls


class _Loop:
    """One rollout's turns."""

    def __init__(self, context: AgentContext, tool_grace_s: float) -> None:
        self._context = context
        self._tool_grace_s = tool_grace_s
        self._is_bash_block = context.task.agent.options.get("format") == "bash_block"
        latency_s = context.task.agent.options.get("tool_latency_s")
        self._latency_s = latency_s if isinstance(latency_s, int | float) else 0.0
        self._schemas: Sequence[ToolSchema] = () if self._is_bash_block else offered(context.task, context.tools)
        self.model_s = 0.0
        self.tool_s = 0.0
        self.tool_calls = 0

    async def run(self, messages: Sequence[Message]) -> str:
        context = self._context
        if self._is_bash_block and "shell" not in context.tools:  # `check` does not have the environment's tools
            raise TaskInvalid("agent.options.format: bash_block needs the tool shell, which the environment lacks")
        new: Sequence[Message] = first_messages(context.task, messages)
        while True:
            budget = self._budget(new)
            started = time.monotonic()
            try:
                parsed = await context.conversation.turn(new, self._schemas, max_tokens=budget)
            finally:
                self.model_s += time.monotonic() - started
            context.beat()
            new, is_final = await (self._bash_block(parsed) if self._is_bash_block else self._tool_calls(parsed))
            if is_final:
                context.conversation.append(new)
                return "finish"
            if not new:
                if context.conversation.finish_reason == "length":
                    raise TokenLimit(f"the reply was cut off after {budget} tokens, with nothing to run in it")
                return "stop"

    def _budget(self, new: Sequence[Message]) -> int:
        """Returns how many tokens the next reply may have. Raises the limit that has been reached."""
        task, conversation = self._context.task, self._context.conversation
        if conversation.turns >= task.limits.max_turns:
            conversation.append(new)
            raise TurnLimit(f"all {task.limits.max_turns} turns are used up")
        if task.limits.max_tokens is None:
            return task.sampling.max_tokens
        remaining = task.limits.max_tokens - conversation.sampled_tokens
        if remaining <= 0:
            conversation.append(new)
            raise TokenLimit(f"all {task.limits.max_tokens} tokens are used up")
        return min(remaining, task.sampling.max_tokens)

    # --- the two formats: both return the new messages, and whether RUN ends

    async def _tool_calls(self, parsed: Parsed) -> tuple[list[Message], bool]:
        new: list[Message] = []
        for call in parsed.tool_calls:
            result = await self._called(call)
            new.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.content})
            if result.is_final:
                self._context.info.update(result.info)
                return new, True
        return new, False

    async def _bash_block(self, parsed: Parsed) -> tuple[list[Message], bool]:
        blocks = bash_blocks(parsed.content)
        if len(blocks) == 1:
            result = await self._call(self._context.tools["shell"], {"command": blocks[0]}, "")
            return [{"role": "user", "content": result.content}], result.is_final
        if not blocks and not _OPENING.search(parsed.content):
            return [], False
        problem = f"there were {len(blocks)}" if blocks else "it was not closed"
        return [{"role": "user", "content": f"Error: exactly one ```bash block was expected; {problem}."}], False

    # --- one call

    async def _called(self, call: ToolCall) -> ToolResult:
        if call.arguments is None:
            return _error(call.error or "the tool call could not be read")
        tool = self._context.tools.get(call.name)
        if tool is None:
            names = ", ".join(self._context.tools) or "none"
            return _error(f'there is no tool "{call.name}"; there are: {names}')
        wrong = wrong_arguments(tool.spec.parameters, call.arguments)
        return _error(f"{call.name}: {wrong}") if wrong else await self._call(tool, call.arguments, call.id)

    async def _call(self, tool: Tool, arguments: Mapping[str, Json], call_id: str) -> ToolResult:
        context = self._context
        timeout_s = context.task.limits.tool_s
        started = time.monotonic()
        self.tool_calls += 1
        logged = context.call_log.begin("tool", context.conversation.turns - 1, tool.spec.name)
        is_error = True
        guard = asyncio.timeout(timeout_s + self._latency_s + self._tool_grace_s)
        try:
            with tool_span(context.span, name=tool.spec.name, call_id=call_id):
                async with context.clock.counting(), guard:
                    if self._latency_s:
                        await asyncio.sleep(self._latency_s)
                    result = await tool.call(arguments, timeout_s=timeout_s)
                    is_error = result.is_error
                    return result
        except TimeoutError:
            if not guard.expired():
                raise
            log.warning("a tool hung", extra={"rollout": context.rollout_id, "tool": tool.spec.name})
            return _error(f"{tool.spec.name} did not answer within {timeout_s:g} s")
        finally:
            took_s = time.monotonic() - started
            self.tool_s += took_s
            context.call_log.end(logged, is_error=is_error)
            if context.metrics is not None:
                context.metrics.tool_call(tool.spec.name, took_s)
            context.beat()


def first_messages(task: Task, messages: Sequence[Message]) -> list[Message]:
    """Returns the environment's messages, with the task's system prompt if it has one."""
    system_prompt = task.agent.options.get("system_prompt")
    is_first = bool(messages) and messages[0].get("role") == "system"
    if isinstance(system_prompt, str):
        return [{"role": "system", "content": system_prompt}, *(messages[1:] if is_first else messages)]
    if task.agent.options.get("format") != "bash_block":
        return list(messages)
    lead = f"{messages[0].get('content')}\n\n" if is_first else ""
    return [{"role": "system", "content": lead + BASH_BLOCK_PROMPT}, *(messages[1:] if is_first else messages)]


def offered(task: Task, tools: Mapping[str, Tool]) -> list[ToolSchema]:
    """Returns the schemas of the tools that the model is offered, in order."""
    if task.agent.options.get("schemas", True) is False:
        return []
    return [tool.spec.schema() for tool in tools.values()]


def bash_blocks(text: str) -> list[str]:
    """Returns the contents of the closed ```bash blocks, in one pass: a single regular expression would search from
    every opening to the end, and a model in a loop writes thousands of openings."""
    blocks: list[str] = []
    at = 0
    while opening := _OPENING.search(text, at):
        closing = _CLOSING.search(text, opening.end())
        if closing is None:
            break
        blocks.append(text[opening.end() + 1 : closing.start()])
        at = closing.end()
    return blocks


def _error(what: str) -> ToolResult:
    return ToolResult(f"Error: {what}", is_error=True)
