"""Reads samples of Inspect's logs (JSON), and conversations in the OpenAI shape with few other fields.

Inspect's own logs are archives (.eval); `inspect log dump` prints them as JSON. Used of a sample: id, epoch, messages,
target, scores, error and metadata. `C` and `I`, its marks for right and wrong, are the rewards 1 and 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rollyard.exports.records import JsonObject, record_from_messages, require

MARKS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}


def is_inspect_log(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("samples"), list) and isinstance(value.get("eval"), dict)


def from_inspect(log: Mapping[str, Any]) -> Iterator[JsonObject]:
    """Yields the records of a log's samples."""
    run = str(log["eval"].get("task") or "inspect")
    for number, sample in enumerate(log["samples"]):
        try:
            yield from_chat(require(sample, dict, "sample"), run=run)
        except ValueError as error:
            raise ValueError(f"samples[{number}]: {error}") from error


def from_chat(sample: Mapping[str, Any], *, run: str | None = None) -> JsonObject:
    """The record of a sample or a conversation."""
    given = require(sample.get("messages"), list, "messages")
    messages = [_message(message, f"messages[{number}]") for number, message in enumerate(given)]
    id, epoch = sample.get("id"), sample.get("epoch")
    if id is not None and isinstance(epoch, int) and epoch > 1:
        id = f"{id}-{epoch}"
    scores = sample.get("scores")
    values = {str(name): _value(score) for name, score in scores.items()} if isinstance(scores, dict) else {}
    components = {name: value for name, value in values.items() if value is not None}
    reward = _value(sample.get("reward", sample.get("score")))
    if reward is None and components:
        reward = next(iter(components.values()))
    error = sample.get("error")
    words = error.get("message") if isinstance(error, dict) else error
    data = {name: sample[name] for name in ("input", "target", "metadata") if sample.get(name) not in (None, {}, "")}
    if isinstance(sample.get("input"), str):
        data["instruction"] = sample["input"]
    record = record_from_messages(
        messages,
        id=str(id) if id is not None else None,
        run=run or sample.get("run"),
        reward=reward,
        tools=[tool for tool in sample.get("tools") or () if isinstance(tool, dict)],
        score={"reward": reward, "components": components, "metrics": {}} if reward is not None else None,
        failure={"code": "error", "detail": str(words)[:2000], "blame": "infra"} if words else None,
        data=data or None,
    )
    record["trajectory"]["info"] = {"evidence": _evidence(scores)} if isinstance(scores, dict) else {}
    return record


def _evidence(scores: Mapping[str, Any]) -> list[JsonObject]:
    """What the scorers wrote, as the environments of Rollyard store it."""
    found: list[JsonObject] = []
    for name, score in scores.items():
        text = score.get("explanation") if isinstance(score, dict) else None
        if isinstance(text, str) and text:
            found.append({"kind": "judge", "name": str(name), "text": text[:16_384], "passed": None})
    return found[:32]


def _value(score: Any) -> float | None:
    value = score.get("value") if isinstance(score, dict) else score
    if isinstance(value, str):
        return MARKS.get(value)
    return float(value) if isinstance(value, bool | int | float) else None


def _message(message: Any, where: str) -> JsonObject:
    message = require(message, dict, where)
    role = require(message.get("role"), str, f"{where}.role")
    content, reasoning = _content(message.get("content"))
    made: JsonObject = {"role": role, "content": content}
    if reasoning := message.get("reasoning_content") or message.get("reasoning") or reasoning:
        made["reasoning_content"] = str(reasoning)
    calls = require(message.get("tool_calls") or [], list, f"{where}.tool_calls")
    if calls:
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    name = message.get("name") or (message.get("function") if role == "tool" else None)
    if isinstance(name, str):
        made["name"] = name
    if message.get("tool_call_id") is not None:
        made["tool_call_id"] = str(message["tool_call_id"])
    return made


def _call(call: Any, where: str) -> JsonObject:
    call = require(call, dict, where)
    inner = call.get("function")
    name = inner.get("name") if isinstance(inner, dict) else inner
    given = inner.get("arguments") if isinstance(inner, dict) else call.get("arguments")
    arguments = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    function = {"name": str(name or ""), "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}


def _content(content: Any) -> tuple[str, str]:
    """The text of a content, and the reasoning in it."""
    if not isinstance(content, list):
        return ("" if content is None else str(content)), ""
    texts: list[str] = []
    reasoning: list[str] = []
    for part in content:
        if not isinstance(part, dict):
            texts.append(str(part))
        elif part.get("type") == "reasoning":
            reasoning.append(str(part.get("reasoning") or ""))
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            texts.append(f"[{part.get('type') or 'part'}]")
    return "\n".join(texts), "\n".join(reasoning)
