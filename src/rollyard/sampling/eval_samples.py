"""The samples of one task of an evaluation, read from its stored rollouts.

They are read by their ids: other rollouts of the run may name any group and any index. A client's rollout may also have
the id of a spare that the group could not start for that reason.
"""

from __future__ import annotations

from rollyard.core import Rollout
from rollyard.core.failure import NotFound
from rollyard.sampling.evaluation import Sample, sample_of
from rollyard.sampling.open_group import is_of
from rollyard.store.base import EvalRecord, Store

SPARES = 1
"""Spares of each group, in addition to the attempts of each rollout."""

AT_ONCE = 500
"""Rollouts read at once: about 20 ms, in the store's threads."""


def group_name(eval_id: str, number: int) -> str:
    return f"{eval_id}.{number}"


def started_tasks(record: EvalRecord) -> int:
    """Returns the number of tasks that were started, as it was last written."""
    started = record.data.get("begun", 0)
    return min(started, record.tasks) if isinstance(started, int) else 0


async def samples_of(
    store: Store, record: EvalRecord, number: int, otherwise: str
) -> tuple[Rollout | None, list[Sample]]:
    """Returns the samples of all rollouts of a task, and one of these rollouts, if there are any. `otherwise` is the
    code of those that have not ended."""
    group, first, samples = group_name(record.id, number), None, list[Sample]()
    ids = [f"{group}-{index}" for index in range(record.samples + SPARES)]
    spares = frozenset(ids[record.samples :])
    for start in range(0, len(ids), AT_ONCE):
        for rollout in await store.get_many(ids[start : start + AT_ONCE]):
            if rollout.group == group and (rollout.id not in spares or await _is_started(store, group, rollout)):
                first = first or rollout
                samples.append(sample_of(rollout, otherwise))
    return first, samples


async def _is_started(store: Store, group: str, rollout: Rollout) -> bool:
    try:
        return is_of(await store.get_group(group), rollout)
    except NotFound:
        return False
