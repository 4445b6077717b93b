"""Policies that fill a trainer's batches from one world, in virtual time. Each returns a `Tally` for the figures.

- **plain**: starts as many groups as should fill the batch (at the true share with signal), waits until all have ended,
  and takes those with signal; this repeats until the batch is full. Then the trainer trains, and no rollout runs
  meanwhile. Groups beyond `want` are thrown away, the last started first.
- **reference**: asynchronous DAPO as in ProRL Agent. The job queue is refilled whenever it is empty, so that every slot
  is in use; a group without signal is discarded when its last member has ended. At the `want`-th group with signal, all
  other jobs are cancelled, and the finished rollouts of their groups are discarded. Their prompts go to the front of
  the queue: prompts are carried over, rollouts are not. Then the trainer trains, and no rollout runs meanwhile.
  `is_overlapped` runs the rollouts of the next batch while it trains, which ProRL Agent does not do.
- **ours**: the service's own rules (`DrawState`, `OpenGroup`, the filter), called in the same order as in the service.
  Rollouts continue while the trainer trains; then the version is incremented, and the next batch is requested.

In all of them the trainer takes `train_s` for a batch, and the tasks are the same in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bench._draw_world import Ended, StartedGroup, VirtualPipeline, World
from rollyard.core import Draw, Group, GroupState, Rollout, Task
from rollyard.core.draw import DrawConfig, DrawProgress, SourceKind, SourceSpec
from rollyard.core.failure import Outcome
from rollyard.core.rollout import Ending, Summary
from rollyard.core.score import Score
from rollyard.sampling.draw_state import ActiveGroup, DrawState
from rollyard.sampling.filters import FilterInput, keep_of
from rollyard.sampling.open_group import OpenGroup
from rollyard.sampling.task_order import TaskOrder


@dataclass(slots=True)
class Tally:
    """All started groups, and when the training of each batch ended."""

    started: list[StartedGroup] = field(default_factory=list[StartedGroup])
    trained_s: list[float] = field(default_factory=list[float])


Enough = Callable[[Tally], bool]
"""Called after each batch."""


def config_of(world: World, **changes: object) -> DrawConfig:
    config = DrawConfig(
        SourceSpec(SourceKind.TASKS, size=world.tasks), group_size=world.group_size, spares=0, seed=world.seed
    )
    return replace(config, **changes)


class _BaselinePolicy:
    """The common parts of plain and reference: tasks in order, and a trainer that they wait for."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pipeline = VirtualPipeline(world.slots)
        self.tally = Tally()
        self.progress = DrawProgress()
        self.is_training = False
        self._order = TaskOrder(config_of(world), world.tasks)

    def begin(self) -> StartedGroup:
        item = self._order.take(self.progress)
        started = StartedGroup(item, self.world.script(item), self.pipeline.now_s)
        self.tally.started.append(started)
        self.pipeline.begin(started)
        return started

    def next(self) -> Ended | None:
        ended = self.pipeline.next()
        if ended is None:
            self.is_training = False
            self.pipeline.version += 1
            self.tally.trained_s.append(self.pipeline.now_s)
        return ended

    def end(self, started: StartedGroup, how: str) -> None:
        started.end, started.ended_s = how, self.pipeline.now_s

    def train(self, batch: list[StartedGroup]) -> None:
        for started in batch:
            self.end(started, "delivered")
            started.batch = len(self.tally.trained_s) + 1
            started.staleness = self.pipeline.version - started.oldest
        self.is_training = True
        self.pipeline.alarm(self.world.train_s)

    def wait_for_trainer(self) -> None:
        while self.is_training:
            self.next()


def plain(world: World, enough: Enough) -> Tally:
    it = _BaselinePolicy(world)
    while not enough(it.tally):
        batch: list[StartedGroup] = []
        while len(batch) < world.want:
            missing = world.want - len(batch)
            round_of = [it.begin() for _ in range(math.ceil(missing / (1 - world.no_signal)))]
            while any(started.left for started in round_of):
                it.next()
            for started in round_of:
                if not started.script.has_signal:
                    it.end(started, "filtered")
                elif len(batch) < world.want:
                    batch.append(started)
                else:
                    it.end(started, "thrown")
        it.train(batch)
        it.wait_for_trainer()
    return it.tally


def reference(world: World, enough: Enough, *, is_overlapped: bool = False) -> Tally:
    it = _BaselinePolicy(world)
    while not enough(it.tally):
        batch: list[StartedGroup] = []
        in_flight: dict[int, StartedGroup] = {}
        while len(batch) < world.want:
            while it.pipeline.free and not it.pipeline.queued:
                started = it.begin()
                in_flight[id(started)] = started
            ended = it.next()
            if ended is None or ended.started.left:
                continue
            started = in_flight.pop(id(ended.started))
            if started.script.has_signal:
                batch.append(started)
            else:
                it.end(started, "filtered")
        it.pipeline.cancel(*in_flight.values())
        for started in in_flight.values():
            it.end(started, "thrown")
            it.progress.returned.append(replace(started.item, turn=started.item.turn + 1))
        it.wait_for_trainer()
        it.train(batch)
        if not is_overlapped:
            it.wait_for_trainer()
    it.wait_for_trainer()
    return it.tally


class RollyardSampler:
    """Our policy. With `is_early` the trainer requests its next batch before it increments the version."""

    def __init__(self, world: World, *, is_early: bool = False, **changes: object) -> None:
        self.world = world
        self.tally = Tally()
        self.pipeline = VirtualPipeline(world.slots)
        config = config_of(world, **changes)
        self.draw_state = DrawState(Draw("d", "bench", config), TaskOrder(config, world.tasks))
        self._keep = keep_of(config.keep)
        self._is_early = is_early
        self._task = Task("bench")
        self._started: dict[str, StartedGroup] = {}
        self._open: dict[str, OpenGroup] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._group_of: dict[int, str] = {}
        self._complete: dict[str, Group] = {}

    def run(self, enough: Enough) -> Tally:
        draw_state, waiting, is_training = self.draw_state, 0, False
        draw_state.ask(self.world.want)
        while draw_state.draw.is_active and not enough(self.tally):
            self._settle()
            waiting += len(draw_state.closed)  # batches that are not trained on yet
            draw_state.closed.clear()
            if waiting and not is_training:
                waiting, is_training = waiting - 1, True
                self.pipeline.alarm(self.world.train_s)
                if self._is_early:
                    draw_state.ask(self.world.want)
                    continue
            ended = self.pipeline.next()
            if ended is not None:
                self._look(ended)
                continue
            is_training = False
            self.tally.trained_s.append(self.pipeline.now_s)
            self.pipeline.version += 1
            draw_state.set_version(self.pipeline.version)
            if not self._is_early:
                draw_state.ask(self.world.want)
        return self.tally

    def _settle(self) -> None:
        """Runs the steps of a draw in the order of the service."""
        draw_state = self.draw_state
        while True:
            for one in draw_state.too_old():
                self._give_up(one, GroupState.DROPPED, returns=False)
            for handed in draw_state.hand_out():
                started = self._started.pop(handed.id)
                group = replace(self._complete.pop(handed.id), batch_version=handed.version)
                draw_state.delivered(group)
                started.end, started.ended_s = "delivered", self.pipeline.now_s
                started.batch, started.staleness = handed.batch, group.staleness or 0
            for one in draw_state.surplus():
                self._give_up(one, GroupState.CANCELLED, returns=True)
            draw_state.check_end()
            admitted = draw_state.admit()
            for one in admitted:
                self._begin(one)
            if not admitted:
                return

    def _begin(self, one: ActiveGroup) -> None:
        started = StartedGroup(one.item, self.world.script(one.item), self.pipeline.now_s)
        group = Group(one.id, "bench", self.world.group_size, spares=0, admitted_version=one.version, order=one.order)
        opened = OpenGroup(group, self._task)
        for submission in opened.begin(range(self.world.group_size)):
            self._rollouts[submission.rollout.id] = submission.rollout
        self._started[one.id], self._open[one.id], self._group_of[id(started)] = started, opened, one.id
        self.tally.started.append(started)
        self.pipeline.begin(started)

    def _look(self, ended: Ended) -> None:
        opened = self._open[self._group_of[id(ended.started)]]
        member = ended.started.script.members[ended.index]
        summary = Summary(sampled_tokens=member.sampled, oldest_version=ended.oldest, newest_version=ended.newest)
        ending = Ending(Outcome.COMPLETED, Score(member.reward), is_trainable=True, summary=summary)
        opened.take(replace(self._rollouts.pop(opened.group.rollout_id(ended.index)), ending=ending))
        now = opened.standing()
        if not now.is_over:
            return
        self.draw_state.seen(opened.scored())
        is_selected = self._keep.keeps(FilterInput(tuple(opened.rewards(now.members)), opened.task))
        state = GroupState.COMPLETE if is_selected else GroupState.FILTERED
        group = opened.over(state, now.members)
        assert group.stats is not None
        self.draw_state.ended(opened.id, state, group.stats)
        del self._open[opened.id]
        if is_selected:
            self._complete[opened.id] = group
        else:
            started = self._started.pop(opened.id)
            started.end, started.ended_s = "filtered", self.pipeline.now_s

    def _give_up(self, one: ActiveGroup, state: GroupState, *, returns: bool) -> None:
        started = self._started.pop(one.id)
        opened = self._open.pop(one.id, None)
        group = opened.over(state) if opened is not None else self._complete.pop(one.id)
        known = started.sampled
        self.pipeline.cancel(started)
        assert group.stats is not None
        self.draw_state.ended(one.id, state, group.stats, returns=returns)
        self.draw_state.came_late(state, started.sampled - known)
        started.end, started.ended_s = "thrown", self.pipeline.now_s
