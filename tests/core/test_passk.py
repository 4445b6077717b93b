"""pass@k of one task, compared with brute force."""

import math
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.core.passk import is_correct, pass_at_k


@st.composite
def counts(draw: st.DrawFn, most: int = 9) -> tuple[int, int, int]:
    samples = draw(st.integers(1, most))
    return samples, draw(st.integers(0, samples)), draw(st.integers(1, samples))


@given(counts())
def test_pass_at_k_is_the_share_of_subsets_of_k_samples_with_a_correct_one(drawn_counts):
    samples, correct, k = drawn_counts
    choices = list(combinations([True] * correct + [False] * (samples - correct), k))
    assert pass_at_k(samples, correct, k) == sum(map(any, choices)) / len(choices)


@given(counts(most=400))
def test_pass_at_k_is_a_probability_that_grows_with_correct_samples_and_k(drawn_counts):
    samples, correct, k = drawn_counts
    here = pass_at_k(samples, correct, k)
    assert 0.0 <= here <= 1.0
    assert pass_at_k(samples, correct, 1) == correct / samples
    if correct:
        assert pass_at_k(samples, correct - 1, k) <= here
    if k > 1:
        assert pass_at_k(samples, correct, k - 1) <= here


@given(samples=st.integers(1, 6), k=st.integers(1, 6), solved=st.fractions(0, 1))
def test_pass_at_k_is_unbiased(samples, k, solved):
    """Weighted by the probability of each number of correct samples, it equals the true 1 - (1 - p)^k."""
    if k > samples:
        return
    expected = sum(
        math.comb(samples, c) * solved**c * (1 - solved) ** (samples - c) * Fraction(pass_at_k(samples, c, k))
        for c in range(samples + 1)
    )
    assert float(expected) == pytest.approx(float(1 - (1 - solved) ** k), abs=1e-12)


def test_large_counts_neither_overflow_nor_lose_digits():
    assert pass_at_k(100_000, 1, 50_000) == 0.5
    assert pass_at_k(10_000, 1, 1) == 1e-4
    assert pass_at_k(2_000, 1_001, 1_000) == 1.0


@pytest.mark.parametrize(
    ("samples", "correct", "k", "wrong"),
    [
        (3, 4, 1, "4 correct of 3 samples"),
        (3, -1, 1, "-1 correct of 3 samples"),
        (3, 1, 4, "pass@4 needs k from 1 to the number of samples, which is 3"),
        (3, 1, 0, "pass@0 needs k from 1"),
    ],
)
def test_impossible_counts_are_refused(samples, correct, k, wrong):
    with pytest.raises(ValueError, match=wrong):
        pass_at_k(samples, correct, k)


def test_a_reward_at_the_threshold_is_correct_despite_rounding():
    assert sum([0.1] * 10) < 1.0
    assert is_correct(sum([0.1] * 10))
    assert not is_correct(0.999)
    assert is_correct(0.5, threshold=0.5)
    assert not is_correct(0.5, threshold=0.6)
