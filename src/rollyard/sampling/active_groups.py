"""The open and complete groups of a draw, and what follows from the ends of their rollouts. No I/O.

The changes of one decision are collected in `GroupChanges`, which `draw_runner.py` writes atomically and then applies.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rollyard.core import Group, GroupState, Rollout
from rollyard.core.draw import DrawItem
from rollyard.sampling.draw_state import ActiveGroup, DeliveredGroup, DrawState
from rollyard.sampling.filters import FilterInput, GroupFilter
from rollyard.sampling.membership import MemberFate, end_of
from rollyard.sampling.open_group import OpenGroup
from rollyard.store.base import Submission


@dataclass(slots=True)
class GroupChanges:
    """What one decision writes and then applies."""

    submissions: list[Submission] = field(default_factory=list[Submission])
    groups: dict[str, Group] = field(default_factory=dict[str, Group])
    cancels: list[str] = field(default_factory=list[str])
    undone_after: int | None = None


class ActiveGroups:
    """The open and complete groups of one draw. It reports every end to `draw_state`, which makes the decisions."""

    def __init__(self, draw_state: DrawState, keep: GroupFilter) -> None:
        self.draw_state = draw_state
        self.open: dict[str, OpenGroup] = {}
        self._keep = keep
        self._complete: dict[str, Group] = {}
        self._over: dict[str, tuple[GroupState, set[str]]] = {}  # ended early: state, and rollouts still running
        self._touched: dict[str, None] = {}

    @property
    def is_at_work(self) -> bool:
        """Whether some of its rollouts have not ended."""
        return bool(self.open or self._over)

    def adopt(self, group: Group) -> ActiveGroup:
        """Takes over a group that an earlier process left. An open one is evaluated once its rollouts are read."""
        is_complete = group.state is GroupState.COMPLETE
        if is_complete:
            self._complete[group.id] = group
        else:
            self.open[group.id] = OpenGroup(group)
            self._touched[group.id] = None
        item = DrawItem(group.epoch, group.item, group.tries, group.turn)
        return ActiveGroup(group.id, group.order, item, group.admitted_version, is_complete)

    def take(self, rollout: Rollout) -> bool:
        """Records the end of a rollout. Returns whether it changes anything here."""
        group_id = rollout.group or ""
        opened = self.open.get(group_id)
        if opened is not None:
            if not opened.take(rollout):
                return False
            self._touched[group_id] = None
            return True
        state, running = self._over.get(group_id, (GroupState.OPEN, set[str]()))
        if rollout.id not in running:
            return False
        self.draw_state.came_late(state, end_of(rollout).sampled_tokens)
        running.discard(rollout.id)
        if not running:
            del self._over[group_id]
        return True

    def apply_ends(self, changes: GroupChanges, *, may_begin: bool) -> list[bool]:
        """Applies the ends since the last call. Returns for each group that is over whether infra caused it."""
        touched, self._touched = self._touched, {}
        verdicts = [self._apply_ends(self.open[name], changes, may_begin) for name in touched if name in self.open]
        return [is_infra for is_infra in verdicts if is_infra is not None]

    def _apply_ends(self, opened: OpenGroup, changes: GroupChanges, may_begin: bool) -> bool | None:
        now = opened.standing()
        if now.start:
            if may_begin:
                changes.submissions += opened.begin(now.start)
                changes.groups[opened.id] = opened.group
                self.draw_state.progress.figures.rollouts += len(now.start)
            return None
        if now.is_over and now.failure is not None:
            is_infra = now.failure == "short_of_members"
            self._give_up(opened, GroupState.FAILED, now.failure, changes, is_infra=is_infra)
            return is_infra
        if now.is_over:
            self._judge(opened, now.members, changes)
            return False
        if self._is_hopeless(opened):
            self.draw_state.progress.figures.rejected_early += 1
            self._give_up(opened, GroupState.FILTERED, "hopeless", changes)
        return None

    def _judge(self, opened: OpenGroup, members: tuple[int, ...], changes: GroupChanges) -> None:
        """Filters a group that has all its members."""
        self.draw_state.seen(opened.scored())
        is_accepted = self._keep.keeps(FilterInput(tuple(opened.rewards(members)), opened.task))
        state = GroupState.COMPLETE if is_accepted else GroupState.FILTERED
        group = opened.over(state, members)
        assert group.stats is not None
        self.draw_state.ended(opened.id, state, group.stats)
        changes.groups[opened.id] = group
        del self.open[opened.id]
        if is_accepted:
            self._complete[opened.id] = group

    def _is_hopeless(self, opened: OpenGroup) -> bool:
        """Whether it will be rejected whatever its missing members score. The spare of a lost one is missing."""
        stood = [index for index, end in opened.ends.items() if end.fate is MemberFate.STOOD]
        rewards = opened.rewards(stood)
        return self._keep.is_hopeless(rewards, max(0, opened.group.size - len(stood)))

    def begin(self, opened: OpenGroup, changes: GroupChanges) -> None:
        changes.submissions += opened.begin(range(opened.group.size))
        changes.groups[opened.id] = opened.group
        self.open[opened.id] = opened

    def hand_out(self, handed: DeliveredGroup, changes: GroupChanges) -> None:
        group = replace(
            self._complete.pop(handed.id),
            state=GroupState.DELIVERED,
            batch=handed.batch,
            place=handed.place,
            batch_version=handed.version,
            updated_at=time.time(),
        )
        self.draw_state.delivered(group)
        changes.groups[group.id] = group

    def end(
        self, one: ActiveGroup, state: GroupState, reason: str, changes: GroupChanges, *, returns: bool = False
    ) -> None:
        """Ends a group that is open or complete."""
        opened = self.open.get(one.id)
        if opened is not None:
            self._give_up(opened, state, reason, changes, returns=returns)
            return
        group = replace(self._complete.pop(one.id), state=state, reason=reason, updated_at=time.time())
        assert group.stats is not None
        self.draw_state.ended(one.id, state, group.stats, returns=returns)
        changes.groups[one.id] = group

    def end_all(self, changes: GroupChanges) -> None:
        for one in list(self.draw_state.in_flight.values()):
            self.end(one, GroupState.CANCELLED, self.draw_state.draw.reason or "closed", changes)

    def rewind(
        self, to: int, place: int, version: int, taken: Iterable[Group], changes: GroupChanges, *, acked_place: int = 0
    ) -> None:
        """Applies `DrawState.rewind`; `taken` are the groups of the batches that are undone."""
        for group in self.draw_state.rewind(
            to, place, version, [*taken, *self._complete.values()], acked_place=acked_place
        ):
            changes.groups[group.id] = replace(group, updated_at=time.time())
            if group.state is GroupState.COMPLETE:
                self._complete[group.id] = changes.groups[group.id]
            else:
                self._complete.pop(group.id, None)
        for opened in list(self.open.values()):  # newer weights may be sampling for them now
            self._give_up(opened, GroupState.VOID, "rewound", changes, returns=True)

    def _give_up(
        self,
        opened: OpenGroup,
        state: GroupState,
        reason: str,
        changes: GroupChanges,
        *,
        is_infra: bool = False,
        returns: bool = False,
    ) -> None:
        """Ends a group whose rollouts may still be running."""
        del self.open[opened.id]
        running = opened.at_work()
        group = opened.over(state, reason=reason)
        assert group.stats is not None
        self.draw_state.ended(opened.id, state, group.stats, is_infra=is_infra, returns=returns)
        changes.groups[opened.id] = group
        if running:
            self._over[opened.id] = state, set(running)
            changes.cancels += running
