"""Means over tasks and their intervals."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.sampling.estimates import mean_interval, pass_over_tasks, reward_over_tasks


def test_each_task_has_the_same_weight_regardless_of_its_samples():
    estimate = pass_over_tasks([[1.0], [0.0] * 9], 1)
    assert estimate is not None
    assert (estimate.mean, estimate.tasks, estimate.missing) == (0.5, 2, 0)
    rewards = reward_over_tasks([[1.0], [0.0] * 9, []])
    assert rewards is not None
    assert (rewards.mean, rewards.tasks, rewards.missing) == (0.5, 2, 1)


def test_a_task_with_too_few_samples_is_missing_and_not_wrong():
    estimate = pass_over_tasks([[1.0, 0.0], [1.0], []], 2)
    assert estimate is not None
    assert (estimate.mean, estimate.tasks, estimate.missing) == (1.0, 1, 2)
    assert pass_over_tasks([[1.0]], 2) is None
    assert pass_over_tasks([], 1) is None
    assert reward_over_tasks([[]]) is None
    with pytest.raises(ValueError, match="pass@0: k is 1 or more"):
        pass_over_tasks([[]], 0)


def test_the_threshold_decides_what_is_correct():
    samples = [[0.4, 0.6]]
    assert [pass_over_tasks(samples, 1, threshold=t).mean for t in (0.3, 0.5, 0.7)] == [1.0, 0.5, 0.0]  # type: ignore[union-attr]


def test_the_bootstrap_resamples_tasks():
    """Compares with all 3^3 draws of three tasks, instead of a sample of them."""
    values = [0.0, 0.25, 1.0]
    means = sorted(sum(draw) / 3 for draw in [(a, b, c) for a in values for b in values for c in values])
    low, high = mean_interval(values, level=0.8) or (0.0, 0.0)
    assert low == pytest.approx(means[2])  # 10 % of 27
    assert high == pytest.approx(means[-3])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30), st.integers(0, 2**32), st.randoms())
def test_an_interval_depends_only_on_values_and_seed_and_is_within_the_values(values, seed, shuffle: Random):
    interval = mean_interval(values, seed=seed)
    shuffled = list(values)
    shuffle.shuffle(shuffled)
    assert mean_interval(shuffled, seed=seed) == interval
    slack = 1e-9
    if max(values) - min(values) <= slack:
        assert (interval is not None) == (min(values) >= 0 and max(values) <= 1)
    else:
        assert interval is not None
        assert min(values) - slack <= interval[0] <= interval[1] <= max(values) + slack


@given(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 500))
def test_equal_values_do_not_claim_certainty(value, tasks):
    low, high = mean_interval([value] * tasks) or (value, value)
    assert 0.0 <= low <= value <= high <= 1.0
    assert high - low > 1 / (2 * tasks)


def test_values_that_differ_by_rounding_do_not_claim_certainty():
    three, two = reward_over_tasks([[0.7] * 3]), reward_over_tasks([[0.7] * 2])
    assert three is not None and two is not None
    assert three.mean != two.mean
    both = reward_over_tasks([[0.7] * 3, [0.7] * 2])
    assert both is not None and both.interval is not None
    assert both.interval[1] - both.interval[0] > 0.5


def test_wilsons_interval_is_the_known_one():
    assert mean_interval([0.0] * 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert mean_interval([1.0] * 10) == pytest.approx((0.72247, 1.0), abs=1e-5)


def test_intervals_contain_the_true_value_about_as_often_as_their_level():
    """Tasks of all difficulties, four samples each: of 100 evaluations, about 95 intervals contain the true 0.5."""
    random = Random(7)
    covered = 0
    for seed in range(100):
        tasks = [[float(random.random() < easy) for _ in range(4)] for easy in (random.random() for _ in range(40))]
        estimate = pass_over_tasks(tasks, 1, seed=seed)
        assert estimate is not None
        assert estimate.interval is not None
        covered += estimate.interval[0] <= 0.5 <= estimate.interval[1]
    assert 88 <= covered <= 99


def test_a_higher_level_gives_a_wider_interval():
    values = [0.0, 0.0, 0.5, 1.0] * 5
    low, high = mean_interval(values) or (0.0, 0.0)
    wide_low, wide_high = mean_interval(values, level=0.999) or (0.0, 0.0)
    assert wide_low < low < high < wide_high


@pytest.mark.parametrize(
    ("values", "level", "wrong"),
    [
        ([], 0.95, "at least one value is needed"),
        ([1.0], 95, "between 0 and 1, not 95"),
        ([1.0, math.nan], 0.95, "finite"),
    ],
)
def test_values_without_an_interval_are_refused(values, level, wrong):
    with pytest.raises(ValueError, match=wrong):
        mean_interval(values, level=level)


def test_the_mean_of_the_largest_rewards_has_a_finite_interval():
    estimate = reward_over_tasks([[1e150, 1e150], [-1e150, -1e150]] * 500)
    assert estimate is not None and estimate.interval is not None
    assert all(map(math.isfinite, (estimate.mean, *estimate.interval)))
