"""Converts rows of NeMo Gym's datasets to tasks, and trajectories to result rows.

A row with a Rollyard task, `"rollyard_task": {"environment": …, "data": …}`, becomes that task. Any other row becomes a
task of the environment `gym`, in which a Gym resources server seeds, offers its tools, and verifies. The trainer's
sampling parameters (`responses_create_params`) apply to both.

Result rows. A rollout with a reward becomes a good row with its true reward; if it must not be trained on (`run_s` ran
out, an engine without logprobs), its items have no tokens and `mask_sample` is true. Everything else becomes a failure
row: `_ng_failure_class` is Rollyard's stable code, `_ng_failure_message` the detail, `reward` is 0.0 and has no
meaning, and no item has tokens. `_ng_failure_terminal`: another attempt would end in the same way. `_ng_no_persist`:
the rollout was cancelled, which counts as never tried.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from rollyard.client import Record, Trajectory
from rollyard.core import RollyardError, check_id, new_id
from rollyard.core.failure import (
    Blame,
    Draining,
    Forbidden,
    MalformedId,
    QueueFull,
    RequestError,
    TaskInvalid,
    Unauthorized,
)
from rollyard.trainers._nemo_gym_response import response_of, trained_trace

Row = Mapping[str, Any]

PARAMS = "responses_create_params"
TASK = "rollyard_task"
SERVER = "rollyard_server"  # of this row; else the agent's

COHORT = frozenset({"_ng_group_id", "_ng_group_attempt", "_ng_rollout_index"})
"""Needed by a verifier that compares the rollouts of a group; it rejects a row without them (422)."""

_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
_LATER = (QueueFull, Draining, Unauthorized, Forbidden)
"""Refusals that do not depend on the row."""


def rollout_id(row: Row, run: str) -> tuple[str, bool]:
    """Returns the rollout id of this row, and whether the trainer named it: then a repeated row is the same rollout.

    `_ng_task_index` and `_ng_rollout_index` are not names: they are the same in every epoch."""
    name = row.get("_ng_rollout_id")
    if name is None:
        return new_id("gym"), False
    attempt = row.get("_ng_attempt_index")
    # The attempt is placed where it cannot be part of a name: "3.1" is not the second attempt of "3".
    whole = f"{run}.{name}" if attempt in (None, 0) else f"{run}:{attempt}.{name}"
    try:
        return check_id(whole), True
    except MalformedId:
        return f"{run[:60]}.sha-{hashlib.sha256(whole.encode('utf-8', 'replace')).hexdigest()[:32]}", True


def task_of(row: Row, server: str) -> dict[str, Any]:
    """Returns the body of the row's task. Raises TaskInvalid if the row has none."""
    params = row.get(PARAMS)
    if not isinstance(params, Mapping):
        raise TaskInvalid(f"a row of a Gym dataset must have an object {PARAMS!r}", field=PARAMS)
    sampling = {
        sampling_name: params[gym_name]
        for gym_name, sampling_name in _SAMPLING.items()
        if params.get(gym_name) is not None
    }
    own = row.get(TASK)
    if own is None:
        chosen = row.get(SERVER) or server
        if not chosen:
            raise TaskInvalid(f"the row names no {TASK}, and no resources server is known for it", field=SERVER)
        body: dict[str, Any] = {"environment": "gym", "data": {"server": chosen, "row": bare(row)}}
    elif isinstance(own, Mapping) and own.get("environment"):
        body = dict(own)
    else:
        raise TaskInvalid(f"{TASK}: expected an object with an environment", field=TASK)
    return {**body, "sampling": {**(body.get("sampling") or {}), **sampling}} if sampling else body


def bare(row: Row) -> dict[str, Any]:
    """Returns the row as in the dataset, without the bookkeeping of Gym and Rollyard, except its place in its group."""
    return {
        key: value
        for key, value in row.items()
        if key in COHORT or (not key.startswith(("_ng_", "_rowidx")) and key != SERVER)
    }


def result(row: Row, trajectory: Trajectory) -> dict[str, Any]:
    """Returns the row with its result."""
    record = trajectory.record
    about = {"rollyard": _about(record, trajectory)}
    if record.reward is None:
        failure = record.failure or {}
        return failure_row(
            row,
            str(failure.get("code") or "no_reward"),
            str(failure.get("detail") or ""),
            is_terminal=failure.get("blame") == Blame.TASK,
            is_cancelled=record.outcome == "cancelled",
            **about,
        )
    components = (record.score or {}).get("components") or {}
    is_trained = record.trainable and trained_trace(trajectory) is not None
    return {
        **row,
        "response": response_of(row, trajectory),
        "reward": record.reward,
        "mask_sample": not is_trained,
        **({"rollyard_components": components} if components else {}),
        **about,
    }


def refused(row: Row, error: RollyardError) -> dict[str, Any]:
    """Returns a failure row for a rollout that was refused or lost."""
    is_the_rows = isinstance(error, RequestError | TaskInvalid) and not isinstance(error, _LATER)
    return failure_row(row, error.code, error.detail, is_terminal=is_the_rows or error.blame is Blame.TASK)


def failure_row(
    row: Row, code: str, detail: str, *, is_terminal: bool, is_cancelled: bool = False, **about: Any
) -> dict[str, Any]:
    result_row: dict[str, Any] = {
        **row,
        "response": _empty_response(row),
        "reward": 0.0,
        "mask_sample": True,
        "_ng_failure_class": code,
        "_ng_failure_message": detail,
        **about,
    }
    if is_terminal:  # both are either true or absent: some readers only check their presence
        result_row["_ng_failure_terminal"] = True
    if is_cancelled:
        result_row["_ng_no_persist"] = True
    return result_row


def _empty_response(row: Row) -> dict[str, Any]:
    """Returns a response without samples, which no trainer can take for a real one."""
    record = Record(id="none")
    return {**response_of(row, Trajectory(record)), "status": "failed"}


def _about(record: Record, trajectory: Trajectory) -> dict[str, Any]:
    versions = [int(trace.versions.max()) for trace in trajectory.traces if len(trace)]
    failure = record.failure or {}
    return {
        "rollout": record.id,
        "run": record.run,
        "outcome": record.outcome,
        "code": failure.get("code"),
        "attempt": record.attempt,
        "trainable": record.trainable,
        "traces": len(trajectory.traces),
        "newest_version": max(versions, default=None),
    }
