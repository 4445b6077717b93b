"""pass@k of one task, and which samples count as solved. `sampling.estimates` has means over tasks and intervals."""

from __future__ import annotations

import math

TOLERANCE = 1e-9
"""Ten checks worth 0.1 each add up to 0.9999999999999999, which counts as 1."""


def is_correct(reward: float, threshold: float = 1.0) -> bool:
    """Whether a sample with this reward counts as solved."""
    return reward >= threshold - TOLERANCE


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimates the probability that one of k samples is correct, from n samples, c correct: 1 - C(n-c, k) / C(n, k).

    Unbiased for n ≥ k, unlike 1 - (1 - c/n)^k. Exact: integers until the last division, which rounds once.
    """
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} correct of {samples} samples is impossible")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs k from 1 to the number of samples, which is {samples}")
    ways = math.comb(samples, k)
    return (ways - math.comb(samples - correct, k)) / ways
