"""Records with trajectories for tests of exports, in the shapes of the API."""

from __future__ import annotations

import json
from typing import Any

TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}]


def call(id: str, arguments: str, name: str = "shell") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def span(start: int, end: int, turn: int, **fields: Any) -> dict[str, Any]:
    known = {"finish_reason": "stop", "prompt_digest": f"p{turn}", "sampled_digest": f"s{turn}", "engine": "e0"}
    return {
        "start": start,
        "end": end,
        "turn": turn,
        **known,
        "request_id": "",
        "cached_tokens": start // 2,
        "is_owned": True,
        **fields,
    }


def trace(ids: list[int], *spans: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A trace; its logprobs and versions follow from the ids."""
    mask = [0] * len(ids)
    for one in spans:
        if one["is_owned"]:
            mask[one["start"] : one["end"]] = [1] * (one["end"] - one["start"])
    return {
        "rollout_id": "one",
        "attempt": 1,
        "index": 0,
        "siblings": 1,
        "policy": "actor",
        "model": "m",
        "logprobs_kind": "processed",
        "tokenizer_verified": True,
        "trainable": True,
        "reason": None,
        "fork_reason": None,
        "reward": 0.5,
        "sampling": {"temperature": 1.0},
        "columns": {},
        "token_ids": ids,
        "mask": mask,
        "logprobs": [-id / 100 if is_sampled else 0.0 for id, is_sampled in zip(ids, mask, strict=True)],
        "versions": [7 if is_sampled else -1 for is_sampled in mask],
        "spans": list(spans),
        **fields,
    }


def rollout(id: str = "one", *, text: str = "hello", **fields: Any) -> dict[str, Any]:
    """An ended rollout of two turns with tokens; `text` is what the tool printed."""
    messages = [
        {"role": "system", "content": "You are careful."},
        {"role": "user", "content": f"Print it. {text}"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"I think. {text}",
            "tool_calls": [call("c1", json.dumps({"command": f"echo {text}"})), call("c2", '{"command": broken')],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "shell", "content": text},
        {"role": "tool", "tool_call_id": "unknown", "name": "shell", "content": "an orphan"},
        {"role": "assistant", "content": f"It printed {text}"},
    ]
    ids = list(range(10, 30))
    return {
        "id": id,
        "run": "grpo",
        "group": None,
        "index": 0,
        "state": "ended",
        "attempt": 1,
        "priority": 0,
        "outcome": "completed",
        "reward": 0.5,
        "trainable": True,
        "failure": None,
        "lost": [],
        "scores": [],
        "score": {"reward": 0.5, "components": {"check": 0.5}, "metrics": {}, "turn_rewards": []},
        "summary": {"turns": 2, "sampled_tokens": 9, "prompt_tokens": 20, "traces": 1, "ended_by": "stop"},
        "timings": {"queued_s": 1.0, "init_s": 2.0, "ready_s": 0.5, "run_s": 3.0},
        "cursor": "e:1",
        "created_at": 1795016822.5,
        "updated_at": 1795016830.0,
        "task": {"environment": "shell", "data": {"instruction": f"Print it. {text}"}, "agent": {"name": "native"}},
        "trajectory": {
            "attempt": 1,
            "turns": 2,
            "ended_by": "stop",
            "messages": messages,
            "tools": TOOLS,
            "artifacts": [],
            "info": {"calls": [["model", 0, 0.1, 0.6, "e0", 4], ["model", 1, 1.0, 1.5, "e0", 5]]},
            "traces": [trace(ids, span(5, 9, 0), span(15, 20, 1))],
        },
        **fields,
    }
