"""Core types as the JSON that clients get. Token columns are encoded directly from their buffers."""

from __future__ import annotations

import re
from array import array
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson
from starlette.responses import Response

from rollyard.core import Json, Rollout, Run, State, Trace, Trajectory, id_of
from rollyard.engines.pool.pool import EngineStatus
from rollyard.sandbox.layers import LayerCache
from rollyard.store.base import RunResults

ARROW = "application/vnd.apache.arrow.stream"
"""The media type of traces as Arrow, see `arrow.py`."""

JsonObject = dict[str, Any]  # input of the encoder: may contain dataclasses and token columns


def reply(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers, "application/json")


def encode(body: object) -> bytes:
    """JSON of dataclasses, mappings and token columns. Integers of any size; float32 in its shortest form."""
    return msgspec.json.encode(body, enc_hook=_column)


def _column(value: object) -> msgspec.Raw:
    if isinstance(value, array):
        import numpy as np  # 0.1 s: not when the service starts

        column: Any = np.frombuffer(value, dtype=np.dtype(value.typecode))
    else:
        raise NotImplementedError(f"{type(value).__name__} cannot be encoded as JSON")
    return msgspec.Raw(orjson.dumps(column, option=orjson.OPT_SERIALIZE_NUMPY))


def record(rollout: Rollout) -> JsonObject:
    """A rollout's record, as the API returns it."""
    ending = rollout.ending
    score = ending.score if ending else None
    return {
        "id": id_of(rollout.id),
        "run": rollout.run,
        "group": None if rollout.group is None else id_of(rollout.group),
        "index": rollout.index,
        "state": rollout.state,
        "attempt": rollout.attempt,
        "priority": rollout.priority,
        "outcome": ending.outcome if ending else None,
        "reward": score.reward if score else None,
        "trainable": ending.is_trainable if ending else False,
        "score": score,
        "failure": ending.failure if ending else None,
        "summary": ending.summary if ending else None,
        "timings": ending.timings if ending else None,
        "lost": rollout.lost,
        "scores": rollout.scores,
        "cursor": cursor(rollout),
        "created_at": rollout.created_at,
        "updated_at": rollout.updated_at,
        "task": rollout.task,
    }


def cursor(rollout: Rollout) -> str | None:
    return None if rollout.ended_seq is None else f"e:{rollout.ended_seq}"


def trajectory_object(trajectory: Trajectory, rollout: Rollout, evidence: bytes = b"") -> JsonObject:
    """`evidence` is what EVAL printed, as JSON."""
    return {
        "attempt": trajectory.attempt,
        "turns": trajectory.turns,
        "ended_by": trajectory.ended_by,
        "messages": trajectory.messages,
        "tools": trajectory.tools,
        "artifacts": trajectory.artifacts,
        "info": {**trajectory.info, "evidence": msgspec.Raw(evidence)} if evidence else trajectory.info,
        "traces": traces(trajectory, rollout),
    }


def traces(trajectory: Trajectory, rollout: Rollout) -> list[JsonObject]:
    siblings = len(trajectory.traces)
    return [
        {
            "rollout_id": id_of(trajectory.rollout_id),
            "attempt": trajectory.attempt,
            "index": index,
            "siblings": siblings,
            "policy": trace.policy,
            "model": trace.model,
            "logprobs_kind": trace.logprobs_kind,
            "tokenizer_verified": trace.is_tokenizer_verified,
            "trainable": is_trainable(trace, rollout),
            "reason": untrainable_reason(trace, rollout),
            "fork_reason": trace.fork_reason,
            "reward": reward(rollout),
            "sampling": trace.sampling,
            "token_ids": trace.token_ids,
            "mask": _numbers(trace.mask),
            "logprobs": trace.logprobs,
            "versions": trace.versions,
            "spans": trace.spans,
            "columns": {name: b64encode(data).decode() for name, data in trace.columns.items()},
        }
        for index, trace in enumerate(trajectory.traces)
    ]


def _numbers(mask: bytearray) -> array[int]:
    """The mask as an array, which `_column` encodes; msgspec would write a bytearray as base64."""
    return array("B", mask)


def reward(rollout: Rollout) -> float | None:
    ending = rollout.ending
    return ending.score.reward if ending and ending.score else None


def is_trainable(trace: Trace, rollout: Rollout) -> bool:
    """Whether both the trace and its rollout are trainable."""
    return trace.is_trainable and rollout.ending is not None and rollout.ending.is_trainable


def untrainable_reason(trace: Trace, rollout: Rollout) -> str | None:
    """Why the trace is not trainable, or None if it is."""
    if is_trainable(trace, rollout):
        return None
    if not trace.is_trainable:
        return trace.untrainable_reason or "this trace is not trainable"
    if rollout.ending is None:
        return "its rollout has not ended"
    if rollout.ending.untrainable:
        return rollout.ending.untrainable
    failure = rollout.ending.failure
    return f"its rollout ended with {failure.code}" if failure else "its run is not for training"


def run_object(run: Run) -> JsonObject:
    return {
        "id": run.id,
        "mode": run.mode,
        "policy": run.policy,
        "defaults": run.defaults,
        "seed": run.seed,
        "priority": run.priority,
        "max_live": run.max_live,
        "max_queued": run.max_queued,
        "trainable_on_deadline": run.trainable_on_deadline,
        "mask_truncated": run.mask_truncated,
        "overlong_penalty": run.overlong_penalty,
        "created_at": run.created_at,
        "state": "active",
    }


def results_object(results: RunResults) -> dict[str, Json]:
    return {
        "states": {state.value: results.states.get(state, 0) for state in State},
        "rewarded": results.rewarded,
        "mean_reward": results.mean_reward,
        "trainable": results.trainable,
        "active_at": results.active_at,
    }


def layers_object(layers: LayerCache | None) -> dict[str, Json] | None:
    """Size of the layer cache, and how many layers were made, found, failed and pruned since the start."""
    if layers is None:
        return None
    return {
        "kept": len(layers),
        "size_bytes": layers.size_bytes,
        "max_bytes": layers.max_bytes,
        "made": layers.made,
        "found": layers.found,
        "failed": layers.failed,
        "pruned": layers.pruned,
    }


def engine_object(status: EngineStatus, *, for_operator: bool) -> dict[str, Json]:
    """An engine's status, without its key and without a password in its address. Its replies to calls are quoted only
    for an operator: they may contain the prompt of another tenant."""
    spec, stats, info = status.spec, status.stats, status.info
    error = stats.last_error_words if for_operator else stats.last_error
    return {
        "id": spec.id,
        "url": without_password(spec.url),
        "is_loopback": spec.is_loopback,
        "kind": spec.kind,
        "policy": spec.policy,
        "model": info.model if info else spec.model,
        "role": spec.role,
        "tokenizer": spec.tokenizer,
        "tokenizer_verified": None if info is None else status.is_tokenizer_verified,
        "trust_tokenizer": spec.trust_tokenizer,
        "renderer": spec.renderer,
        "state": status.health,
        "version": status.version,
        "paused": status.is_paused,
        "capacity": spec.capacity,
        "admission": spec.admission,
        "cap": status.cap,
        "kv_use": status.load.kv_use if status.load else None,
        "waiting": status.load.waiting if status.load else None,
        "tokens_per_s": status.tokens_per_s,
        "sessions": stats.sessions,
        "in_flight": stats.in_flight,
        "calls": stats.calls,
        "failures": stats.failures,
        "tokens": stats.tokens,
        "cached_tokens": stats.cached_tokens,
        "last_error": without_password(error) or None,
        "info": msgspec.to_builtins(info),
    }


def without_password(text: str) -> str:
    return re.sub(r"(https?://)[^/\s]*@", r"\1", text)
