"""The members of a group depend on index and infrastructure, never on the order of ends."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.core import Blame, Failure, Group, OverlongPenalty, Rollout, Task
from rollyard.core.failure import Outcome
from rollyard.core.group import mean_of, spread_of
from rollyard.core.rollout import Ending, LostAttempt, Summary
from rollyard.core.score import Score
from rollyard.sampling.membership import (
    GroupStanding,
    MemberEnd,
    MemberFate,
    counted,
    end_of,
    judged,
    standing,
    stats_of,
    versions_of,
)

TASK = Task("shell")
FATES = st.sampled_from([MemberFate.STOOD, MemberFate.STOOD, MemberFate.LOST, MemberFate.CANCELLED])


def stood(index: int, reward: float | None = 1.0, *, is_trainable: bool = True) -> MemberEnd:
    return MemberEnd(
        index, MemberFate.STOOD, reward, is_trainable=is_trainable and reward is not None, sampled_tokens=10
    )


def ended(failure: Failure | None, reward: float | None, outcome: Outcome, *, is_trainable: bool = False) -> MemberEnd:
    score = None if reward is None else Score(reward)
    summary = Summary(sampled_tokens=7, oldest_version=2, newest_version=3)
    ending = Ending(outcome, score, failure, is_trainable, summary)
    lost = (LostAttempt(1, "sandbox_lost", "", tokens_lost=5),)
    return end_of(Rollout("g-4", "r", TASK, group="g", index=4, lost=lost, ending=ending))


@pytest.mark.parametrize(
    ("blame", "fate"),
    [
        (Blame.INFRA, MemberFate.LOST),
        (Blame.TASK, MemberFate.HOPELESS),
        (Blame.CLIENT, MemberFate.CANCELLED),
        (Blame.POLICY, MemberFate.STOOD),
    ],
)
def test_a_failure_without_a_score_counts_by_its_blame(blame: Blame, fate: MemberFate):
    end = ended(Failure("code", blame, ""), None, Outcome.FAILED)
    assert (end.fate, end.reward, end.is_trainable, end.code) == (fate, None, False, "code")


def test_a_scored_rollout_keeps_its_place_and_its_lost_attempts_tokens():
    whole = ended(None, 0.5, Outcome.COMPLETED, is_trainable=True)
    assert (whole.index, whole.fate, whole.reward, whole.is_trainable) == (4, MemberFate.STOOD, 0.5, True)
    assert (whole.sampled_tokens, whole.oldest_version, whole.newest_version) == (12, 2, 3)
    cut = ended(Failure("run_deadline", Blame.POLICY, ""), 0.0, Outcome.TRUNCATED)
    assert (cut.fate, cut.reward, cut.is_trainable) == (MemberFate.STOOD, 0.0, False)


def run_through(
    group: Group, fates: list[MemberFate], order: list[int]
) -> tuple[Group, GroupStanding, dict[int, MemberEnd]]:
    """Ends the started rollouts in that order of preference, and starts spares when required, until the group is
    over."""
    ends: dict[int, MemberEnd] = {}
    now = standing(group, ends)
    while not now.is_over:
        if now.start:
            assert now.start.start == group.started, "rollouts are started in order of index"
            group = Group(group.id, group.run, group.size, group.spares, group.min_members, started=now.start.stop)
        at_work = [index for index in order if index < group.started and index not in ends]
        assert at_work, "a group that is not over has a running rollout"
        index = at_work[0]
        ends[index] = MemberEnd(
            index, fates[index], 1.0 if fates[index] is MemberFate.STOOD else None, sampled_tokens=1
        )
        now = standing(group, ends)
    return group, now, ends


@given(st.data())
@settings(deadline=None)
def test_the_members_do_not_depend_on_the_order_of_ends(data: st.DataObject):
    size, spares = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    least = data.draw(st.none() | st.integers(1, size))
    fates = data.draw(st.lists(FATES, min_size=size + spares, max_size=size + spares))
    order = data.draw(st.permutations(range(size + spares)))
    fresh = Group("g", "r", size, spares, least, started=size)
    group, now, ends = run_through(fresh, fates, list(order))
    by_index, then, _ = run_through(fresh, fates, list(range(size + spares)))
    assert (now.members, now.failure, group.started) == (then.members, then.failure, by_index.started)

    places = [index for index in range(size + spares) if fates[index] is not MemberFate.LOST][:size]
    members = tuple(index for index in places if fates[index] is MemberFate.STOOD)
    enough = size if least is None else least
    assert now.members == (members if len(members) >= enough else ())
    assert (now.failure is None) is (len(members) >= enough)
    lost = sum(fates[index] is MemberFate.LOST for index in ends)
    assert group.started == size + min(lost, spares), "a spare replaces a lost member, and no other"
    assert set(ends) == set(range(group.started)), "no rollout is left out for being slow"


def test_a_spare_waits_for_a_loss_and_takes_that_place_only():
    group = Group("g", "r", 3, spares=2, started=3)
    assert standing(group, {0: stood(0), 1: stood(1)}) == GroupStanding(), "the third is slow: it is waited for"
    lost = {0: stood(0), 1: MemberEnd(1, MemberFate.LOST)}
    assert standing(group, lost) == GroupStanding(start=range(3, 4))
    with_spare = Group("g", "r", 3, spares=2, started=4)
    assert standing(with_spare, {**lost, 3: stood(3)}) == GroupStanding(), "the spare was faster than member 2"
    assert standing(with_spare, {**lost, 3: stood(3), 2: stood(2)}) == GroupStanding(is_over=True, members=(0, 2, 3))


def test_without_spares_left_a_group_is_short_or_delivered_short():
    lost = {0: stood(0), 1: MemberEnd(1, MemberFate.LOST), 2: stood(2)}
    assert standing(Group("g", "r", 3, spares=0, started=3), lost).failure == "short_of_members"
    assert standing(Group("g", "r", 3, spares=0, min_members=2, started=3), lost).members == (0, 2)


def test_a_cancelled_member_is_not_replaced_by_a_spare():
    ends = {0: stood(0), 1: MemberEnd(1, MemberFate.CANCELLED)}
    assert standing(Group("g", "r", 2, spares=2, started=2), ends) == GroupStanding(is_over=True, failure="cancelled")


@pytest.mark.parametrize("order", list(permutations((MemberFate.HOPELESS, MemberFate.LOST))))
def test_a_task_that_cannot_be_done_fails_the_group_at_once(order: tuple[MemberFate, ...]):
    ends = {index: MemberEnd(index, fate, code="task_invalid") for index, fate in enumerate(order)}
    assert standing(Group("g", "r", 4, started=4), ends) == GroupStanding(is_over=True, failure="task_invalid")


def test_statistics_cover_the_members_that_are_trained_on():
    ends = {
        0: stood(0, 1.0),
        1: stood(1, 0.0),
        2: stood(2, 1.0, is_trainable=False),
        3: stood(3, None),
        4: MemberEnd(4, MemberFate.LOST, sampled_tokens=3),
    }
    assert counted(ends, (0, 1, 2, 3)) == [1.0, 0.0]
    stats = stats_of(ends, (0, 1, 2, 3))
    assert (stats.members, stats.scored, stats.trainable, stats.infra_failures) == (4, 3, 2, 1)
    assert (stats.mean, stats.spread, stats.pass_rate, stats.lowest, stats.highest) == (0.5, 0.5, 0.5, 0.0, 1.0)
    assert stats.sampled_tokens == 43, "lost tokens were sampled, too"
    empty = stats_of({}, ())
    assert (empty.mean, empty.spread, empty.pass_rate, empty.lowest) == (None, None, None, None)


def test_versions_are_those_of_members_that_sampled():
    ends = {
        0: MemberEnd(0, MemberFate.STOOD, oldest_version=3, newest_version=4),
        1: MemberEnd(1, MemberFate.STOOD),
        2: MemberEnd(2, MemberFate.LOST, oldest_version=1, newest_version=9),
        3: MemberEnd(3, MemberFate.STOOD, oldest_version=2, newest_version=3),
    }
    assert versions_of(ends, (0, 1, 3)) == (2, 4)
    assert versions_of(ends, (1,)) == (-1, -1)


def test_a_filter_and_the_pass_rate_use_the_reward_without_the_overlong_penalty():
    ends = {
        index: end_of(
            Rollout(
                f"g-{index}",
                "r",
                TASK,
                group="g",
                index=index,
                ending=Ending(Outcome.COMPLETED, OverlongPenalty(0, 4).applied(Score(1.0), index), is_trainable=True),
            )
        )
        for index in range(3)
    }
    stats = stats_of(ends, (0, 1, 2))
    assert (stats.mean, stats.lowest, stats.pass_rate) == (0.75, 0.5, 1.0)
    assert counted(ends, (0, 1, 2)) == [1.0, 0.75, 0.5] and judged(ends, (0, 1, 2)) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("most", [1.0, 1e15, 1e150, 1e300])
def test_statistics_of_a_million_members_with_any_rewards_are_finite(most: float):
    rewards = [most, -most] * 500_000
    assert spread_of(rewards) == pytest.approx(most) and mean_of(rewards) == 0.0
