"""Converts a rollout's end to the result that ProRL Agent's trainer reads.

What the trainer does with a result: without `messages` it repeats the call, twice, and then uses a copy of another
trajectory, flagged as padding; with an `error` it flags the trajectory (`error_mask`); otherwise it trains on it, with
`resolved` as the reward. Therefore:

    trainable, however it ended                       error null, filter false, resolved by its reward
    scored, but not trainable (run_deadline,          error, filter true, resolved by its reward, critical_error
      no logprobs)                                      timeout or run
    no reward: infrastructure, task                   error, filter true, no messages, critical_error init, run, eval
                                                        or timeout: never a made-up 0 in the group's statistics
    cancelled                                         error, filter true, no messages, critical_error null

A turn or context limit is caused by the policy and is trained on, which ProRL Agent does not do; `finish` and
`end_properly` report it. The fields `reward` and `rollyard` (rollout id, outcome and code) are additions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollyard.core import Ending, Failure, Json, Outcome, Rollout, Timings, Trajectory, id_of
from rollyard.core.failure import EngineTimeout, EvalDeadline, RunDeadline, SetupDeadline, Stalled
from rollyard.service.prorl.messages import messages_of, trained_trace

RESOLVED_ABOVE = 0.99  # the bound of ProRL Agent

_TIMEOUTS = frozenset(it.code for it in (RunDeadline, EvalDeadline, SetupDeadline, EngineTimeout, Stalled))
_STAGES = frozenset({"init", "run", "eval"})


def result_of(
    rollout: Rollout,
    instance: Mapping[str, Json],
    trajectory: Trajectory | None,
    *,
    git_patch: str | None = None,
    with_all_input_ids: bool = False,
) -> dict[str, Any]:
    """The result of a rollout that has ended."""
    ending = rollout.ending
    assert ending is not None
    trajectory = trajectory or Trajectory(rollout.id, rollout.attempt)
    error = _error(ending, trajectory)
    is_scored = ending.score is not None
    reward = ending.score.reward if ending.score else None
    return {
        "instance_id": instance.get("instance_id"),
        "trajectory_id": instance.get("trajectory_id"),
        "git_patch": git_patch,
        "success": error is None,
        "error": error,
        "finish": trajectory.ended_by == "finish",
        "messages": messages_of(trajectory, with_all_input_ids=with_all_input_ids) if is_scored else [],
        "tools": list(trajectory.tools),
        "end_properly": trajectory.ended_by in ("finish", "stop"),
        "resolved": reward is not None and reward > RESOLVED_ABOVE,
        "critical_error": None if error is None else _critical(ending),
        "filter": error is not None,
        "timing": _timing(ending.timings, ending.failure),
        "reward": reward,
        "rollyard": {
            "rollout": id_of(rollout.id),
            "outcome": ending.outcome,
            "code": ending.failure.code if ending.failure else None,
            "attempt": rollout.attempt,
            "traces": len(trajectory.traces),
            "trace": trained_trace(trajectory),
        },
    }


def _error(ending: Ending, trajectory: Trajectory) -> str | None:
    """Why the rollout is not trainable, or None if it is."""
    failure, chosen = ending.failure, trained_trace(trajectory)
    if not ending.is_trainable and failure is not None:
        return f"{failure.code}: {failure.detail}"
    if chosen is None:
        return "no tokens were sampled, or the engine returns none"
    trace = trajectory.traces[chosen]
    if not trace.is_trainable:
        return trace.untrainable_reason or "its trace is not trainable"
    return None if ending.is_trainable else "its run is not for training"


def _critical(ending: Ending) -> str | None:
    failure = ending.failure
    if ending.outcome is Outcome.CANCELLED:
        return None
    if failure is None:
        return "run"
    if failure.code in _TIMEOUTS:
        return "timeout"
    return failure.stage if failure.stage in _STAGES else "run"


def _timing(timings: Timings, failure: Failure | None) -> dict[str, Any]:
    """Seconds of the last attempt. Only the three stages count as elapsed time."""
    counted = timings.init_s + timings.run_s + timings.eval_s
    return {
        "init_time": timings.init_s,
        "run_time": timings.run_s,
        "eval_time": timings.eval_s,
        "others_time": timings.queued_s + timings.ready_s + timings.eval_wait_s,
        "counted_elapsed": counted,
        "timeout_triggered": failure is not None and failure.code in _TIMEOUTS,
    }
