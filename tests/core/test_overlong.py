"""The soft penalty for being overlong."""

import pytest

from rollyard.core import OverlongPenalty, Score


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0), (100, 0), (101, -0.02), (150, -1), (200, -2), (10**9, -2)])
def test_the_penalty_grows_in_a_line_between_two_counts_and_no_further(tokens: int, penalty: float):
    assert OverlongPenalty(100, 200, 2.0).of(tokens) == pytest.approx(penalty)


def test_the_penalty_stands_in_the_score_by_its_own_name():
    score = OverlongPenalty(0, 10).applied(Score(1.0, {"checks": 1.0}, {"seconds": 2.0}), 5)
    assert (score.reward, score.components) == (0.5, {"checks": 1.0, "overlong_penalty": -0.5})
    assert score.metrics == {"seconds": 2.0}
