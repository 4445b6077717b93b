"""The tasks of an evaluation, one by one: how often each was solved. Made from its stored rollouts, also while it runs.

A sample counts as in the evaluation's result (`evaluation.placed`). A task whose rollouts have not started, or were
deleted by retention, has no samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollyard.core import Json, Rollout, id_of
from rollyard.core.task import name_of
from rollyard.sampling.evaluation import NOT_STARTED, label_of, placed, sample_of
from rollyard.store.base import EvalRecord, Store

PAGE = 500
"""Rollouts read at once: about 20 ms, in the store's threads."""


@dataclass(frozen=True, slots=True)
class EvalTask:
    """A task of an evaluation. `by` has its environment, and its value of the field that the evaluation names."""

    index: int
    group: str
    name: str
    by: Mapping[str, Json]
    samples: int  # with a reward
    passes: int
    mean_reward: float | None
    missing: int


async def tasks_of(store: Store, record: EvalRecord) -> list[EvalTask]:
    """Returns all tasks of an evaluation that have rollouts, in order."""
    rollouts: dict[int, list[Rollout]] = {}
    after: str | None = None
    prefix = f"{record.id}."
    while True:
        page = await store.list(runs=[record.run], after=after, limit=PAGE)
        for rollout in page.rollouts:
            number = (rollout.group or "").removeprefix(prefix)
            if number != rollout.group and number.isdigit() and rollout.id == f"{rollout.group}-{rollout.index}":
                rollouts.setdefault(int(number), []).append(rollout)
        after = page.next_cursor
        if after is None:
            return [_task(record, index, rollouts[index]) for index in sorted(rollouts)]


def _task(record: EvalRecord, index: int, rollouts: list[Rollout]) -> EvalTask:
    task, by = rollouts[0].task, record.data.get("by")
    found = placed((sample_of(one, NOT_STARTED) for one in rollouts), record.samples, record.version)
    labels: dict[str, Json] = {"environment": task.environment}
    if isinstance(by, str):
        labels[by] = label_of(task.data, by)
    rewards = found.rewards
    return EvalTask(
        index=index,
        group=id_of(f"{record.id}.{index}"),
        name=name_of(task),
        by=labels,
        samples=len(rewards),
        passes=found.correct(record.threshold),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        missing=record.samples - len(rewards),
    )
