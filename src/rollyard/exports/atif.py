"""Rollouts in ATIF v1.7, Harbor's Agent Trajectory Interchange Format (RFC 0001 of Harbor).

A message of the system, the user or the model is a step; the results of a model's tool calls are the observation of its
step. Exact tokens are in the metrics of the model's steps: the ids that the engine got, the ids it returned, and their
logprobs. What ATIF has no field for is in `extra`: the record and all traces at the root, so that nothing is lost; the
weight versions, the digests and the place in the trace with each step.

Invariant: what is written passes Harbor's own validation. It forbids unknown fields, requires at least one step and
steps numbered from 1, and allows model fields only in the model's steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from rollyard.core.trace import DEMONSTRATION
from rollyard.core.version import __version__

JsonObject = dict[str, Any]

VERSION = "ATIF-v1.7"

MAX_PROMPT_IDS = 2_000_000
"""Of all steps together. Each step repeats the conversation before it, so their sum grows with the square of the turns;
beyond this number prompts are left out. The traces in the root's `extra` have every token once."""

SOURCES = {"user": "user", "assistant": "agent"}  # all other roles: system


class NoConversation(ValueError):
    """The rollout has no messages, and ATIF requires at least one step."""


def to_atif(record: Mapping[str, Any]) -> JsonObject:
    """Converts a record with its trajectory. Raises `NoConversation`."""
    trajectory: Mapping[str, Any] = record.get("trajectory") or {}
    messages: Sequence[Mapping[str, Any]] = trajectory.get("messages") or ()
    if not messages:
        raise NoConversation(f"rollout {record.get('id')} has no messages")
    traces: Sequence[Mapping[str, Any]] = trajectory.get("traces") or ()
    calls = _calls(traces, sum(message.get("role") == "assistant" for message in messages))
    steps = _steps(messages, calls, _Metrics(traces), _times(record, trajectory))
    sampled = [step["metrics"] for step in steps if "metrics" in step]
    rest = {name: value for name, value in trajectory.items() if name not in ("messages", "tools")}
    extra = {"record": {name: value for name, value in record.items() if name != "trajectory"}, "trajectory": rest}
    notes: list[str] = []
    if traces and calls is None:
        notes.append("The model calls cannot be matched with the steps: their tokens are in extra.rollyard only.")
    if any("prompt_token_ids" not in metrics for metrics in sampled):
        notes.append("Prompts are left out: metrics.extra has their place in extra.rollyard.trajectory.traces.")
    agent = (record.get("task") or {}).get("agent") or {}
    return _without_none(
        schema_version=VERSION,
        session_id=str(record.get("run") or ""),
        trajectory_id=str(record.get("id") or ""),
        agent=_without_none(
            name=str(agent.get("name") or "native"),
            version=__version__,
            model_name=next((str(trace["model"]) for trace in traces if trace.get("model")), None),
            tool_definitions=list(trajectory.get("tools") or ()) or None,
            extra={"options": agent["options"]} if agent.get("options") else None,
        ),
        steps=steps,
        notes=" ".join(notes) or None,
        final_metrics=_without_none(
            total_prompt_tokens=_sum(sampled, "prompt_tokens"),
            total_completion_tokens=_sum(sampled, "completion_tokens"),
            total_cached_tokens=_sum(sampled, "cached_tokens"),
            total_steps=len(steps),
            extra={name: record.get(name) for name in ("outcome", "reward", "trainable", "score", "failure")},
        ),
        extra={"rollyard": extra},
    )


def _without_none(**fields: Any) -> JsonObject:
    return {name: value for name, value in fields.items() if value is not None}


def _sum(metrics: Sequence[JsonObject], name: str) -> int | None:
    found = [one[name] for one in metrics if name in one]
    return sum(found) if found else None


def _times(record: Mapping[str, Any], trajectory: Mapping[str, Any]) -> dict[int, float]:
    """When the model calls ended, by turn, in seconds since 1970; empty if it is not known."""
    timings: Mapping[str, Any] = record.get("timings") or {}
    if record.get("lost") or not record.get("created_at"):
        return {}
    start = float(record["created_at"]) + sum(
        float(timings.get(name) or 0) for name in ("queued_s", "init_s", "ready_s")
    )
    calls: Sequence[Any] = (trajectory.get("info") or {}).get("calls") or ()
    return {call[1]: start + call[3] for call in calls if call[0] == "model" and isinstance(call[3], int | float)}


# --- steps


def _steps(
    messages: Sequence[Mapping[str, Any]],
    calls: Sequence[_Call] | None,
    metrics: _Metrics,
    times: Mapping[int, float],
) -> list[JsonObject]:
    steps: list[JsonObject] = []
    turn = 0
    for message in messages:
        role = str(message.get("role") or "")
        if role == "tool":
            _observe(steps, message)
            continue
        step: JsonObject = {"step_id": len(steps) + 1, "source": SOURCES.get(role, "system")}
        step["message"] = _content(message.get("content"))
        known = {"role", "content", "tool_calls", "reasoning_content"}
        extra = {name: value for name, value in message.items() if name not in known and value is not None}
        if role not in ("user", "assistant", "system"):
            extra["role"] = role
        if role == "assistant":
            if reasoning := message.get("reasoning_content"):
                step["reasoning_content"] = str(reasoning)
            if tool_calls := message.get("tool_calls"):
                step["tool_calls"] = [_tool_call(item, len(steps), at) for at, item in enumerate(tool_calls)]
            if calls is not None:
                call, turn = calls[turn], turn + 1
                metrics.add(step, call)
                if (at_s := times.get(call.span.get("turn", -1))) is not None:
                    step["timestamp"] = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
        if extra:
            step["extra"] = extra
        steps.append(step)
    return steps


def _observe(steps: list[JsonObject], message: Mapping[str, Any]) -> None:
    """Adds a tool's message to the observation of the step with its call."""
    if not steps:
        steps.append({"step_id": 1, "source": "system", "message": ""})
    step = steps[-1]
    ids = {call["tool_call_id"] for call in step.get("tool_calls") or ()}
    id = message.get("tool_call_id")
    is_known = isinstance(id, str) and id in ids
    extra = {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
    if is_known:
        del extra["tool_call_id"]
    result = _without_none(
        source_call_id=id if is_known else None, content=_content(message.get("content")), extra=extra or None
    )
    step.setdefault("observation", {"results": []})["results"].append(result)


def _tool_call(item: Mapping[str, Any], step: int, at: int) -> JsonObject:
    function: Mapping[str, Any] = item.get("function") or item
    given: Any = function.get("arguments")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            pass
    is_object = isinstance(given, dict)
    return _without_none(
        tool_call_id=str(item.get("id") or f"call_{step}_{at}"),
        function_name=str(function.get("name") or ""),
        arguments=given if is_object else {},
        extra=None if is_object or given is None else {"arguments": given},  # what the model wrote is no JSON object
    )


def _content(content: Any) -> str | list[JsonObject]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    parts: list[JsonObject] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        parts.append({"type": "text", "text": text if isinstance(text, str) else json.dumps(part, ensure_ascii=False)})
    return parts


# --- tokens


class _Call:
    """A model call: its span, and the trace that owns it."""

    __slots__ = ("span", "trace")

    def __init__(self, trace: int, span: Mapping[str, Any]) -> None:
        self.trace = trace
        self.span = span


def _calls(traces: Sequence[Mapping[str, Any]], answers: int) -> list[_Call] | None:
    """The model calls of the conversation in order, one for each of its `answers`; None if they do not match.

    A rollout may have more calls than its conversation: a program that forks or compacts its history makes several
    traces, and the stored conversation is the longest one. It is then that of the trace with as many spans.
    """
    owned = {
        span["turn"]: _Call(index, span)
        for index, trace in enumerate(traces)
        for span in trace.get("spans") or ()
        if span.get("is_owned", True)
    }
    if len(owned) == answers:
        return [owned[turn] for turn in sorted(owned)]
    for trace in reversed(traces):
        turns = [span["turn"] for span in trace.get("spans") or ()]
        if len(turns) == answers and all(turn in owned for turn in turns):
            return [owned[turn] for turn in turns]
    return None


class _Metrics:
    """Adds the tokens of model calls to steps, until the prompts have `MAX_PROMPT_IDS` tokens."""

    def __init__(self, traces: Sequence[Mapping[str, Any]]) -> None:
        self._traces = traces
        self._left = MAX_PROMPT_IDS

    def add(self, step: JsonObject, call: _Call) -> None:
        trace, span = self._traces[call.trace], call.span
        if trace.get("reason") == DEMONSTRATION:
            step["llm_call_count"] = 0
            step.pop("reasoning_content", None)  # not allowed in such a step
            return
        start, end = int(span["start"]), int(span["end"])
        self._left -= start
        logprobs, versions = trace.get("logprobs"), trace.get("versions") or ()
        names = ("turn", "finish_reason", "prompt_digest", "sampled_digest", "engine", "request_id")
        extra: JsonObject = {"trace": call.trace, "start": start, "end": end}
        extra |= {name: span[name] for name in names if span.get(name) not in (None, "")}
        extra["versions"] = [[version, len(list(same))] for version, same in groupby(versions[start:end])]
        extra |= {name: trace[name] for name in ("logprobs_kind", "policy") if trace.get(name)}
        step["llm_call_count"] = 1
        step["metrics"] = _without_none(
            prompt_tokens=start,
            completion_tokens=end - start,
            cached_tokens=span.get("cached_tokens"),
            prompt_token_ids=trace["token_ids"][:start] if self._left >= 0 else None,
            completion_token_ids=trace["token_ids"][start:end],
            logprobs=None if logprobs is None else logprobs[start:end],
            extra=extra,
        )
