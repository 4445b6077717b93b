"""A score contains only numbers that statistics can use."""

import math

import pytest

from rollyard.core import Score


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e151, -1e200, 1.7e308])
def test_a_number_that_would_break_statistics_is_refused(number: float) -> None:
    for make in (
        lambda: Score(number),
        lambda: Score(1.0, components={"a": number}),
        lambda: Score(1.0, metrics={"a": number}),
    ):
        with pytest.raises(ValueError, match="a score holds"):
            make()


def test_the_largest_number_can_be_squared_and_summed() -> None:
    largest = Score(1e150).reward
    assert math.isfinite(sum(largest * largest for _ in range(1000)) * 1000)
