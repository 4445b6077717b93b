"""Reads ATIF trajectories of any version: each becomes a record with a trajectory, as the API returns them.

A file that `rollyard.exports.atif` wrote gives the same record and traces again. Of others, the traces are rebuilt from
the token ids of the steps: a step whose prompt continues the trace before it extends it, any other starts a new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rollyard.exports.records import JsonObject, record_from_messages, require

ROLES = {"system": "system", "user": "user", "agent": "assistant"}
DEEPEST = 8  # levels of trajectories of subagents


def is_atif(value: Mapping[str, Any]) -> bool:
    return str(value.get("schema_version", "")).startswith("ATIF-")


def from_atif(value: Mapping[str, Any], depth: int = 0) -> Iterator[JsonObject]:
    """Yields the record of a trajectory, then those of its subagents. Raises `ValueError` if it is not one."""
    agent = require(value.get("agent"), dict, "agent")
    steps = require(value.get("steps"), list, "steps")
    messages: list[JsonObject] = []
    for number, step in enumerate(steps):
        messages += _messages(require(step, dict, f"steps[{number}]"), f"steps[{number}]")
    saved: JsonObject = (value.get("extra") or {}).get("rollyard") or {}
    extra: JsonObject = (value.get("final_metrics") or {}).get("extra") or {}
    reward = extra.get("reward")
    record = record_from_messages(
        messages,
        id=value.get("trajectory_id") or value.get("session_id"),
        run=value.get("session_id") if value.get("trajectory_id") else None,
        reward=reward if isinstance(reward, int | float) and not isinstance(reward, bool) else None,
        tools=agent.get("tool_definitions") or [],
        traces=_traces(steps, str(agent.get("model_name") or "")),
        agent=str(agent.get("name") or ""),
    )
    if saved:
        trajectory = {**record["trajectory"], **require(saved.get("trajectory"), dict, "extra.rollyard.trajectory")}
        record = {**record, **require(saved.get("record"), dict, "extra.rollyard.record"), "trajectory": trajectory}
    yield record
    if depth < DEEPEST:
        for number, other in enumerate(value.get("subagent_trajectories") or ()):
            yield from from_atif(require(other, dict, f"subagent_trajectories[{number}]"), depth + 1)


def _messages(step: Mapping[str, Any], where: str) -> Iterator[JsonObject]:
    """Yields a step's message, then the results of its calls."""
    role = ROLES.get(str(step.get("source")))
    if role is None:
        raise ValueError(f"{where}.source: expected system, user or agent")
    message: JsonObject = {"role": role, "content": _content(step.get("message"))}
    if step.get("reasoning_content"):
        message["reasoning_content"] = str(step["reasoning_content"])
    names: dict[str, str] = {}
    calls: list[JsonObject] = []
    for number, call in enumerate(require(step.get("tool_calls") or [], list, f"{where}.tool_calls")):
        call = require(call, dict, f"{where}.tool_calls[{number}]")
        id, name = str(call.get("tool_call_id") or ""), str(call.get("function_name") or "")
        names[id] = name
        given = (call.get("extra") or {}).get("arguments", call.get("arguments"))
        arguments = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
    if calls:
        message["tool_calls"] = calls
    results = require((step.get("observation") or {}).get("results") or [], list, f"{where}.observation.results")
    if message["content"] or calls or role != "system" or not results:
        yield message
    for number, result in enumerate(results):
        result = require(result, dict, f"{where}.observation.results[{number}]")
        id = str(result.get("source_call_id") or (result.get("extra") or {}).get("tool_call_id") or "")
        tool: JsonObject = {"role": "tool", "tool_call_id": id, "content": _content(result.get("content"))}
        if name := names.get(id) or (result.get("extra") or {}).get("name"):
            tool["name"] = str(name)
        yield tool


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return "" if content is None else str(content)


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    source = part.get("source") if isinstance(part, dict) else None
    return f"[{part.get('type')}: {source.get('path')}]" if isinstance(source, dict) else str(part)


def _traces(steps: list[Any], model: str) -> list[JsonObject]:
    traces: list[JsonObject] = []
    turn = 0
    for number, step in enumerate(steps):
        if step.get("source") != "agent":
            continue
        turn += 1
        metrics: Mapping[str, Any] = require(step.get("metrics") or {}, dict, f"steps[{number}].metrics")
        sampled = _ids(metrics.get("completion_token_ids"), f"steps[{number}].metrics.completion_token_ids")
        prompt = _ids(metrics.get("prompt_token_ids"), f"steps[{number}].metrics.prompt_token_ids")
        if not sampled or prompt is None:
            continue
        logprobs = metrics.get("logprobs")
        if logprobs is not None and (not isinstance(logprobs, list) or len(logprobs) != len(sampled)):
            raise ValueError(f"steps[{number}].metrics.logprobs: expected one number for each completion token")
        trace = traces[-1] if traces else None
        if trace is None or prompt[: len(trace["token_ids"])] != trace["token_ids"]:
            trace = _new_trace(model, None if trace is None else "the prompt does not continue the one before it")
            traces.append(trace)
        given = prompt[len(trace["token_ids"]) :]
        start = len(prompt)
        trace["token_ids"] += given + sampled
        trace["mask"] += [0] * len(given) + [1] * len(sampled)
        trace["versions"] += [-1] * (len(given) + len(sampled))
        if logprobs is None or trace["logprobs"] is None:
            trace["logprobs"] = None
        else:
            trace["logprobs"] += [0.0] * len(given) + logprobs
        trace["spans"].append(
            {"start": start, "end": start + len(sampled), "turn": turn - 1, "finish_reason": "", "prompt_digest": "",
             "sampled_digest": "", "engine": "", "request_id": "", "cached_tokens": metrics.get("cached_tokens"),
             "is_owned": True}
        )  # fmt: skip
    return traces


def _ids(value: Any, where: str) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError(f"{where}: expected a list of integers")
    return value


def _new_trace(model: str, fork_reason: str | None) -> JsonObject:
    return {
        "model": model,
        "fork_reason": fork_reason,
        "token_ids": list[int](),
        "mask": list[int](),
        "logprobs": list[float](),
        "versions": list[int](),
        "spans": list[JsonObject](),
    }
