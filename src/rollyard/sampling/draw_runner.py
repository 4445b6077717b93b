"""Runs a draw: applies the decisions of `draw_state.py` to real rollouts, and writes each one before it takes effect.

There is one asyncio task per draw. It wakes when a rollout of the draw has ended, a batch was requested, tasks were
pushed, or the policy's version changed. It decides, writes the whole decision atomically, and only then starts
rollouts, notifies and cancels. So a service that is killed at any moment finds a draw with consistent groups, batches
and progress, and continues it.

Invariants. A group is delivered once: its place in the order of delivery is assigned in the write that puts it into a
batch, and a repeated request returns the same groups in the same order. Every change is made under one lock, and under
it the runner waits only for the store and the source.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

from rollyard.core import Batch, Draw, Group, GroupState, Json, Rollout, RollyardError, Run, Task
from rollyard.core.draw import SourceKind
from rollyard.core.failure import BatchConflict, InvalidRequest, NotFound, VersionConflict
from rollyard.core.loop_yield import LoopYield
from rollyard.pipeline import Pipeline
from rollyard.sampling.active_groups import ActiveGroups, GroupChanges
from rollyard.sampling.draw_state import ActiveGroup, DrawState
from rollyard.sampling.filters import GroupFilter
from rollyard.sampling.notifier import Notifier
from rollyard.sampling.open_group import OpenGroup, catch_up, check_members
from rollyard.sampling.sources import MOST_TASKS
from rollyard.sampling.task_order import TaskOrder
from rollyard.store.base import Decision, StoreUnusable
from rollyard.store.codec import to_json

T = TypeVar("T")

log = logging.getLogger("rollyard.sampling")

MOST_AT_ONCE = 32
"""Groups started in one step, so that other work gets its turn at the event loop and at the store."""

HOLD_OFF_S = (1.0, 60.0)
"""First and longest delay in seconds after groups that failed because of infrastructure. It doubles each time: an
outage must not use up the tasks' tries."""

FULL_S = 1.0
"""Seconds between two checks of a queue that had no room for a group."""

MakeTask = Callable[[Mapping[str, Json]], Task]
"""Makes a checked task with the run's defaults from a task of the source. Raises RollyardError for an invalid one."""


class DrawRunner:
    """Runs one draw. `main` is its task; the other methods are for the sampler and for clients."""

    def __init__(
        self,
        pipeline: Pipeline,
        draw: Draw,
        run: Run,
        keep: GroupFilter,
        make_task: MakeTask,
        version: Callable[[], int],
        *,
        on_change: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.notifier = Notifier()  # a group was delivered, a batch closed, or the draw ended
        self._on_change = on_change
        self.run = run
        self._pipeline = pipeline
        self._store = pipeline.store
        self._make_task = make_task
        self._version = version
        self._active_groups = ActiveGroups(DrawState(draw, TaskOrder(draw.config, draw.config.source.size)), keep)
        self._news = asyncio.Event()
        self._lock = asyncio.Lock()
        self._hold_s = 0.0
        self._paused_until = 0.0
        self._written = ""  # progress and batch as stored
        self._asked: set[asyncio.Task[object]] = set()
        self._releases: set[asyncio.Task[int]] = set()  # acknowledgements that delete traces
        self._timer: asyncio.TimerHandle | None = None  # one that has not fired
        self._is_removed = False
        self.has_main_task = False  # `main` is running or about to run

    @property
    def draw(self) -> Draw:
        return self.draw_state.draw

    @property
    def is_at_rest(self) -> bool:
        """Whether the draw has ended and nothing of it is running."""
        return not (self.draw.is_active or self.has_main_task or self._asked)

    @property
    def draw_state(self) -> DrawState:
        return self._active_groups.draw_state

    # --- lifecycle ------------------------------------------------------------------------------------

    async def load(self, groups: Sequence[Group]) -> None:
        """Takes over what an earlier process left. Calls of clients wait for it."""
        async with self._lock:
            draw, active_groups = self.draw, self._active_groups
            in_flight = [active_groups.adopt(group) for group in groups]
            for opened in list(active_groups.open.values()):
                await catch_up(self._store, opened)
            grown = await self._store.count_items(draw.id) if draw.config.source.size is None else 0
            batch = await self._store.get_batch(draw.id, draw.progress.batch) if draw.progress.batch else None
            active_groups.draw_state = DrawState(
                draw, TaskOrder(draw.config, draw.config.source.size, grown), batch, in_flight
            )
        self.wake()

    def wake(self) -> None:
        self._news.set()

    def wake_in(self, delay_s: float) -> None:
        """Sets the one timer, which is for what is due first; the turn that follows sets it again. A timer that is due
        is never postponed, even before the event loop has run it."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + delay_s:
                return
            self._timer.cancel()
        self._timer = loop.call_later(delay_s, self._due)

    def _due(self) -> None:
        self._timer = None
        self.wake()

    async def main(self) -> None:
        """Runs until the draw and all its rollouts have ended."""
        try:
            while (self.draw.is_active or self._active_groups.is_at_work) and not self._is_removed:
                await self._news.wait()
                self._news.clear()
                async with self._lock:
                    if not self._is_removed:
                        await self._turn()
        finally:
            self.has_main_task = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None  # otherwise a draw that a rewind reopens would rely on it

    def let_go(self) -> None:
        """Ends `main` for a draw that is closed and about to be removed: it no longer receives its rollouts' ends."""
        self._is_removed = True
        self.wake()

    def ended(self, rollout: Rollout) -> None:
        """Records the end of a rollout, if it belongs to this draw."""
        if self._active_groups.take(rollout):
            self.wake()

    # --- called by clients ----------------------------------------------------------------------------

    async def wholly(self, asked: Coroutine[object, object, T]) -> T:
        """Completes a request even if the client has disconnected: half a decision would be inconsistent."""
        task = asyncio.create_task(asked, name=f"draw {self.draw.id}")
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        return await asyncio.shield(task)

    async def settled(self) -> None:
        """Waits until all requests are completed. They wait only for the store."""
        if self._asked:
            await asyncio.wait(self._asked)

    async def ask(self, want: int, number: int | None) -> Batch:
        """Opens the batch of that number or returns the existing one. Without a number: the open one, else the next."""
        return await self.wholly(self._ask(want, number))

    async def _ask(self, want: int, number: int | None) -> Batch:
        async with self._lock:
            last = self.draw.progress.batch
            current = self.draw_state.batch
            if number is None:
                number = current.number if current is not None else last + 1
            if number <= last:
                batch = current if current is not None and current.number == number else None
                batch = batch or await self._store.get_batch(self.draw.id, number)
                if batch.want != want:
                    raise BatchConflict(f"batch {number} was requested with want {batch.want}, not {want}")
                return batch
            if number > last + 1 or current is not None:
                raise BatchConflict(
                    f"batch {number} cannot be opened: "
                    + (f"batch {current.number} is open" if current is not None else f"the next one is {last + 1}")
                )
            if not self.draw.is_active:
                return self._after_the_end(number, want)
            self.draw_state.set_version(self._version())
            self.draw_state.ask(want, time.time())
            await self._turn()
            return self.draw_state.batch or await self._store.get_batch(self.draw.id, number)

    async def batch(self, number: int, within_s: float) -> Batch:
        """Returns a batch when it is closed, or in its current state when `within_s` is over."""
        return await self.notifier.until("", partial(self.found, number), lambda batch: not batch.is_open, within_s)

    async def found(self, number: int) -> Batch:
        """Returns a batch in its current state. Raises NotFound."""
        try:
            return await self._store.get_batch(self.draw.id, number)
        except NotFound:
            if self.draw.is_active or number != self.draw.progress.batch + 1:
                raise
            return self._after_the_end(number, 0)

    def _after_the_end(self, number: int, want: int) -> Batch:
        """Returns the batch of a draw that has ended: it is empty and not stored."""
        progress = self.draw.progress
        return Batch(
            self.draw.id, number, want, progress.version, progress.place,
            is_open=False, reason=self.draw.reason, is_last=True,
        )  # fmt: skip

    async def push(self, tasks: Sequence[tuple[str | None, Mapping[str, Json]]], *, close: bool) -> int:
        """Adds tasks to a growing source. Returns its new number of tasks."""
        if self.draw.config.source.kind is not SourceKind.PUSH:
            raise InvalidRequest("tasks can only be pushed to a draw whose source is push")
        loop_yield = LoopYield()
        for place, (_, task) in enumerate(tasks):
            try:
                check_members(self._make_task(task), self.draw.config.group_size)
            except RollyardError as error:
                error.detail = f"tasks.{place}: {error.detail}"
                raise
            await loop_yield.step()
        return await self.wholly(self._push(tasks, close))

    async def _push(self, tasks: Sequence[tuple[str | None, Mapping[str, Json]]], close: bool) -> int:
        async with self._lock:
            closed = None
            if self.draw.progress.is_source_closed:
                closed = "the source of this draw was closed: nothing can be pushed to it any more"
            elif not self.draw.is_active:
                closed = f"this draw has ended ({self.draw.reason}): nothing can be pushed to it any more"
            total = self.draw_state.order.grown
            if total + len(tasks) > MOST_TASKS:
                raise InvalidRequest(
                    f"tasks: the draw has {total:,} and may have {MOST_TASKS:,}: push the others to another draw"
                )
            if tasks:
                total = await self._store.push_items(self.draw.id, tasks, closed=closed)
            self.draw_state.order.grown = total
            self.draw.progress.is_source_closed |= close
            await self._turn()
            return total

    async def acknowledge(self, number: int) -> int:
        """Records that the trainer has stored the batches up to `number`. Returns how many groups were released."""
        return await self.wholly(self._acknowledge(number))

    async def _acknowledge(self, number: int) -> int:
        async with self._lock:
            last = self.draw.progress.batch - (self.draw_state.batch is not None)
            if not 0 <= number <= last:
                raise InvalidRequest(f"batch {number} cannot be acknowledged: the last closed batch is {last}")
            self.draw.progress.acked = max(self.draw.progress.acked, number)
            await self._write(GroupChanges())
            # Not awaited under the lock: it deletes the traces of any number of groups.
            release = asyncio.create_task(self._store.acknowledge_draw(self.draw.id, number))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)
        return await release

    async def rewind(self, number: int, version: int, policy_version: int | None = None) -> None:
        """Applies `DrawState.rewind`. The policy must already have the checkpoint's weights, which sample what is
        started now: with the version `version`, or `policy_version` if they were given a new one."""
        await self.wholly(self._rewind(number, version, policy_version))

    async def _rewind(self, number: int, version: int, policy_version: int | None) -> None:
        async with self._lock:
            progress = self.draw.progress
            last = progress.batch - (self.draw_state.batch is not None)
            if not 0 <= number <= last:
                raise InvalidRequest(f"cannot rewind to batch {number}: the last closed batch is {last}")
            now = self._version()
            if now > version if policy_version is None else now != policy_version:
                raise VersionConflict(
                    f"the policy is at version {now}: write the checkpoint's weights and resume it at version "
                    f"{version if policy_version is None else policy_version} first"
                )
            place = await self._end_of(number)
            acked_place = await self._end_of(progress.acked) if number < progress.acked else place
            if self._releases:  # otherwise they would also release the groups that get these batches' numbers next
                await asyncio.wait(self._releases)
            changes = GroupChanges(undone_after=number)
            taken = await self._store.delivered_groups(self.draw.id, place, 1_000_000)
            self._active_groups.rewind(number, place, version, taken, changes, acked_place=acked_place)
            progress.acked = min(progress.acked, number)
            await self._write(changes)
            await self._turn()

    async def _end_of(self, number: int) -> int:
        """Returns the place of the last group up to and including that batch."""
        if not number:
            return 0
        batch = await self._store.get_batch(self.draw.id, number)
        return batch.after + batch.delivered

    async def close(self, reason: str = "closed", detail: str | None = None) -> None:
        """Ends the draw and its running rollouts."""
        await self.wholly(self._closed(reason, detail))

    async def _closed(self, reason: str, detail: str | None) -> None:
        async with self._lock:
            if self.draw.is_active:
                await self._end(reason, detail)

    # --- decisions ------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """Makes decisions until there is nothing more to decide."""
        is_again, changes = True, GroupChanges()
        try:
            while is_again:
                changes = GroupChanges()
                for is_infra in self._active_groups.apply_ends(changes, may_begin=not self._pipeline.is_draining):
                    self._hold_off(is_infra)
                with ExitStack() as places:
                    is_again = await self._decide(changes, places)
                    await self._write(changes, places)
        except StoreUnusable:
            raise
        except Exception as error:  # the draw cannot continue after half a decision
            log.exception("a draw failed unexpectedly", extra={"draw": self.draw.id})
            await self._broke(changes, f"{type(error).__name__}: {error}")

    async def _broke(self, changes: GroupChanges, detail: str) -> None:
        """Ends the draw with what was decided, except for the rollouts that were to start: they are not in the store,
        and where their ids are taken, those rollouts are not of this draw."""
        unborn = {new.rollout.group for new in changes.submissions if not new.rollout.index}
        for new in changes.submissions:
            if (opened := self._active_groups.open.get(new.rollout.group or "")) is not None:
                opened.group = replace(opened.group, started=min(opened.group.started, new.rollout.index))
        changes.submissions.clear()
        self.draw_state.end("internal_error", detail)
        self._active_groups.end_all(changes)
        changes.groups = {name: group for name, group in changes.groups.items() if name not in unborn}
        await self._write(changes)

    async def _decide(self, changes: GroupChanges, places: ExitStack) -> bool:
        """Makes one decision. Returns whether to decide again at once. `places` gets the places in the queue of the
        groups that begin: other draws of the owner must not take them before they are stored."""
        draw_state = self.draw_state
        draw_state.set_version(self._version())
        draw_state.elapsed_s = time.time() - self.draw.created_at
        if (most_s := self.draw.config.budget.seconds) is not None and most_s > draw_state.elapsed_s:
            self.wake_in(min(3600.0, most_s - draw_state.elapsed_s))
        for one in draw_state.too_old():
            self._active_groups.end(one, GroupState.DROPPED, "stale", changes)
        for handed in draw_state.hand_out():
            self._active_groups.hand_out(handed, changes)
        for one in draw_state.surplus():
            self._active_groups.end(one, GroupState.CANCELLED, "surplus", changes, returns=True)
        if draw_state.check_end() is not None:
            self._active_groups.end_all(changes)
        if self._pipeline.is_draining or not self.draw.is_active:
            return False
        pause_s = self._paused_until - time.monotonic()
        if pause_s > 0:
            self.wake_in(pause_s)
            return False
        room = max(0, self._pipeline.room_of(self.run.id) // self.draw.config.group_size)
        if not room:  # the queue is full of other rollouts, and no event reports room
            self.wake_in(FULL_S)
        admitted = draw_state.admit(min(MOST_AT_ONCE, room))
        if admitted:
            places.enter_context(self._pipeline.arriving(len(admitted) * self.draw.config.group_size, self.run.id))
        for one in admitted:
            await self._begin(one, changes)
        return bool(admitted)

    async def _begin(self, one: ActiveGroup, changes: GroupChanges) -> None:
        config, now = self.draw.config, time.time()
        group = Group(
            id=one.id,
            run=self.draw.run,
            size=config.group_size,
            spares=config.spares,
            min_members=config.min_members,
            priority=config.priority,
            admitted_version=one.version,
            draw=self.draw.id,
            order=one.order,
            epoch=one.item.epoch,
            item=one.item.index,
            tries=one.item.tries,
            turn=one.item.turn,
            created_at=now,
            updated_at=now,
        )
        try:
            task = self._make_task(await self._store.get_item(self.draw.id, one.item.index))
        except RollyardError as error:  # valid when it was read; since then its environment was removed, for example
            failed = OpenGroup(group).over(GroupState.FAILED, reason=error.code)
            assert failed.stats is not None
            self.draw_state.ended(one.id, GroupState.FAILED, failed.stats)
            changes.groups[one.id] = failed
            return
        self._active_groups.begin(OpenGroup(group, task), changes)

    def _hold_off(self, is_infra: bool) -> None:
        if not is_infra:
            self._hold_s = self._paused_until = 0.0
            return
        first, most = HOLD_OFF_S
        self._hold_s = min(most, max(first, 2 * self._hold_s))
        self._paused_until = time.monotonic() + self._hold_s

    async def _end(self, reason: str, detail: str | None) -> None:
        changes = GroupChanges()
        self.draw_state.end(reason, detail)
        self._active_groups.end_all(changes)
        await self._write(changes)

    # --- writing --------------------------------------------------------------------------------------

    async def _write(self, changes: GroupChanges, places: ExitStack | None = None) -> None:
        """Writes a decision, then applies it. `places` are the reserved places in the queue."""
        draw_state = self.draw_state
        now = time.time()
        draw_state.draw = replace(draw_state.draw, progress=draw_state.progress, updated_at=now)
        closed = [replace(batch, closed_at=batch.closed_at or now) for batch in draw_state.closed]
        draw_state.closed = []
        as_it_stands = to_json((draw_state.progress, draw_state.batch, draw_state.draw.is_active))
        if as_it_stands == self._written and not (changes.groups or closed or changes.undone_after is not None):
            return
        batches = (*closed, *((draw_state.batch,) if draw_state.batch is not None else ()))
        step = Decision(
            submissions=tuple(changes.submissions),
            groups=tuple(changes.groups.values()),
            draw=draw_state.draw,
            batches=batches,
            undone_after=changes.undone_after,
        )
        try:
            stored = await self._store.step(step)
        except Exception:
            draw_state.closed = closed + draw_state.closed
            raise
        self._written = as_it_stands
        changes.submissions.clear()
        if places is not None:
            places.close()
        self._pipeline.enqueue(stored)
        self.notifier.ring()  # before the cancels: there may be hundreds, each a write of its own
        if not self.draw.is_active:
            self.wake()  # `main` ends
        for group_id in changes.groups:
            self._on_change(group_id)
        await self._pipeline.cancelling.cancel_many(list(changes.cancels), "its group was given up")
