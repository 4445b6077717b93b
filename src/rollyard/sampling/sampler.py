"""All groups, draws and evaluations of a service. Finds them by id, passes them every rollout's end, and resumes them
after a restart.

Opened after the pipeline and closed before it: what is running then continues in the next process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

from rollyard.core import Draw, DrawConfig, Group, GroupState, Json, Rollout, RollyardError, Run, Task
from rollyard.core.failure import InvalidRequest, NotFound
from rollyard.pipeline import Pipeline
from rollyard.sampling.draw_runner import DrawRunner
from rollyard.sampling.evals import Evals
from rollyard.sampling.filters import GroupFilter, MissingFilter, keep_of
from rollyard.sampling.groups import Groups
from rollyard.sampling.open_group import check_members
from rollyard.sampling.sources import RawTask, copy_source, creating
from rollyard.store.base import Decision, StoreUnusable, SweepResult

log = logging.getLogger("rollyard.sampling")

MOST_ENDED = 1000
"""Ended draws that stay in memory, with their figures. Others are read from the store when they are requested."""


class Sampler:
    """Groups, draws and evaluations. `make_task` makes a checked task of a run from a client's or a file's task."""

    def __init__(
        self, pipeline: Pipeline, *, make_task: Callable[[RawTask, Run], Task], folders: Sequence[Path] = ()
    ) -> None:
        self.groups = Groups(pipeline)
        self.evals = Evals(pipeline, self.groups, make_task=make_task, folders=folders, own=self._own)
        self._pipeline = pipeline
        self._store = pipeline.store
        self._router = pipeline.resources.router
        self._make_task = make_task
        self._folders = folders
        self._draws: dict[str, DrawRunner] = {}
        self._unloaded: WeakValueDictionary[str, DrawRunner] = WeakValueDictionary()  # a call may still have one
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._pipeline.on_end.append(self._ended)  # first: ends that occur while the store is read count, too
        self._pipeline.on_swept.append(self._swept)
        self._pipeline.on_deleted.append(self._forget_run)
        self._router.on_version.append(self._versioned)
        unfinished: dict[str | None, list[Group]] = defaultdict(list)
        for group in await self._store.unfinished_groups():
            unfinished[group.draw].append(group)
        for draw in await self._store.list_draws():
            if draw.is_active:
                await self._take_up(draw, unfinished.pop(draw.id, []))
        lone = [group for group in unfinished[None] if group.state is GroupState.OPEN]
        await self.groups.load(lone)
        await self.evals.load(lone)
        self._own(self.groups.main(), "groups")
        self._pipeline.cancel_later(await self._store.orphans(), "its group was given up")
        for run_id in self._pipeline.cancelling.deleting:
            self._own(self._delete_run(run_id), f"delete {run_id}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pipeline.on_end.remove(self._ended)
        self._pipeline.on_swept.remove(self._swept)
        self._pipeline.on_deleted.remove(self._forget_run)
        self._router.on_version.remove(self._versioned)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for runner in self._draws.values():
            await runner.settled()

    # --- draws ----------------------------------------------------------------------------------------

    async def create(
        self, draw_id: str, run: Run, config: DrawConfig, tasks: Sequence[RawTask], body: Mapping[str, Json]
    ) -> DrawRunner:
        """Creates a draw, after reading, checking and copying its tasks, or returns the one with the same body."""
        keep_of(config.keep)
        most, why = self._pipeline.settings.max_queued, "max_queued"
        for quota, name in (
            (self._pipeline.quota_of(run.owner).queued, "the token's quota"),
            (run.max_queued, "the run's quota"),
        ):
            if quota is not None and quota < most:
                most, why = quota, name
        if config.group_size > most:
            raise InvalidRequest(f"group_size: the queue never has room for {config.group_size} ({why} is {most})")
        async with self._making.setdefault(draw_id, asyncio.Lock()):  # two calls at once would mix their tasks
            with suppress(NotFound):
                existing = await self._store.get_draw(draw_id)
                await self._store.put_draw(existing, body)  # IdConflict if the body differs
                return await self.runner(draw_id)
            await self._store.put_items(draw_id, 0, [])  # removes what an interrupted call left

            def check(raw: RawTask) -> None:
                check_members(self._make_task(raw, run), config.group_size)

            async with creating(self._store, draw_id):
                source = await copy_source(
                    config.source,
                    tasks,
                    draw_id=draw_id,
                    store=self._store,
                    environments=self._pipeline.resources.environments,
                    folders=self._folders,
                    check=check,
                )
                now = time.time()
                draw = Draw(draw_id, run.id, replace(config, source=source), created_at=now, updated_at=now)
                draw = await self._store.put_draw(draw, body)
            return await self._load(draw, [])

    async def runner(self, draw_id: str) -> DrawRunner:
        """Returns the runner of a draw, ended or not. Raises NotFound."""
        if (runner := self._unloaded.pop(draw_id, None)) is not None:
            self._draws[draw_id] = runner
        if draw_id not in self._draws:
            draw = await self._store.get_draw(draw_id)
            if draw_id not in self._draws:
                return await self._load(draw, [])
        return self._draws[draw_id]

    def loaded(self, draw_id: str) -> DrawRunner | None:
        """Returns the runner of a draw if it is in memory, as that of every active draw is."""
        return self._draws.get(draw_id)

    def active_of(self, owner: str) -> set[str]:
        """The active draws in the runs of an owner."""
        return {key for key, runner in self._draws.items() if runner.draw.is_active and runner.run.owner == owner}

    async def rewind(self, draw_id: str, batch: int, version: int, policy_version: int | None = None) -> DrawRunner:
        runner = await self.runner(draw_id)
        keep_of(runner.draw.config.keep)
        await runner.rewind(batch, version, policy_version)
        self._keep_going(runner)
        return runner

    async def delete_run(self, run_id: str, within_s: float) -> bool:
        """Deletes a run. False if it takes longer than `within_s`: it continues, also after a restart."""
        if await self._pipeline.cancelling.begin_deletion(run_id):
            await asyncio.wait({self._own(self._delete_run(run_id), f"delete {run_id}")}, timeout=within_s)
        return run_id not in self._pipeline.cancelling.deleting

    async def _delete_run(self, run_id: str) -> None:
        await self.close_run(run_id)
        await self._pipeline.delete_run(run_id)

    async def close_run(self, run_id: str) -> None:
        """Ends all draws, evaluations and groups of a run that is about to be deleted."""
        await self.evals.close_run(run_id)
        self.groups.close_run(run_id)
        for runner in list(self._draws.values()):
            if runner.draw.run == run_id:
                await runner.close("closed", "its run was deleted")
        self._drop_draws(run_id)

    async def _forget_run(self, run: Run) -> None:
        self._drop_draws(run.id, run)  # one may have been read again during the deletion
        self.groups.notifier.ring_all()
        self.evals.notifier.ring_all()

    def _drop_draws(self, run_id: str, run: Run | None = None) -> None:
        """Drops the draws of a run; if it is given, not those of a later run of its name."""
        for runner in [*self._draws.values(), *self._unloaded.values()]:
            if runner.draw.run == run_id and (run is None or runner.run.created_at == run.created_at):
                self._draws.pop(runner.draw.id, None)
                self._unloaded.pop(runner.draw.id, None)
                runner.let_go()

    def _unload_ended(self) -> None:
        """Keeps `MOST_ENDED` ended draws in memory: their number has no bound."""
        ended = [runner for runner in self._draws.values() if runner.is_at_rest]
        for runner in ended[: max(0, len(ended) - MOST_ENDED)]:
            self._unloaded[runner.draw.id] = self._draws.pop(runner.draw.id)

    async def _take_up(self, draw: Draw, groups: Sequence[Group]) -> None:
        """Resumes a draw of an earlier process. An error in it ends the draw, not the service."""
        try:
            await self._load(draw, groups)
        except StoreUnusable:
            raise
        except Exception as error:
            detail = error.detail if isinstance(error, RollyardError) else f"{type(error).__name__}: {error}"
            log.exception("a draw cannot be resumed", extra={"draw": draw.id, "detail": detail})
            self._draws.pop(draw.id, None)
            ended = [replace(group, state=GroupState.CANCELLED, reason="unusable") for group in groups]
            draw = replace(draw, is_active=False, reason="unusable", detail=detail)
            await self._store.step(Decision(groups=tuple(ended), draw=draw))

    async def _load(self, draw: Draw, groups: Sequence[Group]) -> DrawRunner:
        run = self._pipeline.run_of(draw.run)
        if run is None:
            raise NotFound(f"there is no run {draw.run!r}")
        keep: GroupFilter
        try:
            keep = keep_of(draw.config.keep)
        except InvalidRequest as error:
            keep = MissingFilter(error)
        runner = DrawRunner(
            self._pipeline,
            draw,
            run,
            keep,
            lambda raw: self._make_task(raw, run),
            partial(self._router.version, run.policy),
            on_change=self.groups.notifier.ring,
        )
        self._unload_ended()
        self._draws[draw.id] = runner
        await runner.load(groups)
        if draw.is_active:
            if isinstance(keep, MissingFilter):
                log.error("a draw cannot continue", extra={"draw": draw.id, "detail": keep.error.detail})
                await runner.close("unusable", keep.error.detail)
            self._keep_going(runner)
        return runner

    def _keep_going(self, runner: DrawRunner) -> None:
        if not runner.has_main_task:
            runner.has_main_task = True
            self._own(runner.main(), f"draw {runner.draw.id}")

    def active(self) -> list[dict[str, Json]]:
        """Returns a summary of each active draw."""
        return [
            {
                "id": runner.draw.id,
                "run": runner.draw.run,
                "batch": runner.draw.progress.batch,
                "open": runner.draw_state.open_count,
                "complete": len(runner.draw_state.in_flight) - runner.draw_state.open_count,
                "keep_rate": round(runner.draw_state.keep_rate, 4),
            }
            for runner in self._draws.values()
            if runner.draw.is_active
        ]

    # --- events ---------------------------------------------------------------------------------------

    def _ended(self, rollout: Rollout) -> None:
        if rollout.group is None:
            return
        self.groups.ended(rollout)
        draw_id = rollout.group.rsplit(".", 3)[0]  # a draw's groups are named DRAW.epoch.item.turn
        runner = self._draws.get(draw_id)
        if runner is not None:
            runner.ended(rollout)

    def _swept(self, swept: SweepResult) -> None:
        for draw_id in swept.draws:
            self._unloaded.pop(draw_id, None)
            runner = self._draws.get(draw_id)
            if runner is not None and not runner.draw.is_active:
                del self._draws[draw_id]
                runner.let_go()

    def _versioned(self, policy: str, version: int) -> None:
        self.evals.versioned(policy)
        for runner in self._draws.values():
            if runner.run.policy == policy:
                runner.wake()

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guarded(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.current_task()
        try:
            await work
        except StoreUnusable as error:  # the pipeline fails too, and ends the service
            log.error("the store cannot be used", extra={"error": str(error)})
        except Exception:
            log.exception("a task of the sampler failed", extra={"task": task.get_name() if task else ""})
