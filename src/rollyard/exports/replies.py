"""The replies of the API that the rollout view reads, recorded from a service or made from a file.

The addresses are those of `js/views/rollout.js`, with the parameters of the query in alphabetical order; a test
compares them with what the view of a running service requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, quote_plus

JsonObject = dict[str, Any]

PARTS = ("timeline", "requests", "artifacts", "texts")
"""Addresses below the rollout's, each of which may be absent."""

NAME_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the API: its status and its body."""

    status: int
    body: Any


@dataclass(frozen=True, slots=True)
class Recorded:
    """A rollout: its record with its trajectory, and the recorded replies by address."""

    record: JsonObject
    replies: dict[str, Reply] = field(default_factory=dict[str, Reply])


def absent(what: str) -> Reply:
    """The reply in place of one that a file does not have."""
    return Reply(404, {"status": 404, "code": "not_exported", "detail": f"This file does not contain the {what}."})


def address(path: str, query: Mapping[str, object]) -> str:
    """An address as `js/api.js` looks it up."""
    kept = sorted((name, str(value)) for name, value in query.items() if value is not None and value != "")
    search = "&".join(f"{quote_plus(name)}={quote_plus(value)}" for name, value in kept)
    return f"{path}?{search}" if search else path


def part_paths(record: JsonObject) -> dict[str, str]:
    """The paths below /v1 of the parts of a rollout, by their names. Each takes the parameter `run`."""
    path = f"/rollouts/{quote(str(record['id']), safe='')}"
    found = {part: f"{path}/{part}" for part in PARTS}
    if record.get("group"):
        found["group"] = f"/groups/{quote(str(record['group']), safe='')}"
    return found


def recorded(record: JsonObject, parts: Mapping[str, Reply]) -> Recorded:
    """A rollout with the replies of its parts; those without one are recorded as absent."""
    path, run = f"/v1/rollouts/{quote(str(record['id']), safe='')}", str(record["run"])
    bare = {name: value for name, value in record.items() if name != "trajectory"}
    replies = {
        address(path, {"run": run}): Reply(200, bare),
        address(path, {"include": "trajectory", "run": run}): Reply(200, record),
    }
    for part, its_path in part_paths(record).items():
        replies[address(f"/v1{its_path}", {"run": run})] = parts.get(part) or absent(part)
    return Recorded(record, replies)


def from_record(record: JsonObject) -> Recorded:
    """A rollout of a file: its record, with its trajectory and the texts of its tokens if they are in it."""
    trajectory: JsonObject = record.get("trajectory") or {}
    traces: list[JsonObject] = trajectory.get("traces") or []
    parts: dict[str, Reply] = {}
    if any("texts" in trace for trace in traces):
        parts["texts"] = Reply(200, {"texts": [trace.get("texts") for trace in traces]})
        shown = [{name: value for name, value in trace.items() if name != "texts"} for trace in traces]
        record = {**record, "trajectory": {**trajectory, "traces": shown}}
    parts["artifacts"] = Reply(200, without_files({"artifacts": trajectory.get("artifacts") or []}))
    return recorded(record, parts)


def without_files(listing: JsonObject) -> JsonObject:
    """A listing of artifacts whose files are elsewhere."""
    return {**listing, "artifacts": [{**item, "available": False} for item in listing.get("artifacts") or []]}


def row(record: JsonObject) -> JsonObject:
    """A line of the list of rollouts, as GET /v1/results has it."""
    summary: JsonObject = record.get("summary") or {}
    task: JsonObject = record.get("task") or {}
    failure: JsonObject = record.get("failure") or {}
    return {
        **{name: record.get(name) for name in ("id", "run", "group", "index", "state", "attempt", "outcome", "reward")},
        "trainable": record.get("trainable") or False,
        "code": failure.get("code"),
        "blame": failure.get("blame"),
        "environment": task.get("environment") or "",
        "name": task_name(task),
        "turns": summary.get("turns"),
        "sampled_tokens": summary.get("sampled_tokens"),
        "created_at": record.get("created_at"),
        "ended_at": record.get("updated_at"),
    }


def task_name(task: Mapping[str, Any]) -> str:
    """The first of a few fields that tell tasks apart."""
    data = task.get("data")
    if not isinstance(data, Mapping):
        return ""
    for name in ("id", "name", "instance_id", "family", "instruction", "question", "prompt"):
        if isinstance(text := data.get(name), str) and text.strip():
            return " ".join(text[: 4 * NAME_CHARACTERS].split())[:NAME_CHARACTERS]
    return ""
