"""All evaluations of a service: creates them once per id, returns, awaits, cancels and resumes them.

An evaluation has a run of its own, of mode eval, so that its rollouts are never trained on. The run has its own
priority, and a quota that is its share of the RUN slots. Its tasks are read, checked and copied before it starts, like
a draw's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from rollyard.core import Group, Json, Mode, Run, Task, id_of
from rollyard.core.draw import SourceSpec
from rollyard.core.failure import IdConflict, InvalidRequest, NotFound
from rollyard.core.texts import differences
from rollyard.pipeline import Pipeline
from rollyard.sampling.eval_runner import RUNNING, EvalRunner
from rollyard.sampling.evaluation import label_of
from rollyard.sampling.groups import Groups
from rollyard.sampling.notifier import Notifier
from rollyard.sampling.open_group import check_members
from rollyard.sampling.sources import RawTask, copy_source, creating
from rollyard.store.base import EvalRecord, eval_items

log = logging.getLogger("rollyard.sampling")

MOST_SAMPLES = 1_000_000
"""Limit on tasks × samples: at the end all samples that ran are in memory, about 0.3 KB each."""

MOST_LABELS = 256
"""Limit on values of `by`: each has its own figures in the result."""

MOST_FIGURES = 16_384
"""Limit on k × values of `by`: so many pass@k, of about 100 bytes each, are stored and returned with the result."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """An evaluation as a client requested it."""

    id: str
    run: str
    owner: str
    policy: str
    source: SourceSpec
    k: int
    samples: int
    threshold: float = 1.0
    priority: int = 10
    pool_share: float = 0.25
    max_missing: float = 0.05
    on_update: str = "hold"
    seed: int = 0
    by: str | None = None
    defaults: Mapping[str, Json] = field(default_factory=dict[str, Json])


class Evals:
    """All evaluations. `own` runs a coroutine as a task until the service ends."""

    def __init__(
        self,
        pipeline: Pipeline,
        groups: Groups,
        *,
        make_task: Callable[[RawTask, Run], Task],
        folders: Sequence[Path],
        own: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self.notifier = Notifier()  # by evaluation: it has ended
        self._pipeline = pipeline
        self._store = pipeline.store
        self._groups = groups
        self._make_task = make_task
        self._folders = folders
        self._own = own
        self._runners: dict[str, EvalRunner] = {}
        self._makings: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        groups.on_over.append(self._group_over)

    async def load(self, groups: Sequence[Group]) -> None:
        """Resumes the evaluations that an earlier process left. `groups` are all open groups that belong to no draw."""
        open_groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for group in groups:
            open_groups[group.run, group.id.rpartition(".")[0]].append(group.id)
        for record in await self._store.list_evals():
            group_ids = open_groups.get((record.run, record.id), [])
            run = self._pipeline.run_of(record.run)
            if record.state == RUNNING and run is not None:
                self._keep(record, run).load(group_ids)
            else:
                for group_id in group_ids:
                    await self._groups.cancel(group_id)

    async def create(self, plan: EvalPlan, tasks: Sequence[RawTask], body: Mapping[str, Json]) -> EvalRecord:
        """Creates an evaluation, or returns the one created earlier with the same body."""
        lock = self._makings.setdefault(plan.id, asyncio.Lock())  # of two concurrent calls, the second finds the record
        async with lock:
            with suppress(NotFound):
                known = await self._store.get_eval(plan.id)
                try:
                    return await self._store.put_eval(known, body)
                except IdConflict as error:
                    raise _conflict(plan, known) from error
            return await self._make(plan, tasks, body)

    async def _make(self, plan: EvalPlan, tasks: Sequence[RawTask], body: Mapping[str, Json]) -> EvalRecord:
        if plan.samples > self._pipeline.settings.max_queued:
            raise InvalidRequest(
                f"samples: the queue holds {self._pipeline.settings.max_queued} rollouts, not that many"
            )
        _check_samples(len(tasks), plan.samples)
        if self._pipeline.run_of(plan.run) is not None:
            try:
                await self._store.put_run(Run(plan.run), {**body, "eval": plan.id})
            except IdConflict as error:
                what = f"run {plan.run!r} already exists, and does not belong to this evaluation"
                raise IdConflict(what, remedy="Use another name.") from error
        now = time.time()
        run = Run(
            plan.run,
            Mode.EVAL,
            policy=plan.policy,
            defaults=plan.defaults,
            seed=plan.seed,
            priority=plan.priority,
            max_live=max(1, round(plan.pool_share * self._pipeline.run_pool.size)),
            created_at=now,
            owner=plan.owner,
        )
        labels, numbers = set[str](), count(1)

        def check(raw: RawTask) -> None:
            _check_samples(next(numbers), plan.samples)
            task = self._make_task(raw, run)
            check_members(task, plan.samples)
            if plan.by is not None:
                labels.add(label_of(task.data, plan.by))
                if len(labels) > MOST_LABELS:
                    raise InvalidRequest(f"by: {plan.by!r} has more than {MOST_LABELS} values")
                if len(labels) * plan.k > MOST_FIGURES:
                    raise InvalidRequest(
                        f"by: with pass@1 to pass@{plan.k}, at most {MOST_FIGURES // plan.k} values of {plan.by!r} can"
                        " be reported, and there are more",
                        remedy="Use a smaller k (samples may be larger), or another key.",
                    )

        async with creating(self._store, eval_items(plan.id)):
            source = await copy_source(
                plan.source,
                tasks,
                draw_id=eval_items(plan.id),
                store=self._store,
                environments=self._pipeline.resources.environments,
                folders=self._folders,
                check=check,
            )
            assert source.size is not None
            record = EvalRecord(
                id=plan.id,
                run=plan.run,
                policy=plan.policy,
                version=-1,
                k=plan.k,
                samples=plan.samples,
                tasks=source.size,
                threshold=plan.threshold,
                max_missing=plan.max_missing,
                on_update=plan.on_update,
                seed=plan.seed,
                created_at=now,
                data={"priority": plan.priority, "pool_share": plan.pool_share, "by": plan.by, "begun": 0},
            )
            run = await self._store.put_run(run, {**body, "eval": plan.id})
            self._pipeline.register_run(run)
            record = await self._store.put_eval(record, body)
        self._keep(record, run)
        return record

    def done(self, record: EvalRecord) -> int:
        """Samples that have ended."""
        runner = self._runners.get(record.id)
        stored = record.data.get("done", 0)
        return (
            runner.done if runner is not None and record.state == RUNNING else stored if isinstance(stored, int) else 0
        )

    async def wait(self, eval_id: str, within_s: float) -> EvalRecord:
        """Returns the record when the evaluation has ended or `within_s` is over."""
        look = partial(self._store.get_eval, eval_id)
        return await self.notifier.until(eval_id, look, lambda record: record.state != RUNNING, within_s)

    async def cancel(self, eval_id: str) -> EvalRecord:
        """Ends the evaluation, unless it has ended."""
        runner = self._runners.get(eval_id)
        if runner is not None:
            await runner.cancel()
        return await self._store.get_eval(eval_id)

    async def close_run(self, run_id: str) -> None:
        """Ends the evaluations of a run that is about to be deleted."""
        for runner in [runner for runner in self._runners.values() if runner.record.run == run_id]:
            await runner.cancel("its run was deleted")
            await runner.over.wait()

    def versioned(self, policy: str) -> None:
        """Called when the policy's version was set."""
        for runner in self._runners.values():
            if runner.record.policy == policy:
                runner.wake()

    def _keep(self, record: EvalRecord, run: Run) -> EvalRunner:
        runner = EvalRunner(
            self._pipeline, self._groups, self.notifier, record, run, lambda raw: self._make_task(raw, run)
        )
        self._runners[record.id] = runner
        self._own(self._run_to_end(runner), f"evaluation {record.id}")
        return runner

    async def _run_to_end(self, runner: EvalRunner) -> None:
        await runner.main()
        del self._runners[runner.record.id]

    def _group_over(self, group_id: str) -> None:
        runner = self._runners.get(group_id.rpartition(".")[0])
        if runner is not None:
            runner.group_over(group_id)


def _check_samples(tasks: int, samples: int) -> None:
    if tasks * samples > MOST_SAMPLES:
        raise InvalidRequest(
            f"an evaluation has at most {MOST_SAMPLES:,} samples: with {samples:,} of each task, that is"
            f" {MOST_SAMPLES // samples:,} tasks, and there are more",
            remedy="Take fewer samples of each task, or divide the tasks among several evaluations.",
        )


def _conflict(plan: EvalPlan, known: EvalRecord) -> IdConflict:
    """The error of a call that differs from the one which created the evaluation."""
    given: dict[str, Json] = {"priority": plan.priority, "pool_share": plan.pool_share, "by": plan.by}
    changes = differences(
        {**_comparable(known), **{name: known.data.get(name) for name in given}}, {**_comparable(plan), **given}
    )
    return IdConflict(
        f"evaluation {id_of(plan.id)!r} already exists, with other settings: {changes or 'tasks or defaults differ'}",
        remedy="Use another name, or repeat the call that created it.",
    )


def _comparable(one: EvalPlan | EvalRecord) -> dict[str, Json]:
    return {
        "policy": one.policy,
        "k": one.k,
        "samples": one.samples,
        "threshold": one.threshold,
        "max_missing": one.max_missing,
        "on_update": one.on_update,
        "seed": one.seed,
    }
