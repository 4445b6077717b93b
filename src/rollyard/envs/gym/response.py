"""Converts a trajectory to the Responses object that a resources server verifies.

Its output contains everything after the task's input: reasoning, messages, calls and their outputs, in order. An answer
passed to the `finish` tool is also added as a message, because verifiers look for it there. A call whose arguments are
not an object was never executed; it is added as text, because verifiers parse the arguments of every call, and one that
fails on them returns no score. If the agent did nothing, there is one empty message: a model server always returns at
least one, and verifiers read the last item. An agent program has the tools through MCP, under a name such as
`mcp__environment__NAME`; verifiers get NAME.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import islice

from rollyard.core import Json, Message, Trajectory
from rollyard.core.failure import ContextLimit, TokenLimit
from rollyard.core.texts import content_text
from rollyard.envs.gym.row import GymData, params_of

_CUT_OFF = (TokenLimit.code, ContextLimit.code)


def response_of(data: GymData, trajectory: Trajectory) -> dict[str, Json]:
    """The Responses object of a task's trajectory."""
    params = params_of(data.row) or {}
    is_program = "gateway" in trajectory.info
    names = [tool.name for tool in data.tools] if is_program else []
    output = _items(_after(data.messages, trajectory.messages), trajectory.rollout_id, names)
    answer, last = trajectory.info.get("answer"), output[-1] if output else {}
    last_content = last.get("content") if last.get("role") == "assistant" else None
    if isinstance(answer, str) and last_content != _parts(answer):
        output.append(_message(answer, trajectory.rollout_id, len(output)))
    elif not output:
        output.append(_message("", trajectory.rollout_id, 0))
    is_cut_off = trajectory.ended_by in _CUT_OFF
    return {
        "id": f"resp_{trajectory.rollout_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut_off else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
        "instructions": params.get("instructions"),
        "model": params.get("model") or "policy",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": params.get("tools") or [],
        "usage": _usage(trajectory),
    }


def _after(input_messages: Sequence[Message], messages: Sequence[Message]) -> Sequence[Message]:
    """The messages from the agent's first one on. An agent may add its own system prompt before the input, or join
    parts of the input, but it cannot remove an assistant turn."""
    earlier = sum(message.get("role") == "assistant" for message in input_messages)
    places = (index for index, message in enumerate(messages) if message.get("role") == "assistant")
    first = next(islice(places, earlier, None), len(messages))
    return messages[first:]


def _items(messages: Sequence[Message], name: str, tools: Sequence[str]) -> list[dict[str, Json]]:
    items: list[dict[str, Json]] = []
    unread: set[str] = set()
    for message in messages:
        role, text, calls = message.get("role"), content_text(message.get("content")), message.get("tool_calls")
        if role == "tool":
            call_id = str(message.get("tool_call_id", ""))
            if call_id in unread:
                items.append({"type": "message", "role": "user", "content": text})
            else:
                items.append({"type": "function_call_output", "call_id": call_id, "output": text})
            continue
        if role != "assistant":
            items.append({"type": "message", "role": role, "content": text})
            continue
        if reasoning := content_text(message.get("reasoning_content")):
            content: Json = [{"type": "reasoning_text", "text": reasoning}]
            items.append({"type": "reasoning", "id": f"rs_{name}_{len(items)}", "summary": [], "content": content})
        if text or not calls:
            items.append(_message(text, name, len(items)))
        for call in calls if isinstance(calls, Sequence) else ():
            call_id, called, arguments = _called(call)
            tool = max((known for known in tools if f"__{called}".endswith(f"__{known}")), key=len, default=called)
            if _is_object(arguments):
                item: dict[str, Json] = {"type": "function_call", "id": f"fc_{name}_{len(items)}", "call_id": call_id}
                items.append({**item, "name": tool, "arguments": arguments, "status": "completed"})
            else:
                unread.add(call_id)
                items.append(_message(f"{tool}: {arguments}", name, len(items)))
    return items


def _message(text: str, name: str, index: int) -> dict[str, Json]:
    head: dict[str, Json] = {"type": "message", "id": f"msg_{name}_{index}", "role": "assistant"}
    return {**head, "status": "completed", "content": _parts(text)}


def _parts(text: str) -> list[dict[str, Json]]:
    return [{"type": "output_text", "text": text, "annotations": []}]


def _called(call: Json) -> tuple[str, str, str]:
    """The id, tool and arguments of a call in Chat Completions format."""
    assert isinstance(call, Mapping)
    function = call.get("function")
    assert isinstance(function, Mapping)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return str(call.get("id", "")), str(function.get("name", "")), text


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _usage(trajectory: Trajectory) -> Json:
    """None if nothing was sampled, or tokens were not counted."""
    if not trajectory.traces:
        return None
    total, sampled = sum(len(trace) for trace in trajectory.traces), trajectory.sampled_tokens
    return {
        "input_tokens": total - sampled,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": total,
    }
