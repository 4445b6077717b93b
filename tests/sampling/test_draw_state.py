"""The decisions of a draw under any behaviour of its groups and its trainer."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rollyard.core import Batch, Draw, GroupState
from rollyard.core.draw import Budget, DrawConfig, DrawItem, OnStale, Surplus
from rollyard.sampling.draw_state import MOST_TRIES, ActiveGroup, DrawState
from rollyard.sampling.task_order import TaskOrder

from .driving import Driven, config_of

CONFIGS = st.builds(
    config_of,
    st.integers(1, 12),
    epochs=st.none() | st.integers(1, 3),
    seed=st.integers(0, 5),
    max_groups_in_flight=st.none() | st.integers(1, 6),
    max_staleness=st.integers(0, 2),
    on_stale=st.sampled_from(OnStale),
    surplus=st.sampled_from(Surplus),
    patience=st.none() | st.integers(1, 8),
    budget=st.builds(
        Budget,
        groups=st.none() | st.integers(1, 20),
        rollouts=st.none() | st.integers(1, 100),
        tokens=st.none() | st.integers(1, 2000),
        batches=st.none() | st.integers(1, 6),
    ),
)


class AnyDraw(RuleBasedStateMachine):
    """Every event that a draw can have, in any order. `Driven` checks the rules after each step."""

    it: Driven

    @initialize(config=CONFIGS, want=st.integers(1, 5))
    def begin(self, config: DrawConfig, want: int):
        self.it = Driven(config, want)

    @precondition(lambda self: self.it.draw_state.draw.is_active and self.it.draw_state.batch is None)
    @rule()
    def ask(self):
        self.it.ask()

    @precondition(lambda self: self.it.open())
    @rule(is_accepted=st.booleans(), data=st.data())
    def end(self, is_accepted: bool, data: st.DataObject):
        self.it.end(data.draw(st.sampled_from(self.it.open())), is_accepted=is_accepted)

    @precondition(lambda self: self.it.open())
    @rule(is_infra=st.booleans(), data=st.data())
    def fail(self, is_infra: bool, data: st.DataObject):
        self.it.fail(data.draw(st.sampled_from(self.it.open())), is_infra=is_infra)

    @rule()
    def raise_version(self):
        self.it.raise_version()

    @rule(data=st.data())
    def rewind(self, data: st.DataObject):
        to = data.draw(st.integers(0, len(self.it.batches)))
        self.it.rewind(to, data.draw(st.integers(0, self.it.version)))

    def teardown(self):
        """In every case the trainer continues, groups end, and every group that existed has an end."""
        there = {*self.it.open(), *(group.id for group in self.it.of(GroupState.COMPLETE))}
        while self.it.draw_state.draw.is_active and there & set(self.it.draw_state.in_flight):
            if self.it.draw_state.batch is None:
                self.it.ask()
            else:
                self.it.end(self.it.open()[0])


AnyDraw.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestAnyDraw = AnyDraw.TestCase


def finish(it: Driven, dice: Random, keep_rate: float = 1.0, most: int = 10_000) -> None:
    """Requests batches and ends groups in any order, until the draw ends."""
    for _ in range(most):
        if not it.draw_state.draw.is_active:
            return
        if it.draw_state.batch is None:
            it.raise_version()
            it.ask()
        else:
            it.end(dice.choice(it.open()), is_accepted=dice.random() < keep_rate)
    raise AssertionError("the draw does not end")


@given(seed=st.integers(0, 2**32), epochs=st.integers(1, 3), keep_rate=st.floats(0.3, 1))
@settings(max_examples=40, deadline=None)
def test_a_draw_without_failures_uses_every_task_once_per_epoch_and_is_exhausted(
    seed: int, epochs: int, keep_rate: float
):
    it = Driven(config_of(7, epochs=epochs, patience=1000))
    finish(it, Random(seed), keep_rate)
    assert it.draw_state.draw.reason == "exhausted"
    assert sorted((g.epoch, g.item) for g in it.groups.values()) == [(e, i) for e in range(epochs) for i in range(7)]
    assert {group.state for group in it.groups.values()} <= {GroupState.DELIVERED, GroupState.FILTERED}
    assert it.batches[-1].is_last or it.batches[-1].delivered == it.want


def test_a_task_is_repeated_twice_after_infrastructure_failures_and_never_after_its_own():
    it = Driven(config_of(2, epochs=1), want=2)
    it.ask()
    unlucky, broken = it.open()
    it.fail(broken, is_infra=False)
    for turn in range(1, MOST_TRIES + 1):
        it.fail(it.open()[0], is_infra=True)
        (again,) = it.open()
        one = it.in_flight[again]
        assert (one.item.index, one.item.tries, one.item.turn) == (it.in_flight[unlucky].item.index, turn, turn)
    it.fail(it.open()[0], is_infra=True)
    figures = it.draw_state.progress.figures
    assert (figures.failed, figures.returned, it.draw_state.draw.reason) == (4, MOST_TRIES, "exhausted")


BUDGETS = [
    (Budget(groups=6), "budget.groups: 6 of 6", 6, 2),
    (Budget(batches=2), "budget.batches: 2 of 2", 8, 2),
    (Budget(rollouts=40), "budget.rollouts: 40 of 40", 10, 3),
    (Budget(tokens=400), "budget.tokens: ", None, None),
    (Budget(seconds=5.0), "budget.seconds: 6 of 5", None, None),
]


@pytest.mark.parametrize(("budget", "detail", "delivered", "batches"), BUDGETS)
@pytest.mark.parametrize("seed", range(3))
def test_each_budget_ends_the_draw(budget: Budget, detail: str, delivered: int | None, batches: int | None, seed: int):
    it = Driven(config_of(budget=budget))
    dice = Random(seed)
    if budget.seconds is not None:
        it.ask()
        it.draw_state.elapsed_s = 6.0
    finish(it, dice)
    draw = it.draw_state.draw
    assert draw.reason == "budget" and draw.detail is not None and draw.detail.startswith(detail)
    figures = it.draw_state.progress.figures
    assert delivered is None or figures.delivered == delivered
    assert batches is None or len(it.batches) == batches
    if budget.groups is None and budget.batches is None:
        assert figures.cancelled == 0, "groups that run when a draw may start no more still count"
    if budget.groups is not None:
        assert it.batches[-1].is_last and it.batches[-1].reason == "budget"


def test_a_draw_that_keeps_nothing_ends_after_its_patience():
    it = Driven(config_of(5, patience=12))
    it.ask()
    finish(it, Random(0), keep_rate=0.0)
    assert it.draw_state.draw.reason == "nothing_kept" and it.draw_state.progress.figures.filtered >= 12
    assert it.batches[-1].is_last and it.batches[-1].reason == "nothing_kept" and it.batches[-1].delivered == 0
    lucky = Driven(config_of(5, patience=3))
    lucky.ask()
    for number in range(60):
        if lucky.draw_state.batch is None:
            lucky.ask()
        lucky.end(lucky.open()[0], is_accepted=number % 3 == 2)
    assert lucky.draw_state.draw.is_active, "a kept group resets the patience"


def test_complete_groups_are_delivered_oldest_first():
    it = Driven(config_of(max_staleness=2), want=2)
    it.ask()
    first, second, *rest = it.open()
    it.end(rest[0])
    it.end(rest[1])
    for name in (rest[3], second, rest[2], first):
        it.end(name)
    it.ask()
    assert [g.id for g in sorted(it.of(GroupState.DELIVERED), key=lambda g: g.place or 0)][2:] == [first, second]


def test_surplus_cancel_ends_unfinished_groups_and_returns_their_tasks():
    it = Driven(config_of(surplus=Surplus.CANCEL), want=2)
    it.ask()
    delivered, cancelled = it.open()[:2], it.open()[2:]
    for name in delivered:
        it.end(name)
    assert not it.open() and {group.id for group in it.of(GroupState.CANCELLED)} == set(cancelled)
    it.ask()
    again = [it.in_flight[name].item for name in it.open()][: len(cancelled)]
    assert [(item.index, item.turn) for item in again] == [(it.in_flight[name].item.index, 1) for name in cancelled]


def test_unfinished_groups_are_carried_over_to_the_next_batch():
    it = Driven(config_of(), want=2)
    it.ask()
    slow, *others = it.open()
    for name in others[:2]:
        it.end(name)
    assert slow in it.open() and len(it.batches) == 1
    it.raise_version()
    it.ask()
    it.end(slow)
    assert it.groups[slow].state is GroupState.DELIVERED and it.groups[slow].batch == 2


def test_a_rewind_voids_newer_groups_and_delivers_the_rest_again():
    it = Driven(config_of(), want=2)
    for version in range(3):
        it.ask()
        while it.draw_state.batch is not None:
            it.end(it.open()[0])
        it.raise_version()
        assert it.version == version + 1
    newer = {g.id for g in it.groups.values() if (g.batch or 0) > 1 and g.newest_version > 1}
    older = {g.id for g in it.groups.values() if (g.batch or 0) > 1 and g.newest_version <= 1}
    assert newer and older
    it.rewind(1, 1)
    assert {g.id for g in it.of(GroupState.VOID)} >= newer and {g.id for g in it.of(GroupState.COMPLETE)} == older
    assert (it.draw_state.progress.batch, it.draw_state.progress.place, it.version) == (1, 2, 1)
    it.ask()
    assert {g.id for g in it.of(GroupState.DELIVERED) if g.batch == 2} == set(sorted(older)[:2])
    assert it.batches[-1].figures["delivered"] == 2, "undone groups are not subtracted from the new batch"
    assert it.batches[-1].figures["tokens_delivered"] == 80


def test_an_ended_draw_continues_after_a_rewind():
    it = Driven(config_of(4, epochs=1), want=2)
    finish(it, Random(0))
    assert it.draw_state.draw.reason == "exhausted" and len(it.of(GroupState.DELIVERED)) == 4
    it.rewind(0, 0)
    assert it.draw_state.draw.is_active and it.draw_state.draw.reason is None
    finish(it, Random(1))
    assert len(it.of(GroupState.DELIVERED)) == 4 and it.draw_state.draw.reason == "exhausted"


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 6), st.booleans())),
    st.data(),
)
def test_a_group_waits_while_older_ones_need_its_place(
    want: int, staleness: int, version: int, groups: list[tuple[int, bool]], data: st.DataObject
):
    """Compared with one step for each version, which took a million of them at the largest staleness."""
    config = config_of(on_stale=OnStale.WAIT, max_staleness=staleness)
    batch = Batch("d", 1, want, version, 0, delivered=data.draw(st.integers(0, want - 1)))
    in_flight = [ActiveGroup(str(order), order, DrawItem(0, order), *one) for order, one in enumerate(groups)]
    draw_state = DrawState(Draw("d", "r", config), TaskOrder(config, 100), batch, in_flight)
    oldest = ActiveGroup("oldest", 0, DrawItem(0, 0), data.draw(st.integers(0, 6)), is_complete=True)

    def may_go() -> bool:
        remaining = want - batch.delivered - 1
        for due in range(version - staleness, oldest.version):
            if remaining < sum(one.version <= due and not one.is_complete for one in in_flight):
                return False
            remaining += want
        return True

    assert draw_state._may_go(oldest, draw_state._spare_places) == may_go()


def test_the_largest_staleness_costs_no_more_steps():
    class Counted(dict[str, ActiveGroup]):
        reads = 0

        def values(self) -> Any:
            Counted.reads += 1
            assert Counted.reads < 100
            return super().values()

    it = Driven(config_of(on_stale=OnStale.WAIT, max_staleness=1_000_000, max_groups_in_flight=4), want=2)
    it.draw_state.set_version(1_000_000)
    it.draw_state.in_flight = Counted()
    it.ask()
    for group_id in it.open()[1:3]:
        it.end(group_id)
    assert len(it.batches) == 1


def test_a_pushed_source_waits_for_more_and_ends_when_it_is_closed():
    it = Driven(config_of(None), want=2)
    it.ask()
    assert it.draw_state.draw.is_active and not it.open()
    it.draw_state.order.grown = 3
    it.settle()
    for name in it.open():
        it.end(name)
    it.ask()
    assert it.draw_state.batch is not None and it.draw_state.batch.delivered == 1
    it.draw_state.progress.is_source_closed = True
    it.settle()
    assert it.draw_state.draw.reason == "exhausted" and it.batches[-1].is_last and it.batches[-1].delivered == 1


def test_a_draw_continues_from_its_stored_state():
    it = Driven(config_of(20, epochs=1), want=3)
    it.ask()
    it.end(it.open()[1])
    before = it.draw_state
    taken_up = DrawState(
        Draw("d", "r", it.config, progress=before.progress),
        TaskOrder(it.config, 20),
        before.batch,
        list(before.in_flight.values()),
    )
    assert taken_up.open_count == before.open_count and taken_up.batch == before.batch
    it.draw_state = taken_up
    finish(it, Random(3))
    assert len({(g.epoch, g.item) for g in it.of(GroupState.DELIVERED)}) == 20


def test_figures_before_filtering_cover_all_judged_groups():
    it = Driven(config_of(), want=2)
    it.ask()
    it.end(it.open()[0], is_accepted=False)
    it.end(it.open()[0])
    it.end(it.open()[0])
    figures = it.batches[0].figures
    assert (figures["judged"], figures["all_zero"], figures["filtered"], figures["delivered"]) == (3, 1, 1, 2)
    assert figures["reward_before"] == figures["pass_rate_before"] == pytest.approx(2 / 6)
