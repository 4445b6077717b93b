"""A draw, kept going: its decisions (`drawing.py`) made true with real rollouts, each written before it is seen.

One task per draw. It wakes when a rollout of the draw has ended, a batch was asked for, tasks were pushed, or the
policy's version changed; decides; writes all of the decision in one step; and only then begins, cancels and tells. So a
service that is killed at any moment finds a draw whose groups, batches and progress fit together, and goes on.

Invariants. A group is delivered once: its place in the order of delivery is given in the step that puts it into a
batch, and asking again gives the same groups in the same order. Nobody holds a decision: every change is under one
lock, and waits for nothing but the store and the source.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rollyard.core import Batch, Draw, Group, GroupState, Json, Rollout, RollyardError, Run, Task
from rollyard.core.draw import Item, SourceKind
from rollyard.core.failure import BatchConflict, InvalidRequest, VersionConflict
from rollyard.pipeline import Yard
from rollyard.sampling.bell import Bell
from rollyard.sampling.drawing import Drawing, Flying, Handed
from rollyard.sampling.keep import Judged, Keep
from rollyard.sampling.membership import Fate, end_of
from rollyard.sampling.opening import OpenGroup, catch_up
from rollyard.sampling.order import Order
from rollyard.store.base import Step, StoreUnusable, Submission
from rollyard.store.codec import to_json

T = TypeVar("T")

log = logging.getLogger("rollyard.sampling")

MOST_AT_ONCE = 32
"""Groups that are begun in one step: others get their turn at the event loop, and at the store."""

HOLD_OFF_S = (1.0, 60.0)
"""After groups that infrastructure failed, the next ones are begun later and later, up to a minute: an outage must not
use up the tasks' tries."""

FULL_S = 1.0
"""Between two looks at a queue that had no room for a group."""

MakeTask = Callable[[Mapping[str, Json]], Task]
"""A task as it is in the source, checked and with the run's defaults; RollyardError says what is wrong with it."""


@dataclass(slots=True)
class _Changes:
    """What one decision writes and then does."""

    submissions: list[Submission] = field(default_factory=list[Submission])
    groups: dict[str, Group] = field(default_factory=dict[str, Group])
    cancels: list[str] = field(default_factory=list[str])
    undone_after: int | None = None


class DrawKeeper:
    """See the module."""

    def __init__(
        self,
        yard: Yard,
        draw: Draw,
        run: Run,
        keep: Keep,
        make_task: MakeTask,
        version: Callable[[], int],
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.bell = Bell()  # something was delivered, a batch closed, or the draw ended
        self._on_change = on_change
        self.run = run
        self._yard = yard
        self._store = yard.store
        self._keep = keep
        self._make_task = make_task
        self._version = version
        self._drawing = Drawing(draw, Order(draw.config, draw.config.source.size))
        self._open: dict[str, OpenGroup] = {}
        self._complete: dict[str, Group] = {}
        self._over: dict[str, tuple[GroupState, int]] = {}  # ended early: state, and rollouts that have not ended yet
        self._touched: dict[str, None] = {}
        self._news = asyncio.Event()
        self._lock = asyncio.Lock()
        self._hold_s = 0.0
        self._held_until = 0.0
        self._written = ""  # progress and batch, as they stand in the store
        self._asked: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_gone = False
        self.is_kept = False  # `main` is at work, or about to be

    @property
    def draw(self) -> Draw:
        return self._drawing.draw

    @property
    def drawing(self) -> Drawing:
        return self._drawing

    # --- life -----------------------------------------------------------------------------------------

    async def load(self, groups: Sequence[Group]) -> None:
        """Takes up what an earlier process left."""
        draw, flying = self.draw, list[Flying]()
        for group in groups:
            item = _item(group)
            is_complete = group.state is GroupState.COMPLETE
            flying.append(Flying(group.id, group.order, item, group.admitted_version, is_complete))
            if is_complete:
                self._complete[group.id] = group
            else:
                self._open[group.id] = OpenGroup(group)
        for opened in list(self._open.values()):
            await catch_up(self._store, opened)
            self._touched[opened.id] = None
        grown = await self._store.count_items(draw.id) if draw.config.source.size is None else 0
        batch = await self._store.get_batch(draw.id, draw.progress.batch) if draw.progress.batch else None
        self._drawing = Drawing(draw, Order(draw.config, draw.config.source.size, grown), batch, flying)
        self.wake()

    def wake(self) -> None:
        self._news.set()

    async def main(self) -> None:
        """Until the draw has ended and nothing of it is at work."""
        try:
            while (self.draw.is_active or self._over or self._open) and not self._is_gone:
                await self._news.wait()
                self._news.clear()
                async with self._lock:
                    if not self._is_gone:
                        await self._turn()
        finally:
            self.is_kept = False
            if self._timer is not None:
                self._timer.cancel()

    def let_go(self) -> None:
        """It was closed, and is about to be forgotten: nobody tells it of its rollouts' ends any more."""
        self._is_gone = True
        self.wake()

    def ended(self, rollout: Rollout) -> None:
        """A rollout of this draw has ended."""
        group_id = rollout.group or ""
        opened = self._open.get(group_id)
        if opened is not None:
            if opened.take(rollout):
                self._touched[group_id] = None
                self.wake()
        elif group_id in self._over:
            state, left = self._over[group_id]
            self._drawing.came_late(state, end_of(rollout).sampled_tokens)
            if left > 1:
                self._over[group_id] = state, left - 1
            else:
                del self._over[group_id]
            self.wake()

    # --- what clients ask -----------------------------------------------------------------------------

    async def wholly(self, asked: Coroutine[object, object, T]) -> T:
        """Carries out what a client asked for to its end, whether or not the client is still there: half a decision
        would leave memory and store apart."""
        task = asyncio.create_task(asked, name=f"draw {self.draw.id}")
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        return await asyncio.shield(task)

    async def ask(self, want: int, number: int | None) -> Batch:
        """The batch of that number: opened, or as it stands. Without a number: the open one, else the next."""
        return await self.wholly(self._ask(want, number))

    async def _ask(self, want: int, number: int | None) -> Batch:
        async with self._lock:
            last = self.draw.progress.batch
            current = self._drawing.batch
            if number is None:
                number = current.number if current is not None else last + 1
            if number <= last:
                found = current if current is not None and current.number == number else None
                found = found or await self._store.get_batch(self.draw.id, number)
                if found.want != want:
                    raise BatchConflict(f"batch {number} was asked for with want {found.want}, not {want}")
                return found
            if number > last + 1 or current is not None:
                raise BatchConflict(
                    f"batch {number} cannot be opened: "
                    + (f"batch {current.number} is open" if current is not None else f"the next one is {last + 1}")
                )
            if not self.draw.is_active:
                return Batch(
                    self.draw.id, number, want, self.draw.progress.version, self.draw.progress.place,
                    is_open=False, reason=self.draw.reason, is_last=True,
                )  # fmt: skip
            self._drawing.set_version(self._version())
            self._drawing.ask(want, time.time())
            await self._turn()
            return self._drawing.batch or await self._store.get_batch(self.draw.id, number)

    async def batch(self, number: int, within_s: float) -> Batch:
        """A batch, when it is closed, or as it stands when the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    heard = self.bell.next()
                    batch = await self._store.get_batch(self.draw.id, number)
                    if not batch.is_open:
                        return batch
                    await heard
        return await self._store.get_batch(self.draw.id, number)

    async def push(self, tasks: Sequence[tuple[str | None, Mapping[str, Json]]], *, close: bool) -> int:
        """Adds tasks to a source that grows; how many it has then."""
        if self.draw.config.source.kind is not SourceKind.PUSH:
            raise InvalidRequest("tasks can only be pushed to a draw whose source is push")
        for place, (_, task) in enumerate(tasks):
            try:
                self._make_task(task)
            except RollyardError as error:
                error.detail = f"tasks.{place}: {error.detail}"
                raise
        return await self.wholly(self._push(tasks, close))

    async def _push(self, tasks: Sequence[tuple[str | None, Mapping[str, Json]]], close: bool) -> int:
        async with self._lock:
            closed = None
            if self.draw.progress.is_source_closed:
                closed = "the source of this draw was closed: nothing can be pushed to it any more"
            elif not self.draw.is_active:
                closed = f"this draw has ended ({self.draw.reason}): nothing can be pushed to it any more"
            total = self._drawing.order.grown
            if tasks:
                total = await self._store.push_items(self.draw.id, tasks, closed=closed)
            self._drawing.order.grown = total
            self.draw.progress.is_source_closed |= close
            await self._turn()
            return total

    async def acknowledge(self, number: int) -> int:
        """Batches up to there are safe with the trainer. How many groups were let go."""
        return await self.wholly(self._acknowledge(number))

    async def _acknowledge(self, number: int) -> int:
        async with self._lock:
            last = self.draw.progress.batch - (self._drawing.batch is not None)
            if not 0 <= number <= last:
                raise InvalidRequest(f"batch {number} cannot be acknowledged: the last one that is closed is {last}")
            self.draw.progress.acked = max(self.draw.progress.acked, number)
            await self._write(_Changes())
        return await self._store.acknowledge_draw(self.draw.id, number)

    async def rewind(self, number: int, version: int) -> None:
        """See `Drawing.rewind`. The policy must be at that version already: what is begun now is sampled by it."""
        await self.wholly(self._rewind(number, version))

    async def _rewind(self, number: int, version: int) -> None:
        async with self._lock:
            progress = self.draw.progress
            last = progress.batch - (self._drawing.batch is not None)
            if not progress.acked <= number <= last:
                raise InvalidRequest(
                    f"batch {number} cannot be gone back to: "
                    f"{progress.acked} is acknowledged, and the last one that is closed is {last}"
                )
            if self._version() > version:
                raise VersionConflict(
                    f"the policy is at version {self._version()}: "
                    f"write the weights of version {version} and resume it there first"
                )
            place = 0
            if number:
                batch = await self._store.get_batch(self.draw.id, number)
                place = batch.after + batch.delivered
            changes = _Changes(undone_after=number)
            taken = await self._store.delivered_groups(self.draw.id, place, 1_000_000)
            for group in self._drawing.rewind(number, place, version, [*taken, *self._complete.values()]):
                changes.groups[group.id] = replace(group, updated_at=time.time())
                if group.state is GroupState.COMPLETE:
                    self._complete[group.id] = changes.groups[group.id]
                else:
                    self._complete.pop(group.id, None)
            for opened in list(self._open.values()):  # newer weights may be sampling for them this moment
                self._give_up(opened, GroupState.VOID, "rewound", changes, returns=True)
            await self._write(changes)
            await self._turn()

    async def close(self, reason: str = "closed", detail: str | None = None) -> None:
        """Ends it, and what is at work for it."""
        await self.wholly(self._closed(reason, detail))

    async def _closed(self, reason: str, detail: str | None) -> None:
        async with self._lock:
            if self.draw.is_active:
                await self._end(reason, detail)

    # --- deciding -------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """One decision after another, until there is nothing to decide."""
        is_again, changes = True, _Changes()
        try:
            while is_again:
                changes = _Changes()
                touched, self._touched = self._touched, {}
                for group_id in touched:
                    if group_id in self._open:
                        self._look(self._open[group_id], changes)
                is_again = await self._decide(changes)
                await self._write(changes)
        except StoreUnusable:
            raise
        except Exception as error:  # whoever was driving: half a decision cannot be gone on from
            log.exception("a draw broke", extra={"draw": self.draw.id})
            await self._broke(changes, f"{type(error).__name__}: {error}")

    async def _broke(self, changes: _Changes, detail: str) -> None:
        """Ends it with what was decided, less the rollouts that were to begin: they are not in the store, and where
        their names are taken, those are somebody else's."""
        unborn = {new.rollout.group for new in changes.submissions if not new.rollout.index}
        for new in changes.submissions:
            if (opened := self._open.get(new.rollout.group or "")) is not None:
                opened.group = replace(opened.group, started=min(opened.group.started, new.rollout.index))
        changes.submissions.clear()
        self._drawing.end("internal_error", detail)
        self._end_all(changes)
        changes.groups = {name: group for name, group in changes.groups.items() if name not in unborn}
        await self._write(changes)

    async def _decide(self, changes: _Changes) -> bool:
        """Whether to decide again at once."""
        drawing = self._drawing
        drawing.set_version(self._version())
        drawing.elapsed_s = time.time() - self.draw.created_at
        if (most_s := self.draw.config.budget.seconds) is not None and most_s > drawing.elapsed_s:
            self._wake_in(min(3600.0, most_s - drawing.elapsed_s))
        for one in drawing.too_old():
            self._end_flying(one, GroupState.DROPPED, "stale", changes)
        for handed in drawing.hand_out():
            self._hand_out(handed, changes)
        for one in drawing.surplus():
            self._end_flying(one, GroupState.CANCELLED, "surplus", changes, returns=True)
        if drawing.check_end() is not None:
            self._end_all(changes)
        if self._yard.is_draining or not self.draw.is_active:
            return False
        held_s = self._held_until - time.monotonic()
        if held_s > 0:
            self._wake_in(held_s)
            return False
        room = max(0, self._yard.room // self.draw.config.group_size)
        if not room:  # the queue is full of others' rollouts: nobody tells when it is not
            self._wake_in(FULL_S)
        begun = drawing.admit(min(MOST_AT_ONCE, room))
        for one in begun:
            await self._begin(one, changes)
        return bool(begun)

    def _wake_in(self, delay_s: float) -> None:
        """One timer, for what is due first: the turn that follows sets it anew."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if loop.time() < self._timer.when() <= loop.time() + delay_s:
                return
            self._timer.cancel()
        self._timer = loop.call_later(delay_s, self.wake)

    async def _begin(self, one: Flying, changes: _Changes) -> None:
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
        except RollyardError as error:  # it could be run when it was taken in; now its environment is gone, say
            failed = OpenGroup(group).over(GroupState.FAILED, reason=error.code)
            assert failed.stats is not None
            self._drawing.ended(one.id, GroupState.FAILED, failed.stats)
            changes.groups[one.id] = failed
            return
        opened = OpenGroup(group, task)
        changes.submissions += opened.begin(range(config.group_size))
        changes.groups[one.id] = opened.group
        self._open[one.id] = opened

    def _look(self, opened: OpenGroup, changes: _Changes) -> None:
        """A rollout of the group has ended: what follows."""
        now = opened.standing()
        if now.start:
            if not self._yard.is_draining:
                changes.submissions += opened.begin(now.start)
                changes.groups[opened.id] = opened.group
                self._drawing.progress.figures.rollouts += len(now.start)
            return
        if now.is_over and now.failure is not None:
            is_infra = now.failure == "short_of_members"
            self._hold_off(is_infra)
            self._give_up(opened, GroupState.FAILED, now.failure, changes, is_infra=is_infra)
        elif now.is_over:
            self._hold_off(False)
            self._drawing.seen(opened.scored())
            judged = Judged(tuple(opened.rewards(now.members)), opened.task)
            is_kept = self._keep.keeps(judged)
            state = GroupState.COMPLETE if is_kept else GroupState.FILTERED
            group = opened.over(state, now.members)
            assert group.stats is not None
            self._drawing.ended(opened.id, state, group.stats)
            changes.groups[opened.id] = group
            del self._open[opened.id]
            if is_kept:
                self._complete[opened.id] = group
        elif self._is_hopeless(opened):
            self._drawing.progress.figures.rejected_early += 1
            self._give_up(opened, GroupState.FILTERED, "hopeless", changes)

    def _is_hopeless(self, opened: OpenGroup) -> bool:
        """Whether it will be rejected whatever its missing members score. With a lost one, its spare is missing."""
        stood = [index for index, end in opened.ends.items() if end.fate is Fate.STOOD]
        rewards = opened.rewards(stood)
        return self._keep.is_hopeless(rewards, max(0, opened.group.size - len(stood)))

    def _hold_off(self, is_infra: bool) -> None:
        if not is_infra:
            self._hold_s = self._held_until = 0.0
            return
        first, most = HOLD_OFF_S
        self._hold_s = min(most, max(first, 2 * self._hold_s))
        self._held_until = time.monotonic() + self._hold_s

    def _hand_out(self, handed: Handed, changes: _Changes) -> None:
        group = replace(
            self._complete.pop(handed.id),
            state=GroupState.DELIVERED,
            batch=handed.batch,
            place=handed.place,
            batch_version=handed.version,
            updated_at=time.time(),
        )
        self._drawing.delivered(group)
        changes.groups[group.id] = group

    def _end_flying(
        self, one: Flying, state: GroupState, reason: str, changes: _Changes, *, returns: bool = False
    ) -> None:
        opened = self._open.get(one.id)
        if opened is not None:
            self._give_up(opened, state, reason, changes, returns=returns)
            return
        group = replace(self._complete.pop(one.id), state=state, reason=reason, updated_at=time.time())
        assert group.stats is not None
        self._drawing.ended(one.id, state, group.stats, returns=returns)
        changes.groups[one.id] = group

    def _give_up(
        self,
        opened: OpenGroup,
        state: GroupState,
        reason: str,
        changes: _Changes,
        *,
        is_infra: bool = False,
        returns: bool = False,
    ) -> None:
        """Ends a group whose rollouts may still be at work."""
        del self._open[opened.id]
        left = opened.at_work()
        group = opened.over(state, reason=reason)
        assert group.stats is not None
        self._drawing.ended(opened.id, state, group.stats, is_infra=is_infra, returns=returns)
        changes.groups[opened.id] = group
        if left:
            self._over[opened.id] = state, len(left)
            changes.cancels += left

    def _end_all(self, changes: _Changes) -> None:
        for one in list(self._drawing.flying.values()):
            self._end_flying(one, GroupState.CANCELLED, self.draw.reason or "closed", changes)

    async def _end(self, reason: str, detail: str | None) -> None:
        changes = _Changes()
        self._drawing.end(reason, detail)
        self._end_all(changes)
        await self._write(changes)

    # --- writing --------------------------------------------------------------------------------------

    async def _write(self, changes: _Changes) -> None:
        """Writes a decision, then makes it true."""
        drawing = self._drawing
        drawing.draw = replace(drawing.draw, progress=drawing.progress, updated_at=time.time())
        closed, drawing.closed = drawing.closed, []
        as_it_stands = to_json((drawing.progress, drawing.batch, drawing.draw.is_active))
        if as_it_stands == self._written and not (changes.groups or closed or changes.undone_after is not None):
            return
        batches = (*closed, *((drawing.batch,) if drawing.batch is not None else ()))
        step = Step(
            submissions=tuple(changes.submissions),
            groups=tuple(changes.groups.values()),
            draw=drawing.draw,
            batches=batches,
            undone_after=changes.undone_after,
        )
        try:
            stored = await self._store.step(step)
        except Exception:
            drawing.closed = closed + drawing.closed
            raise
        self._written = as_it_stands
        changes.submissions.clear()
        self._yard.enqueue(stored)
        for rollout_id in changes.cancels:
            await self._yard.cancel(rollout_id, "its group was given up")
        self.bell.ring()
        self._on_change()


def _item(group: Group) -> Item:
    return Item(group.epoch, group.item, group.tries, group.turn)
