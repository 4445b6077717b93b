"""Groups that a client submits one by one: n rollouts, one record at the end.

One asyncio task manages all of them: it starts a spare when infrastructure lost a member, and writes the group's end
when its members have ended. Every end of a rollout arrives by `ended`; after a restart, the store has those that came
meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from rollyard.core import Group, GroupState, Json, Rollout, RollyardError, Task
from rollyard.core.failure import NotFound
from rollyard.core.loop_yield import LoopYield
from rollyard.pipeline import Pipeline
from rollyard.sampling.notifier import Notifier
from rollyard.sampling.open_group import OpenGroup, catch_up, check_members
from rollyard.store.base import Decision, StoreUnusable, Submission

log = logging.getLogger("rollyard.sampling")


class Groups:
    """All groups that belong to no draw."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.notifier = Notifier()  # by group: it has changed
        self.on_over: list[Callable[[str], None]] = []  # called with its id
        self._pipeline = pipeline
        self._store = pipeline.store
        self._open: dict[str, OpenGroup] = {}
        self._ending: set[str] = set()  # no longer open, and their ends are being written
        self._touched: dict[str, None] = {}
        self._news = asyncio.Event()

    async def load(self, groups: Sequence[Group]) -> None:
        """Takes over the groups that an earlier process left open."""
        for group in groups:
            self._open[group.id] = opened = OpenGroup(group)
            try:
                await catch_up(self._store, opened)
            except StoreUnusable:
                raise
            except Exception as error:  # ends this group, not the service
                log.exception("a group cannot be resumed", extra={"group": group.id})
                reason = error.code if isinstance(error, RollyardError) else "internal_error"
                await self._end(opened, replace(group, state=GroupState.FAILED, reason=reason))
            else:
                self._touch(group.id)

    async def put(self, entries: Sequence[tuple[Group, Task, Mapping[str, Json]]]) -> list[Group]:
        """Stores groups and queues their rollouts; durable when it returns. An existing one with this body is
        returned."""
        count = sum(group.size for group, _, _ in entries)
        # Room first: a short request may name more rollouts than fit into memory.
        with self._pipeline.arriving(count, entries[0][0].run if entries else ""):
            opened, submissions, loop_yield = list[OpenGroup](), list[Submission](), LoopYield()
            for group, task, _ in entries:
                check_members(task, group.size)
                opened.append(OpenGroup(group, task))
                submissions += opened[-1].begin(range(group.size))
                await loop_yield.step()
            bodies = [(one.group, body) for one, (_, _, body) in zip(opened, entries, strict=True)]
            groups, stored = await self._store.put_groups(bodies, submissions)
        created = {rollout.group for rollout in stored}  # none of the others: their members may have ended already
        self._open.update({one.id: one for one in opened if one.id in created})
        self._pipeline.enqueue(stored)  # only now can a member end
        return list(groups)

    def opened(self, group_id: str) -> OpenGroup | None:
        """Returns a group whose rollouts are running, or None."""
        return self._open.get(group_id)

    def is_ending(self, group_id: str) -> bool:
        """Whether the group is no longer open, and its end is not stored yet."""
        return group_id in self._ending

    def ended(self, rollout: Rollout) -> None:
        """Records the end of a rollout, if it belongs to one of these groups."""
        opened = self._open.get(rollout.group or "")
        if opened is not None and opened.take(rollout):
            self._touch(opened.id)

    async def cancel(self, group_id: str) -> Group:
        """Ends the group and its rollouts, unless it has ended."""
        opened = self._open.pop(group_id, None)
        if opened is None:
            return await self._store.get_group(group_id)
        group = opened.over(GroupState.CANCELLED, reason="cancelled")
        await self._write_end(group)
        self._pipeline.cancel_later(opened.at_work(), "its group was cancelled")  # a restart cancels the rest
        self._notify(group_id)
        return group

    def close_run(self, run_id: str) -> None:
        """Forgets the open groups of a run that is about to be deleted: they are deleted with it, and nothing more may
        be written of them."""
        for group_id in [opened.id for opened in self._open.values() if opened.group.run == run_id]:
            del self._open[group_id]

    async def wait(self, group_id: str, within_s: float) -> Group:
        """Returns the record when it is no longer open, or in its current state when `within_s` is over."""
        look = partial(self._store.get_group, group_id)
        return await self.notifier.until(group_id, look, lambda group: group.state is not GroupState.OPEN, within_s)

    async def main(self) -> None:
        """Starts spares and ends groups, until it is cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            touched, self._touched = self._touched, {}
            for group_id in touched:
                opened = self._open.get(group_id)
                if opened is None:
                    continue
                try:
                    await self._apply_ends(opened)
                except StoreUnusable:
                    raise
                except NotFound:  # its run was deleted meanwhile
                    self._open.pop(group_id, None)
                except Exception as error:  # a spare's id is taken, for example: ends only this group
                    log.exception("a group failed unexpectedly", extra={"group": group_id})
                    reason = error.code if isinstance(error, RollyardError) else "internal_error"
                    await self._end(opened, replace(opened.group, state=GroupState.FAILED, reason=reason))

    def _touch(self, group_id: str) -> None:
        self._touched[group_id] = None
        self._news.set()

    async def _apply_ends(self, opened: OpenGroup) -> None:
        now = opened.standing()
        if now.start:
            if self._pipeline.is_draining:
                return  # the next process starts them
            before = opened.group
            submissions = opened.begin(now.start)
            try:
                stored = await self._store.step(Decision(tuple(submissions), (opened.group,)))
            except RollyardError:
                opened.group = before  # not started: rollouts of another client may have these ids
                raise
            self._pipeline.enqueue(stored)
            return
        if not now.is_over:
            return
        if now.failure is None:
            group = opened.over(GroupState.COMPLETE, now.members)
        else:
            group = opened.over(GroupState.FAILED, reason=now.failure)
        await self._end(opened, group)

    async def _end(self, opened: OpenGroup, group: Group) -> None:
        self._open.pop(opened.id, None)  # first: a cancel from now on has no effect
        await self._write_end(group)
        self._pipeline.cancel_later(opened.at_work(), f"its group has failed: {group.reason}")
        self._notify(opened.id)

    async def _write_end(self, group: Group) -> None:
        self._ending.add(group.id)
        try:
            await self._store.step(Decision(groups=(group,)))
        finally:
            self._ending.discard(group.id)

    def _notify(self, group_id: str) -> None:
        self.notifier.ring(group_id)
        for listener in self.on_over:
            listener(group_id)


def new_group(
    group_id: str, run: str, size: int, spares: int, min_members: int | None, priority: int, version: int
) -> Group:
    now = time.time()
    return Group(
        id=group_id,
        run=run,
        size=size,
        spares=spares,
        min_members=min_members,
        priority=priority,
        admitted_version=version,
        created_at=now,
        updated_at=now,
    )
