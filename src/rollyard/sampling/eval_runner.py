"""Runs one evaluation: starts its groups a few at a time, and computes the result once, when all have ended.

There is one asyncio task per evaluation. It wakes when one of its groups has ended or its policy's version was set.
Every step is written before it takes effect: the number of groups started, the pinned version, the end. So a service
that is killed continues where it was, and a written end never changes.

Pinning. An evaluation starts while no change of weights is in progress, and from then on every token must be of that
version. With `hold`, the next change of weights waits for the evaluation's end, unless no engine can serve that version
any more (`engines.weights.version_pins`): then it continues if the change leaves the same version. With `fail`, or if
the weights change anyway, it fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from rollyard.core import Group, Json, RollyardError, Run, Task
from rollyard.core.failure import Draining, NotFound, QueueFull, QuotaExceeded
from rollyard.core.loop_yield import LoopYield
from rollyard.pipeline import Pipeline
from rollyard.sampling.eval_samples import SPARES, group_name, samples_of, started_tasks
from rollyard.sampling.evaluation import (
    NOT_STARTED,
    VERSION_CHANGED,
    Rules,
    Sample,
    TaskSamples,
    evaluated,
    label_of,
    placed,
)
from rollyard.sampling.groups import Groups, new_group
from rollyard.sampling.membership import MemberFate
from rollyard.sampling.notifier import Notifier
from rollyard.store.base import EvalRecord, StoreUnusable, eval_items

log = logging.getLogger("rollyard.sampling")

AHEAD = 1024
"""Samples that are started and have not ended, or one task's if that is more: other rollouts need the queue, too."""

AT_ONCE = 64
"""Groups started in one step."""

FULL_S = 1.0
"""Seconds between two checks of a queue that had no room."""

RUNNING = "running"

MakeTask = Callable[[Mapping[str, Json]], Task]


class EvalRunner:
    """Runs one evaluation. The notifier rings for its id at its end."""

    def __init__(
        self, pipeline: Pipeline, groups: Groups, notifier: Notifier, record: EvalRecord, run: Run, make_task: MakeTask
    ) -> None:
        self.record = record
        self.over = asyncio.Event()  # it has ended, and its running rollouts were cancelled
        self._notifier = notifier
        self._pipeline = pipeline
        self._store = pipeline.store
        self._groups = groups
        self._policies = pipeline.resources.router.policies
        self._run = run
        self._make_task = make_task
        self._open: set[str] = set()
        self._storing = 0  # groups in `_open` that are not among the started tasks yet
        self._news = asyncio.Event()
        self._lock = asyncio.Lock()
        if record.version >= 0 and self._policies.settled_version(record.policy) == record.version:
            self._pin()

    def load(self, groups: list[str]) -> None:
        """Takes over the groups that an earlier process left open."""
        self._open.update(groups)

    def wake(self) -> None:
        self._news.set()

    def group_over(self, group_id: str) -> None:
        if group_id in self._open:
            self._open.discard(group_id)
            self.wake()

    @property
    def done(self) -> int:
        """Samples that have ended, each place counted once."""
        # A process killed before it wrote `begun` left more groups open.
        over = max(0, self._started_tasks + self._storing - len(self._open))
        return over * self.record.samples + sum(map(self._ended_places, self._open))

    def _ended_places(self, group_id: str) -> int:
        opened = self._groups.opened(group_id)
        if opened is None:  # not stored yet, or no longer open
            return self.record.samples if self._groups.is_ending(group_id) else 0
        return min(self.record.samples, sum(end.fate is not MemberFate.LOST for end in opened.ends.values()))

    @property
    def _started_tasks(self) -> int:
        return started_tasks(self.record)

    async def main(self) -> None:
        """Runs until the evaluation has ended."""
        self.wake()
        while self.record.state == RUNNING:
            await self._news.wait()
            self._news.clear()
            try:
                async with self._lock:
                    if self.record.state == RUNNING:
                        await self._turn()
            except StoreUnusable:
                raise
            except Exception as error:
                log.exception("an evaluation failed unexpectedly", extra={"evaluation": self.record.id})
                async with self._lock:
                    if self.record.state == RUNNING:  # it may have been cancelled meanwhile
                        await self._end("failed", "internal_error", f"{type(error).__name__}: {error}")
        await self._cancel_groups()
        self.over.set()

    async def cancel(self, detail: str = "cancelled by the client") -> None:
        """Ends the evaluation without a result, unless it has ended. Its rollouts are cancelled soon after."""
        async with self._lock:
            if self.record.state == RUNNING:
                await self._end("cancelled", "cancelled", detail)
        self.wake()

    # --- a turn ---------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        version = self._policies.settled_version(self.record.policy)
        if self.record.version < 0:
            if version is None:
                return  # the weights are changing; `wake` is called when that is over
            await self._write(version=version, pinning=True)
        elif version not in (None, self.record.version):
            detail = f"it is pinned to version {self.record.version}, and the policy is at version {version} now"
            await self._give_up(VERSION_CHANGED, detail)
            return
        elif version is not None:
            self._pin()  # if not pinned yet: a service started in a pause cannot confirm the version at first
        self._share()
        try:
            await self._begin()
        except RollyardError as error:  # valid when it was read; since then its environment was removed, for example
            await self._give_up(error.code, error.detail)
            return
        if self._started_tasks == self.record.tasks and not self._open:
            await self._judge()

    def _pin(self) -> None:
        if self.record.on_update == "hold":
            self._policies.pins.pin(self.record.policy, self.record.id, self.record.version)

    def _share(self) -> None:
        """Adjusts the quota to the size of the RUN pool."""
        share = self.record.data.get("pool_share")
        max_live = max(1, round(self._pipeline.run_pool.size * (share if isinstance(share, int | float) else 1.0)))
        if max_live != self._run.max_live:
            self._run = replace(self._run, max_live=max_live)
            self._pipeline.register_run(self._run)

    async def _begin(self) -> None:
        record = self.record
        while self._started_tasks < record.tasks:
            room = max(AHEAD, 2 * (self._run.max_live or 0)) // record.samples - len(self._open)
            count = min(record.tasks - self._started_tasks, AT_ONCE, max(room, 0 if self._open else 1))
            if count < 1:
                return
            count = max(1, min(count, self._pipeline.room_of(record.run) // record.samples))
            numbers = range(self._started_tasks, self._started_tasks + count)
            entries = [await self._group(number) for number in numbers]
            ids = {group.id for group, _, _ in entries} - self._open
            self._open |= ids  # before the write: a group may be over as soon as it is stored
            self._storing = len(ids)
            try:
                groups = await self._groups.put(entries)
            except BaseException as error:
                self._open -= ids
                if isinstance(error, QueueFull | QuotaExceeded):
                    asyncio.get_running_loop().call_later(FULL_S, self.wake)
                    return
                if isinstance(error, Draining):
                    return  # the next process continues
                raise
            finally:
                self._storing = 0
            self._open -= {group.id for group in groups if self._groups.opened(group.id) is None}
            await self._write(started=numbers.stop)

    async def _group(self, number: int) -> tuple[Group, Task, Mapping[str, Json]]:
        record = self.record
        task = self._make_task(await self._store.get_item(eval_items(record.id), number))
        name = group_name(record.id, number)
        priority = self._run.priority
        group = new_group(name, record.run, record.samples, SPARES, 1, priority, record.version)
        return group, task, {"eval": record.id, "item": number}

    # --- the end --------------------------------------------------------------------------------------

    async def _give_up(self, reason: str, detail: str) -> None:
        """Ends the evaluation early, with the figures of what has ended."""
        # Before the cancels: samples that they end are missing for this reason.
        done, result = self.done, await self._result(reason)
        await self._cancel_groups()
        await self._end("failed", reason, detail, result, done)

    async def _judge(self) -> None:
        result = await self._result(NOT_STARTED)
        share, most = result["missing_share"], self.record.max_missing
        assert isinstance(share, float)
        if share > most:
            detail = f"{share:.1%} of the samples have no score, which is more than max_missing ({most:.1%}) allows"
            await self._end("failed", "too_many_missing", detail, result)
        else:
            await self._end("done", None, None, result)

    async def _result(self, otherwise: str) -> dict[str, Json]:
        record, tasks, loop_yield = self.record, list[TaskSamples](), LoopYield()
        by = record.data.get("by")
        empty: dict[TaskSamples, TaskSamples] = {}  # tasks without samples share one: there may be millions
        for number in range(record.tasks):
            task = await self._samples(number, by if isinstance(by, str) else None, otherwise)
            tasks.append(task if task.samples else empty.setdefault(task, task))
            await loop_yield.step()
        rules = Rules(record.k, record.samples, record.threshold, record.seed)
        return await asyncio.to_thread(evaluated, tasks, rules, has_labels=isinstance(by, str))

    async def _samples(self, number: int, by: str | None, otherwise: str) -> TaskSamples:
        record = self.record
        rollout, samples = None, list[Sample]()
        if number < self._started_tasks:
            rollout, samples = await samples_of(self._store, record, number, otherwise)
            otherwise = otherwise if samples else "forgotten"  # retention has deleted its records
        task = Task("")
        if rollout is not None:
            task = rollout.task
        else:
            with suppress(RollyardError):
                task = self._make_task(await self._store.get_item(eval_items(record.id), number))
        return placed(
            samples,
            record.samples,
            record.version,
            otherwise,
            environment=task.environment,
            label="" if by is None else label_of(task.data, by),
        )

    async def _end(
        self,
        state: str,
        reason: str | None,
        detail: str | None,
        result: Mapping[str, Json] | None = None,
        done: int | None = None,
    ) -> None:
        data = {**self.record.data, "done": self.done if done is None else done, "detail": detail}
        ended = replace(self.record, state=state, reason=reason, result=result, ended_at=time.time(), data=data)
        await self._store.put_eval(ended)
        self.record = ended
        self._policies.pins.unpin(ended.policy, ended.id)
        self._notifier.ring(ended.id)
        self.wake()

    async def _cancel_groups(self) -> None:
        for group_id in list(self._open):
            with suppress(NotFound):
                await self._groups.cancel(group_id)
            self._open.discard(group_id)

    async def _write(self, *, version: int | None = None, started: int | None = None, pinning: bool = False) -> None:
        if version is not None:
            self.record = replace(self.record, version=version)
        if pinning:
            self._pin()
        if started is not None:
            self.record = replace(self.record, data={**self.record.data, "begun": started})
        await self._store.put_eval(self.record)
