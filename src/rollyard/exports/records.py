"""Records with trajectories, made from files: complete, bounded, and in the shapes of the API.

The rollout view relies on those shapes, and files are not trusted: what does not have them is refused here, with the
place of the mistake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

JsonObject = dict[str, Any]
T = TypeVar("T")

FILE_RUN = "file"
_ID = re.compile(r"[^A-Za-z0-9._:-]+")
_NAMES = {dict: "an object", list: "a list", str: "a text"}


class _Span(msgspec.Struct):
    start: int
    end: int
    turn: int = 0
    finish_reason: str = ""
    prompt_digest: str = ""
    sampled_digest: str = ""
    engine: str = ""
    request_id: str = ""
    cached_tokens: int | None = None
    is_owned: bool = True


class _Trace(msgspec.Struct):
    token_ids: list[int]
    mask: list[int]
    versions: list[int]
    logprobs: list[float | None] | None = None
    spans: list[_Span] = []
    policy: str = ""
    model: str = ""
    logprobs_kind: str = "unknown"
    tokenizer_verified: bool = True
    trainable: bool = False
    reason: str | None = None
    fork_reason: str | None = None
    reward: float | None = None
    sampling: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    texts: list[str] | None = None


class _Message(msgspec.Struct):
    role: str
    content: Any = None
    tool_calls: list[dict[str, Any]] | None = None


class _Trajectory(msgspec.Struct):
    traces: list[_Trace] = []
    messages: list[_Message] = []
    tools: list[dict[str, Any]] = []
    artifacts: list[dict[str, Any]] = []
    info: dict[str, Any] = {}
    attempt: int = 1
    turns: int = 0
    ended_by: str = ""


class _Record(msgspec.Struct):
    """A record as a file has it. Fields that are not listed are kept unchecked."""

    id: str
    run: str = FILE_RUN
    group: str | None = None
    index: int = 0
    state: str = "ended"
    attempt: int = 1
    priority: int = 0
    outcome: str | None = None
    reward: float | None = None
    trainable: bool = False
    score: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    lost: list[dict[str, Any]] = []
    scores: list[dict[str, Any]] = []
    created_at: float | None = None
    updated_at: float | None = None
    task: dict[str, Any] = {}
    trajectory: _Trajectory | None = None


def require(value: Any, kind: type[T], where: str) -> T:
    """Returns the value. Raises `ValueError` if it is of another type."""
    if not isinstance(value, kind):
        raise ValueError(f"{where}: expected {_NAMES.get(kind, kind.__name__)}")
    return value


def complete(value: Mapping[str, Any]) -> JsonObject:
    """Returns a record with all its fields. Raises `ValueError` with the path of the first wrong one."""
    given = {**value, "id": safe_id(value.get("id"), "rollout"), "run": safe_id(value.get("run"), FILE_RUN)}
    if given.get("group") is not None:
        given["group"] = safe_id(given["group"], "group")
    try:
        record = msgspec.convert(given, _Record)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("$.", "")) from error
    for index, trace in enumerate(record.trajectory.traces if record.trajectory else ()):
        _check(trace, f"trajectory.traces[{index}]")
    defaults = msgspec.to_builtins(record)
    if record.trajectory is None:
        return {**given, **defaults, "trajectory": None}
    parts: JsonObject = given["trajectory"]
    traces = [
        _filled(old, new) for old, new in zip(parts.get("traces") or (), defaults["trajectory"]["traces"], strict=True)
    ]
    messages = list(parts.get("messages") or ())  # with fields that are not listed
    return {
        **given,
        **defaults,
        "trajectory": {**parts, **defaults["trajectory"], "traces": traces, "messages": messages},
    }


def _filled(old: JsonObject, new: JsonObject) -> JsonObject:
    merged = {**old, **new}
    if merged["texts"] is None:
        del merged["texts"]
    return merged


def _check(trace: _Trace, where: str) -> None:
    length = len(trace.token_ids)
    for name in ("mask", "versions", "logprobs", "texts"):
        column = getattr(trace, name)
        if column is not None and len(column) != length:
            raise ValueError(f"{where}.{name}: {len(column)} values for {length} tokens")
    for number, span in enumerate(trace.spans):
        if not 0 <= span.start <= span.end <= length:
            raise ValueError(f"{where}.spans[{number}]: {span.start} to {span.end} is not within {length} tokens")


def safe_id(value: Any, default: str) -> str:
    """Returns an id as the service allows them."""
    text = _ID.sub("_", str(value)[:120]).lstrip("._:-") if isinstance(value, str | int) else ""
    return text or default


def record_from_messages(
    messages: list[JsonObject],
    *,
    id: Any = None,
    run: Any = None,
    reward: float | None = None,
    tools: list[JsonObject] | None = None,
    traces: list[JsonObject] | None = None,
    agent: str = "",
    score: JsonObject | None = None,
    failure: JsonObject | None = None,
    data: JsonObject | None = None,
) -> JsonObject:
    """A record of a conversation that another program wrote."""
    turns = sum(message.get("role") == "assistant" for message in messages)
    first = next((message.get("content") for message in messages if message.get("role") == "user"), "")
    sampled = sum(sum(trace["mask"]) for trace in traces or ())
    return {
        "id": id,
        "run": run,
        "outcome": "failed" if failure else "completed",
        "reward": reward,
        "score": score or (None if reward is None else {"reward": reward, "components": {}, "metrics": {}}),
        "failure": failure,
        "summary": {"turns": turns, "sampled_tokens": sampled or None, "traces": len(traces or ())},
        "task": {"environment": "", "data": data or {"instruction": first if isinstance(first, str) else ""},
                 "agent": {"name": agent, "options": {}}},
        "trajectory": {"messages": messages, "tools": tools or [], "traces": traces or [], "turns": turns},
    }  # fmt: skip
