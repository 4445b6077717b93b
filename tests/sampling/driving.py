"""A draw driven by hand: the steps of the service in their order, with a trainer and groups that a test controls.

It records every group itself, and checks the rules that always hold after each step (`check`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from rollyard.core import Batch, Draw, Group, GroupState
from rollyard.core.draw import DrawConfig, OnStale, SourceKind, SourceSpec
from rollyard.core.group import GroupStats
from rollyard.sampling.draw_state import ActiveGroup, DrawState
from rollyard.sampling.task_order import TaskOrder

ENDS = (
    GroupState.DELIVERED,
    GroupState.FILTERED,
    GroupState.FAILED,
    GroupState.CANCELLED,
    GroupState.DROPPED,
    GroupState.VOID,
)


def config_of(size: int | None = 100, **changes: object) -> DrawConfig:
    kind = SourceKind.PUSH if size is None else SourceKind.TASKS
    return replace(DrawConfig(SourceSpec(kind, size=size), group_size=4), **changes)


class Driven:
    """A draw driven by hand. Groups sample 10 tokens for each of their members."""

    def __init__(self, config: DrawConfig, want: int = 4) -> None:
        self.config = config
        self.want = want
        self.draw_state = DrawState(Draw("d", "r", config), TaskOrder(config, config.source.size))
        self.groups: dict[str, Group] = {}
        self.in_flight: dict[str, ActiveGroup] = {}  # all that ever existed
        self.batches: list[Batch] = []  # closed
        self.infra = Counter[tuple[int, int]]()

    @property
    def version(self) -> int:
        return self.draw_state.progress.version

    def open(self) -> list[str]:
        return [group.id for group in self.groups.values() if group.state is GroupState.OPEN]

    def of(self, state: GroupState) -> list[Group]:
        return [group for group in self.groups.values() if group.state is state]

    def ask(self) -> None:
        assert self.draw_state.batch is None
        self.draw_state.ask(self.want)
        self.settle()

    def raise_version(self) -> None:
        self.draw_state.set_version(self.version + 1)
        self.settle()

    def end(self, group_id: str, *, is_accepted: bool = True) -> None:
        """Ends all members of a group."""
        self.draw_state.seen([0.0, 1.0] if is_accepted else [0.0, 0.0])
        self._end(group_id, GroupState.COMPLETE if is_accepted else GroupState.FILTERED)
        self.settle()

    def fail(self, group_id: str, *, is_infra: bool) -> None:
        one = self.in_flight[group_id]
        self.infra[one.item.epoch, one.item.index] += is_infra
        self._end(group_id, GroupState.FAILED, is_infra=is_infra)
        self.settle()

    def rewind(self, to: int, version: int) -> None:
        for group_id in self.open():
            self._end(group_id, GroupState.VOID, returns=True)
        place = sum(batch.delivered for batch in self.batches if batch.number <= to)
        undone = [group for group in self.of(GroupState.DELIVERED) if (group.place or 0) > place]
        for group in self.draw_state.rewind(to, place, version, [*undone, *self.of(GroupState.COMPLETE)]):
            self.groups[group.id] = group
        self.batches = [batch for batch in self.batches if batch.number <= to]
        self.settle()

    def settle(self) -> None:
        draw_state = self.draw_state
        while True:
            for one in draw_state.too_old():
                self._end(one.id, GroupState.DROPPED)
            for handed in draw_state.hand_out():
                group = replace(
                    self.groups[handed.id],
                    state=GroupState.DELIVERED,
                    batch=handed.batch,
                    place=handed.place,
                    batch_version=handed.version,
                )
                assert self.groups[handed.id].state is GroupState.COMPLETE
                self.groups[handed.id] = group
                draw_state.delivered(group)
            for one in draw_state.surplus():
                self._end(one.id, GroupState.CANCELLED, returns=True)
            if draw_state.check_end() is not None:
                for group_id in list(draw_state.in_flight):
                    self._end(group_id, GroupState.CANCELLED)
            self.batches += draw_state.closed
            draw_state.closed.clear()
            admitted = draw_state.admit()
            for one in admitted:
                assert one.id not in self.in_flight, "a name is used once"
                self.in_flight[one.id] = one
                self.groups[one.id] = Group(
                    one.id, "r", self.config.group_size, admitted_version=one.version, order=one.order,
                    epoch=one.item.epoch, item=one.item.index, tries=one.item.tries, turn=one.item.turn,
                )  # fmt: skip
            if not admitted:
                return self.check()
            self._check_pace()

    def _end(self, group_id: str, state: GroupState, *, is_infra: bool = False, returns: bool = False) -> None:
        group = self.groups[group_id]
        assert group.state in (GroupState.OPEN, GroupState.COMPLETE), "a group ends once"
        stats = group.stats or GroupStats(sampled_tokens=10 * self.config.group_size)
        self.draw_state.ended(group_id, state, stats, is_infra=is_infra, returns=returns)
        versions = {"oldest_version": group.admitted_version, "newest_version": self.version}
        self.groups[group_id] = replace(group, state=state, stats=stats, **(versions if group.stats is None else {}))

    # --- rules that always hold -----------------------------------------------------------------------

    def _check_pace(self) -> None:
        """Before the last group was started, there was room by the stated rule."""
        draw_state, config, progress = self.draw_state, self.config, self.draw_state.progress
        complete, opened = len(self.of(GroupState.COMPLETE)), len(self.open()) - 1
        ahead = opened - (self._late() if config.on_stale is OnStale.DELIVER else 0)
        rate = 1.0 if config.on_stale is OnStale.WAIT else 0.05  # the lower bound; the upper bound has its own tests
        missing = draw_state.batch.want - draw_state.batch.delivered if draw_state.batch else 0
        assert complete + ahead * rate < max(progress.want * (config.max_staleness + 1) - progress.handed, missing)
        if config.max_groups_in_flight is not None:
            assert opened + 1 <= config.max_groups_in_flight

    def _late(self) -> int:
        """Open groups that half a batch of later ones has overtaken."""
        orders = [self.groups[name].order for name in self.open()]
        ended = [group.order for group in self.groups.values() if group.state is not GroupState.OPEN]
        most = max(1, self.draw_state.progress.want // 2)
        return sum(sum(later > order for later in ended) >= most for order in orders)

    def check(self) -> None:
        draw_state, figures = self.draw_state, self.draw_state.progress.figures
        states = Counter(group.state for group in self.groups.values())
        assert figures.admitted == len(self.groups) == states.total()
        for state in ENDS:
            assert getattr(figures, state.value) == states[state], state
        assert draw_state.open_count == states[GroupState.OPEN]
        assert set(draw_state.in_flight) == {*self.open(), *(group.id for group in self.of(GroupState.COMPLETE))}
        assert figures.tokens_delivered == 10 * self.config.group_size * states[GroupState.DELIVERED]
        self._check_items()
        self._check_batches()
        if draw_state.draw.is_active and draw_state.batch is not None:
            waits_for_push = draw_state.order.is_growing and not draw_state.order.has_more(draw_state.progress)
            assert draw_state.open_count or waits_for_push, "a batch is open and no group is running"
        if not draw_state.draw.is_active:
            assert not draw_state.in_flight and draw_state.batch is None

    def _check_items(self) -> None:
        """A task is used once per epoch and runs once at a time; it is repeated at most twice after infrastructure
        failures."""
        used = defaultdict[tuple[int, int], list[Group]](list)
        for group in self.groups.values():
            used[group.epoch, group.item].append(group)
        for item, groups in used.items():
            final = [g for g in groups if g.state not in (GroupState.FAILED, GroupState.CANCELLED, GroupState.VOID)]
            assert len(final) <= 1, f"{item} is used twice in an epoch"
            assert self.infra[item] <= 3
            assert [g.turn for g in groups] == list(range(len(groups)))
        for returned in self.draw_state.progress.returned:
            assert all(g.state is not GroupState.OPEN for g in used[returned.epoch, returned.index])

    def _check_batches(self) -> None:
        places = sorted(group.place for group in self.of(GroupState.DELIVERED) if group.place is not None)
        assert places == list(range(1, len(places) + 1)), "the order of delivery has no gap"
        assert [batch.number for batch in self.batches] == list(range(1, len(self.batches) + 1))
        for batch in self.batches:
            of_it = sorted(group.place or 0 for group in self.groups.values() if group.batch == batch.number)
            assert of_it == list(range(batch.after + 1, batch.after + batch.delivered + 1))
            assert (batch.delivered == batch.want) or (batch.is_last and batch.reason == self.draw_state.draw.reason)
            assert all(value >= 0 for name, value in batch.figures.items() if isinstance(value, int)), batch.figures
