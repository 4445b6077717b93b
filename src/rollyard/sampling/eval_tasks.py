"""The tasks of an evaluation, one by one: how often each was solved. Made from its stored rollouts, also while it runs.

A sample counts as in the evaluation's result (`evaluation.placed`). A task whose rollouts have not started, or were
deleted by retention, is left out. A page reads a bounded number of rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollyard.core import Json, Rollout, id_of
from rollyard.core.loop_yield import LoopYield
from rollyard.core.task import name_of
from rollyard.sampling.eval_samples import SPARES, group_name, samples_of, started_tasks
from rollyard.sampling.evaluation import NOT_STARTED, Sample, label_of, placed
from rollyard.store.base import EvalRecord, Store

MOST_ROLLOUTS = 10_000
"""Rollouts read for one page, or those of one task: about 0.4 s, in the store's threads."""


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


async def tasks_of(store: Store, record: EvalRecord, first: int, limit: int) -> tuple[list[EvalTask], int | None]:
    """Returns those of the `limit` tasks from number `first` on that have rollouts, in order, and the number from which
    to continue; None: no other task has started."""
    tasks, loop_yield = list[EvalTask](), LoopYield()
    started = started_tasks(record)
    end = min(first + min(limit, max(1, MOST_ROLLOUTS // (record.samples + SPARES))), started)
    for index in range(first, end):
        rollout, samples = await samples_of(store, record, index, NOT_STARTED)
        if rollout is not None:
            tasks.append(_task(record, index, rollout, samples))
        await loop_yield.step()
    return tasks, end if end < started else None


def _task(record: EvalRecord, index: int, rollout: Rollout, samples: Sequence[Sample]) -> EvalTask:
    task, by = rollout.task, record.data.get("by")
    found = placed(samples, record.samples, record.version)
    labels: dict[str, Json] = {"environment": task.environment}
    if isinstance(by, str):
        labels[by] = label_of(task.data, by)
    rewards = found.rewards
    return EvalTask(
        index=index,
        group=id_of(group_name(record.id, index)),
        name=name_of(task),
        by=labels,
        samples=len(rewards),
        passes=found.correct(record.threshold),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        missing=record.samples - len(rewards),
    )
