"""The filters, and that a group is rejected early only when its rejection is certain."""

from fractions import Fraction
from importlib.metadata import EntryPoint
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.core.draw import KeepSpec
from rollyard.core.failure import InvalidRequest
from rollyard.core.task import Task
from rollyard.sampling import filters as keep
from rollyard.sampling.filters import FilterInput, GroupFilter, KeepAll, KeepPassRate, KeepSpread, keep_of

TASK = Task("shell")
MISSING_MEMBER = (None, 0.0, 1.0)
"""How a member may come out that has not ended: not trained on, failed, passed."""


def keeps(group_filter: GroupFilter, *rewards: float) -> bool:
    return group_filter.keeps(FilterInput(rewards, TASK))


def test_all_keeps_everything():
    assert keeps(KeepAll()) and keeps(KeepAll(), 0.0, 0.0) and not KeepAll().is_hopeless([], 0)


def test_spread_needs_rewards_that_differ():
    assert keeps(KeepSpread(), 0.0, 1.0)
    assert not keeps(KeepSpread(), 1.0, 1.0) and not keeps(KeepSpread(), 1.0) and not keeps(KeepSpread())
    assert not keeps(KeepSpread(), 1.0, sum([0.1] * 10)), "0.9999999999999999 is 1"
    assert keeps(KeepSpread(0.4), 0.0, 1.0) and not keeps(KeepSpread(0.5), 0.0, 1.0)


@given(st.lists(st.floats(-10, 10), max_size=8), st.integers(1, 8))
def test_a_group_with_a_missing_member_may_always_get_a_spread(rewards: list[float], missing: int):
    assert not KeepSpread(3.0).is_hopeless(rewards, missing)


def test_a_pass_rate_includes_both_ends():
    some = KeepPassRate(0.25, 0.75)
    assert keeps(some, 1.0, 0.0, 0.0, 0.0) and keeps(some, 1.0, 1.0, 1.0, 0.0)
    assert not keeps(some, 0.0, 0.0, 0.0, 0.0) and not keeps(some, 1.0, 1.0, 1.0, 1.0) and not keeps(some)
    assert keeps(KeepPassRate(0.1, 0.9, threshold=0.5), 0.5, 0.4)


SHARES = sorted({float(Fraction(passed, size)) for size in range(1, 6) for passed in range(size + 1)})


def certain(group_filter: KeepPassRate, rewards: list[float], missing: int) -> bool:
    """Whether no outcome of the missing members gives a group that is kept, by trying all of them."""
    for outcomes in product(MISSING_MEMBER, repeat=missing):
        if keeps(group_filter, *rewards, *(reward for reward in outcomes if reward is not None)):
            return False
    return True


def test_early_rejection_is_certain_in_every_possible_case():
    """Every group of up to five in every state, every range whose ends are reachable shares."""
    early = 0
    for low, high in ((low, high) for low in SHARES for high in SHARES if low <= high):
        group_filter = KeepPassRate(low, high)
        for ended in range(6):
            for passes, missing in product(range(ended + 1), range(6 - ended)):
                rewards = [1.0] * passes + [0.0] * (ended - passes)
                if group_filter.is_hopeless(rewards, missing):
                    early += missing > 0
                    assert certain(group_filter, rewards, missing), (low, high, rewards, missing)
                elif not missing:
                    assert keeps(group_filter, *rewards) or not rewards, "with no member missing, the result is known"
    assert early > 400, "some groups are rejected early"


@pytest.mark.parametrize(("low", "high"), [(0.125, 0.875), (0.0, 0.5), (0.5, 1.0), (0.25, 0.25)])
def test_a_pass_rate_filter_rejects_as_early_as_possible(low: float, high: float):
    """In a group of eight that are all trained on, it rejects as soon as the missing ones cannot change the result."""
    group_filter = KeepPassRate(low, high)
    for ended in range(9):
        for passes in range(ended + 1):
            missing = 8 - ended
            rewards = [1.0] * passes + [0.0] * (ended - passes)
            reachable = any(
                keeps(group_filter, *rewards, *[1.0] * more, *[0.0] * (missing - more)) for more in range(missing + 1)
            )
            assert group_filter.is_hopeless(rewards, missing) is not reachable


@given(st.lists(st.floats(0, 1), max_size=6), st.integers(0, 4), st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 1))
@settings(deadline=None)
def test_early_rejection_is_certain_for_any_rewards(
    rewards: list[float], missing: int, one: float, other: float, threshold: float
):
    group_filter = KeepPassRate(min(one, other), max(one, other), threshold)
    if group_filter.is_hopeless(rewards, missing):
        assert certain(group_filter, rewards, missing)


def test_a_draw_names_its_filter(monkeypatch: pytest.MonkeyPatch):
    assert isinstance(keep_of(KeepSpec("all")), KeepAll)
    assert keep_of(KeepSpec(above=0.2)) == KeepSpread(0.2)
    assert keep_of(KeepSpec("pass_rate", low=0.1, high=0.9, threshold=0.5)) == KeepPassRate(0.1, 0.9, 0.5)
    monkeypatch.setattr(keep, "plugins", lambda group: installed if group == "rollyard.filters" else [])
    installed = [
        EntryPoint("best", f"{__name__}:best_above", keep.ENTRY_POINTS),
        EntryPoint("broken", f"{__name__}:nothing", keep.ENTRY_POINTS),
    ]
    named = keep_of(KeepSpec("filter", name="best", options={"above": 0.5}))
    assert keeps(named, 0.1, 0.6) and not keeps(named, 0.1, 0.4) and not named.is_hopeless([0.0], 0)
    with pytest.raises(InvalidRequest, match=r"there is no filter .other. \(best, broken\)"):
        keep_of(KeepSpec("filter", name="other"))
    with pytest.raises(InvalidRequest, match="'broken' cannot be loaded"):
        keep_of(KeepSpec("filter", name="broken"))


def best_above(judged: FilterInput, above: float) -> bool:
    return max(judged.rewards) > above
