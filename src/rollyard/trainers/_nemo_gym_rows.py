"""Rows of NeMo Gym's datasets: as tasks of ours on the way in, as results on the way out.

A row that names a task of Rollyard's, `"rollyard_task": {"environment": …, "data": …}`, is that task. Any other is one
of the environment `gym`: a resources server of Gym's seeds, offers its tools, and verifies. What the trainer says of
sampling (`responses_create_params`) counts in both.

What a result says. A rollout with a reward is a good row, its true reward in it; if it is not to be trained on
(`run_s` ran out, an engine without logprobs), its items carry no tokens and `mask_sample` is true. Everything else is
a failure row: `_ng_failure_class` is our stable code, `_ng_failure_message` says what happened, `reward` is 0.0 beside
them and means nothing, and no item carries tokens. `_ng_failure_terminal`: another attempt would end in the same way.
`_ng_no_persist`: it was cancelled, which counts as never having been tried.
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
from rollyard.trainers._nemo_gym_response import response_of, told_trace

Row = Mapping[str, Any]

PARAMS = "responses_create_params"
TASK = "rollyard_task"
SERVER = "rollyard_server"  # of this row; else the agent's own

COHORT = frozenset({"_ng_group_id", "_ng_group_attempt", "_ng_rollout_index"})
"""What a verifier that compares the rollouts of a group tells them apart by; it refuses a row without (422)."""

_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
_LATER = (QueueFull, Draining, Unauthorized, Forbidden)
"""Refusals that have nothing to do with the row."""


def rollout_id(row: Row, run: str) -> tuple[str, bool]:
    """The rollout that this row means, and whether the trainer named it: then the same again is the same rollout.

    `_ng_task_index` and `_ng_rollout_index` name nothing: they are the same in every epoch."""
    name = row.get("_ng_rollout_id")
    if name is None:
        return new_id("gym"), False
    attempt = row.get("_ng_attempt_index")
    # The attempt stands where no name can look like it: "3.1" is not the second attempt of "3".
    whole = f"{run}.{name}" if attempt in (None, 0) else f"{run}:{attempt}.{name}"
    try:
        return check_id(whole), True
    except MalformedId:
        return f"{run[:60]}.sha-{hashlib.sha256(whole.encode('utf-8', 'replace')).hexdigest()[:32]}", True


def task_of(row: Row, server: str) -> dict[str, Any]:
    """The body of a task; TaskInvalid if there is none in it."""
    params = row.get(PARAMS)
    if not isinstance(params, Mapping):
        raise TaskInvalid(f"a row of a Gym dataset has an object {PARAMS!r}", field=PARAMS)
    sampling = {ours: params[theirs] for theirs, ours in _SAMPLING.items() if params.get(theirs) is not None}
    own = row.get(TASK)
    if own is None:
        chosen = row.get(SERVER) or server
        if not chosen:
            raise TaskInvalid(f"the row names no {TASK}, and no resources server is known for it", field=SERVER)
        body: dict[str, Any] = {"environment": "gym", "data": {"server": chosen, "row": bare(row)}}
    elif isinstance(own, Mapping) and own.get("environment"):
        body = dict(own)
    else:
        raise TaskInvalid(f"{TASK}: an object with an environment was expected", field=TASK)
    return {**body, "sampling": {**(body.get("sampling") or {}), **sampling}} if sampling else body


def bare(row: Row) -> dict[str, Any]:
    """The row without Gym's and our bookkeeping, as it stands in the dataset, and its place in its group."""
    return {
        key: value
        for key, value in row.items()
        if key in COHORT or (not key.startswith(("_ng_", "_rowidx")) and key != SERVER)
    }


def result(row: Row, trajectory: Trajectory) -> dict[str, Any]:
    """The row, with what came of it."""
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
    is_trained = record.trainable and told_trace(trajectory) is not None
    return {
        **row,
        "response": response_of(row, trajectory),
        "reward": record.reward,
        "mask_sample": not is_trained,
        **({"rollyard_components": components} if components else {}),
        **about,
    }


def refused(row: Row, error: RollyardError) -> dict[str, Any]:
    """A row that was not taken in, or of which nothing was heard any more."""
    is_the_rows = isinstance(error, RequestError | TaskInvalid) and not isinstance(error, _LATER)
    return failure_row(row, error.code, error.detail, is_terminal=is_the_rows or error.blame is Blame.TASK)


def failure_row(
    row: Row, code: str, detail: str, *, is_terminal: bool, is_cancelled: bool = False, **about: Any
) -> dict[str, Any]:
    made: dict[str, Any] = {
        **row,
        "response": _nothing(row),
        "reward": 0.0,
        "mask_sample": True,
        "_ng_failure_class": code,
        "_ng_failure_message": detail,
        **about,
    }
    if is_terminal:  # these two are there, or they are not: some read no more than that
        made["_ng_failure_terminal"] = True
    if is_cancelled:
        made["_ng_no_persist"] = True
    return made


def _nothing(row: Row) -> dict[str, Any]:
    """A response in which nothing was sampled: no trainer can take it for one."""
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
