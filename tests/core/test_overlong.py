"""The soft overlong punishment."""

import pytest

from rollyard.core import OverlongPenalty, Score


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0), (100, 0), (101, -0.02), (150, -1), (200, -2), (10**9, -2)])
def test_the_penalty_is_linear_between_two_token_counts_and_constant_outside(tokens: int, penalty: float):
    assert OverlongPenalty(100, 200, 2.0).of(tokens) == pytest.approx(penalty)


def test_the_penalty_is_a_component_of_the_score():
    score = OverlongPenalty(0, 10).applied(Score(1.0, {"checks": 1.0}, {"seconds": 2.0}), 5)
    assert (score.reward, score.components) == (0.5, {"checks": 1.0, "overlong_penalty": -0.5})
    assert score.metrics == {"seconds": 2.0}
