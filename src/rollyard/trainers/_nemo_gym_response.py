"""Converts a trajectory to the Responses object that NeMo Gym's trainers learn from.

Its output contains everything after the row's input: reasoning, messages, calls and their outputs, in order. The last
item of each model call holds its tokens: `prompt_token_ids`, `generation_token_ids`, `generation_log_probs`.

Invariants. An item has all three fields or no such field, and one logprob for each token. All tokens are from one
trace, so that each prompt starts with the sequence before it: of a rollout whose history was rewritten, which has
several traces, the one with the most sampled tokens is used. A trace that is not trainable is returned without tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollyard.client import Trace, Trajectory
from rollyard.core import Json, Message, Span
from rollyard.core.texts import content_text

CUT_OFF = frozenset({"token_limit", "context_limit"})

Item = dict[str, Any]


def response_of(row: Mapping[str, Any], trajectory: Trajectory) -> Item:
    """Returns the Responses object for a row and its trajectory."""
    params = row.get("responses_create_params") or {}
    record = trajectory.record
    is_cut_off = trajectory.ended_by in CUT_OFF
    trace = trained_trace(trajectory)
    return {
        "id": f"resp_{record.id}",
        "object": "response",
        "created_at": int(record.created_at),
        "status": "incomplete" if is_cut_off else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
        "instructions": params.get("instructions"),
        "model": params.get("model") or (trace.model if trace else "") or "policy",
        "output": _output(trajectory, trace),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": params.get("tools") or [],
        "usage": _usage(trajectory),
    }


def trained_trace(trajectory: Trajectory) -> Trace | None:
    """Returns the trace whose tokens are returned; None if there is no trace to learn from."""
    chosen = max(trajectory.traces, key=lambda trace: int(trace.mask.sum()), default=None)
    if chosen is None or not chosen.trainable or chosen.logprobs is None or not chosen.mask.any():
        return None
    return chosen


def _output(trajectory: Trajectory, trace: Trace | None) -> list[Item]:
    spans = {span.turn: span for span in trace.spans if span.is_owned} if trace is not None else {}
    name = trajectory.record.id
    assistants = [index for index, message in enumerate(trajectory.messages) if message.get("role") == "assistant"]
    earlier = len(assistants) - trajectory.turns  # in the row's own input
    fits = earlier >= 0 and all(0 <= turn < trajectory.turns for turn in spans)
    if not fits:  # the messages do not match the calls one to one: the tokens take precedence
        return [
            _with_tokens([_message("", name, index)], trace, span)[0]
            for index, span in enumerate(sorted(spans.values(), key=lambda it: it.start))
        ]
    items: list[Item] = []
    turn = -earlier
    for message in trajectory.messages:
        if message.get("role") == "assistant":
            turn += 1
            if turn <= 0:
                continue
            items += _with_tokens(_sampled_items(message, name, len(items)), trace, spans.get(turn - 1))
        elif turn > 0:
            items.append(_context_item(message))
    return items


def _with_tokens(items: list[Item], trace: Trace | None, span: Span | None) -> list[Item]:
    """Adds the tokens to the last item."""
    if trace is not None and trace.logprobs is not None and span is not None:
        items[-1]["prompt_token_ids"] = trace.token_ids[: span.start].tolist()
        items[-1]["generation_token_ids"] = trace.token_ids[span.start : span.end].tolist()
        items[-1]["generation_log_probs"] = trace.logprobs[span.start : span.end].tolist()
    return items


def _sampled_items(message: Message, name: str, at: int) -> list[Item]:
    """Returns the items that one call sampled: at least one."""
    items: list[Item] = []
    if reasoning := content_text(message.get("reasoning_content")):
        summary = [{"type": "summary_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{name}_{at}", "summary": summary})
    text, calls = content_text(message.get("content")), message.get("tool_calls")
    if text or not calls:
        items.append(_message(text, name, at + len(items)))
    for call in calls if isinstance(calls, Sequence) else ():
        call_id, called, arguments = _called(call)
        head: Item = {"type": "function_call", "id": f"fc_{name}_{at + len(items)}", "call_id": call_id}
        items.append({**head, "name": called, "arguments": arguments, "status": "completed"})
    return items


def _context_item(message: Message) -> Item:
    text = content_text(message.get("content"))
    if message.get("role") == "tool":
        return {"type": "function_call_output", "call_id": str(message.get("tool_call_id") or ""), "output": text}
    return {"type": "message", "role": message.get("role"), "content": text}


def _message(text: str, name: str, at: int) -> Item:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "type": "message",
        "id": f"msg_{name}_{at}",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }


def _called(call: Json) -> tuple[str, str, str]:
    """Returns the id, the tool and the arguments of a call in the chat format."""
    fields = call if isinstance(call, Mapping) else {}
    function = fields.get("function")
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return str(fields.get("id") or ""), str(function.get("name") or ""), text


def _usage(trajectory: Trajectory) -> Item | None:
    """Returns the token counts; None if there is no trace."""
    if not trajectory.traces:
        return None
    total = sum(len(trace) for trace in trajectory.traces)
    sampled = sum(int(trace.mask.sum()) for trace in trajectory.traces)
    return {
        "input_tokens": total - sampled,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": total,
    }
