"""An ended rollout as the catalog stores it: the columns of `rollouts`, and the row as the API returns it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rollyard.core import Json, Rollout, Task, id_of
from rollyard.core.rollout import Timings
from rollyard.core.task import name_of

COLUMNS = (
    "seq", "id", "run", "environment", "agent", "policy", "outcome", "code", "blame", '"group"', "is_trainable",
    "reward", "oldest_version", "newest_version", "lag", "ended_at", "turns", "sampled_tokens", "model_s", "tool_s",
    "waiting_s", "total_s", "size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One ended rollout, its run's policy, and its encoded trajectory, if the store has one."""

    rollout: Rollout
    policy: str
    trajectory: bytes | None

    @property
    def seq(self) -> int:
        return self.rollout.ended_seq or 0

    def values(self, lag: int | None, size: int) -> tuple[object, ...]:
        """In the order of `COLUMNS`."""
        rollout, ending = self.rollout, self.rollout.ending
        if ending is None:
            raise ValueError(f"rollout {rollout.id} has not ended")
        failure, summary, timings = ending.failure, ending.summary, ending.timings
        waiting_s = timings.queued_s + timings.ready_s + timings.eval_wait_s
        return (
            self.seq,
            rollout.id,
            rollout.run,
            rollout.task.environment,
            agent_name(rollout.task),
            self.policy,
            ending.outcome.value,
            failure.code if failure else None,
            failure.blame.value if failure else None,
            None if rollout.group is None else id_of(rollout.group),
            int(ending.is_trainable),
            ending.score.reward if ending.score else None,
            summary.oldest_version,
            summary.newest_version,
            lag,
            rollout.updated_at,
            summary.turns,
            summary.sampled_tokens,
            timings.model_s,
            timings.tool_s,
            waiting_s,
            waiting_s + timings.init_s + timings.run_s + timings.eval_s,
            size,
        )

    def record(self) -> str:
        """The row, as JSON."""
        return msgspec.json.encode(row_of(self.rollout, self.policy)).decode("utf-8", "replace")


def row_of(rollout: Rollout, policy: str) -> dict[str, Json]:
    """A rollout as a row of a page of results."""
    ending = rollout.ending
    failure = ending.failure if ending else None
    summary = ending.summary if ending else None
    return {
        "id": id_of(rollout.id),
        "run": rollout.run,
        "group": None if rollout.group is None else id_of(rollout.group),
        "index": rollout.index,
        "state": rollout.state.value,
        "attempt": rollout.attempt,
        "outcome": ending.outcome.value if ending else None,
        "reward": ending.score.reward if ending and ending.score else None,
        "trainable": ending.is_trainable if ending else False,
        "code": failure.code if failure else None,
        "blame": failure.blame.value if failure else None,
        "environment": rollout.task.environment,
        "agent": agent_name(rollout.task),
        "policy": policy,
        "name": name_of(rollout.task),
        "turns": summary.turns if summary else 0,
        "sampled_tokens": summary.sampled_tokens if summary else 0,
        "prompt_tokens": summary.prompt_tokens if summary else 0,
        "oldest_version": summary.oldest_version if summary else -1,
        "newest_version": summary.newest_version if summary else -1,
        "engine": summary.engine if summary else "",
        "node": summary.node if summary else "",
        "created_at": rollout.created_at,
        "ended_at": rollout.updated_at if ending else None,
        "seconds": _seconds(ending.timings if ending else Timings()),
    }


def agent_name(task: Task) -> str:
    return task.agent.name or "native"


def _seconds(timings: Timings) -> dict[str, Json]:
    return {
        "queued": timings.queued_s,
        "init": timings.init_s,
        "ready": timings.ready_s,
        "run": timings.run_s,
        "model": timings.model_s,
        "tool": timings.tool_s,
        "eval_wait": timings.eval_wait_s,
        "eval": timings.eval_s,
    }
