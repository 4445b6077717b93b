"""How many groups a draw starts, and how old a group may get: the pace by the keep rate, and `on_stale`."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.core import GroupState
from rollyard.core.draw import OnStale, Surplus
from rollyard.core.group import GroupStats
from rollyard.sampling.draw_state import ActiveGroup

from .driving import Driven, config_of

pytestmark = pytest.mark.slow


@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 3),
    want=st.integers(1, 6),
    keep_rate=st.floats(0.3, 1),
    is_early=st.booleans(),
    is_lifo=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_under_wait_no_group_is_ever_too_old(
    seed: int, staleness: int, want: int, keep_rate: float, is_early: bool, is_lifo: bool
):
    """A trainer that takes one batch per version. `is_early`: it requests the next one before it raises the version,
    which happens at any moment after that, but before that batch is taken."""
    dice = Random(seed)
    it = Driven(config_of(200, max_staleness=staleness, on_stale=OnStale.WAIT), want)
    it.ask()
    is_raise_due = False
    for _ in range(100):
        if it.draw_state.batch is None:
            if is_raise_due or not is_early:
                it.raise_version()
            is_raise_due = is_early
            it.ask()
        elif is_raise_due and dice.random() < 0.2:
            is_raise_due = False
            it.raise_version()
        else:
            opened = it.open()
            it.end(opened[-1] if is_lifo else dice.choice(opened), is_accepted=dice.random() < keep_rate)
    assert it.draw_state.progress.figures.dropped == 0 and it.draw_state.progress.figures.stale == 0
    for group in it.of(GroupState.DELIVERED):
        assert group.staleness is not None and group.staleness <= staleness
    assert len(it.batches) > 1


@pytest.mark.parametrize(
    ("on_stale", "surplus"), [(OnStale.WAIT, Surplus.CARRY), (OnStale.DROP, Surplus.CANCEL)], ids=["wait", "cancel"]
)
@given(seed=st.integers(0, 2**32), want=st.integers(1, 6), keep_rate=st.floats(0.3, 1))
@settings(max_examples=30, deadline=None)
def test_a_trainer_can_sample_and_learn_in_turns(
    on_stale: OnStale, surplus: Surplus, seed: int, want: int, keep_rate: float
):
    """With `max_staleness` 0, no group runs while the trainer learns from a batch."""
    dice = Random(seed)
    it = Driven(config_of(200, max_staleness=0, on_stale=on_stale, surplus=surplus), want)
    it.ask()
    for _ in range(100):
        if it.draw_state.batch is not None:
            it.end(dice.choice(it.open()), is_accepted=dice.random() < keep_rate)
            continue
        assert not it.open(), "no group runs meanwhile"
        it.raise_version()
        it.ask()
    assert len(it.batches) > 1
    assert all(group.staleness == 0 for group in it.of(GroupState.DELIVERED))
    assert on_stale is OnStale.DROP or not it.draw_state.progress.figures.dropped


def test_under_wait_the_last_places_are_reserved_for_the_oldest_groups():
    it = Driven(config_of(max_staleness=0, on_stale=OnStale.WAIT), want=2)
    it.ask()
    first, second = it.open()
    it.raise_version()
    third = next(name for name in it.open() if name not in (first, second)) if len(it.open()) > 2 else None
    it.end(second)
    assert third is None and it.draw_state.batch is not None and it.draw_state.batch.delivered == 1
    it.end(first)
    assert {group.id for group in it.of(GroupState.DELIVERED)} == {first, second}


def test_under_wait_places_are_reserved_in_time():
    """There are two old groups, and two batches that may contain them: a newer complete group must not take one of
    their places."""
    it = Driven(config_of(max_staleness=2, on_stale=OnStale.WAIT), want=1)
    it.ask()
    *old, first = it.open()
    it.end(first)
    it.raise_version()
    it.ask()
    (newer,) = set(it.open()) - set(old)
    it.end(newer)
    assert it.groups[newer].state is GroupState.COMPLETE and it.draw_state.batch is not None
    it.end(old[1])
    it.raise_version()
    it.ask()
    it.end(old[0])
    assert [it.groups[name].batch for name in (first, old[1], old[0])] == [1, 2, 3]
    it.raise_version()
    it.ask()
    assert it.groups[newer].batch == 4 and it.draw_state.progress.figures.dropped == 0


def test_skipped_versions_drop_old_groups_under_wait_and_drop_but_not_under_deliver():
    for on_stale, dropped in ((OnStale.WAIT, 3), (OnStale.DROP, 3), (OnStale.DELIVER, 0)):
        it = Driven(config_of(max_staleness=1, on_stale=on_stale), want=1)
        it.ask()
        it.end(it.open()[0])
        for _ in range(3):
            it.raise_version()
        old = len([name for name in it.open() if it.in_flight[name].version < 2])
        it.ask()
        assert it.draw_state.progress.figures.dropped == (old if dropped else 0)
        assert bool(old)


def test_the_pace_follows_the_keep_rate_and_always_fills_the_open_batch():
    it = Driven(config_of(max_staleness=1), want=4)
    assert it.draw_state.admit() == [], "no batch was requested"
    it.ask()
    assert len(it.open()) == 8, "enough for two batches, while the keep rate is unknown"
    for _ in range(4):
        it.end(it.open()[0])
    assert (len(it.batches), len(it.open())) == (1, 4), "the version is unchanged: S more batches are enough"
    it.raise_version()
    assert len(it.open()) == 8
    tight = Driven(config_of(max_staleness=0, max_groups_in_flight=3), want=4)
    tight.ask()
    assert len(tight.open()) == 3


def test_fast_failures_do_not_make_a_draw_start_a_thousand_groups():
    """The groups judged first are those that failed at once; the others have signal and take long."""
    it = Driven(config_of(10_000, max_staleness=1, patience=10_000), want=32)
    it.ask()
    for _ in range(100):
        fast = [name for name in it.open() if it.in_flight[name].item.index % 2]
        if not fast:
            break
        it.end(fast[0], is_accepted=False)
    assert len(it.open()) <= 200, "about three times what two batches need at a keep rate of a half"


def test_a_straggler_delays_no_group_once_half_a_batch_has_overtaken_it():
    it = Driven(config_of(10_000, max_staleness=1), want=4)
    it.ask()
    slow = it.open()[0]
    for _ in range(40):
        if it.draw_state.batch is None:
            it.raise_version()
            it.ask()
        it.end(next(name for name in it.open() if name != slow))
        others = len(it.open()) - 1
        batch = it.draw_state.batch
        handed = batch.delivered if batch is not None else 4
        overtakers = len(it.batches) * 4 + handed if batch is not None else len(it.batches) * 4
        if overtakers >= 2:
            assert others == 8 - handed, "as many others run as without it"


@pytest.mark.parametrize("seed", range(3))
def test_in_the_long_run_as_many_groups_start_as_the_filter_needs(seed: int):
    dice = Random(seed)
    it = Driven(config_of(10_000, max_staleness=1), want=8)
    it.ask()
    opened: list[int] = []
    for _ in range(300):
        if it.draw_state.batch is None:
            it.raise_version()
            it.ask()
        it.end(dice.choice(it.open()), is_accepted=dice.random() < 0.25)
        opened.append(len(it.open()))
    # two batches of eight at a quarter are 64; as they end in random order, most of them are overtaken at some time
    assert 28 <= max(opened[100:]) <= 260, "by the measured keep rate"


@pytest.mark.parametrize("max_staleness", [0, 3])
@pytest.mark.parametrize("on_stale", OnStale)
def test_starting_and_delivering_a_huge_batch_is_not_quadratic(on_stale: OnStale, max_staleness: int):
    class Counted(dict[str, ActiveGroup]):
        looks = 0

        def values(self) -> Any:
            self.looks += 1
            return super().values()

    it = Driven(config_of(3000, on_stale=on_stale, max_staleness=max_staleness), want=500)
    it.draw_state.in_flight = in_flight = Counted()
    it.draw_state.set_version(5)
    it.draw_state.ask(500)
    admitted = it.draw_state.admit()
    assert len(admitted) == 500 * (max_staleness + 1) and in_flight.looks < 10
    for one in admitted:
        it.draw_state.ended(one.id, GroupState.COMPLETE, GroupStats())
    in_flight.looks = 0
    assert [handed.id for handed in it.draw_state.hand_out()] == [one.id for one in admitted[:500]]
    assert in_flight.looks < 10


def test_max_staleness_0_alone_does_not_make_a_trainer_take_turns():
    """Under `deliver`, groups that were started in excess, by the keep rate so far, continue."""
    it = Driven(config_of(200, max_staleness=0), want=3)
    dice = Random(1)
    it.ask()
    while len(it.batches) < 4:
        if it.draw_state.batch is None:
            it.raise_version()
            it.ask()
        it.end(dice.choice(it.open()), is_accepted=dice.random() < 0.5)
    assert it.draw_state.batch is None and it.open()
