"""The statistics of an evaluation: pass@k, means over tasks, and how far to trust them.

The tasks are the sample, not the rollouts: those of one task are alike (it is easy, or it is hard), and counted as
independent they would make an interval far too narrow. So everything is first computed per task, then averaged over
tasks with equal weight, and an interval says what other tasks of the same kind might have given.

The interval is the percentile bootstrap over tasks: a task's value is no yes or no (pass@k of n samples is a fraction,
and so is a reward), so no formula for proportions fits, and near 0 and 1 the means are skewed as no normal interval is.
Where all tasks have one value (each solved, none solved, a single task), resampling sees no spread and would claim
certainty. There it is Wilson's interval with one trial per task, which is wide enough for any values between 0 and 1:
none with that mean vary more than a coin does. For equal values outside of that there is no bound, and no interval.

Samples that are missing (failures of infra) are neither right nor wrong: leave them out of a task's rewards. A task
with fewer than k samples has no pass@k and is counted in `missing`; many of those bias the mean, as hard tasks may fail
more often than easy ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

RESAMPLES = 2_000
"""From one seed to another, the ends of a 95 % interval then move by 2 % of its width. A resample costs some 0.1 µs
a task: with thousands of tasks, call this in a thread."""
_TOLERANCE = 1e-9
"""Ten checks of 0.1 each add up to 0.9999999999999999, and mean 1."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and its interval, which is None where nothing can be said."""

    mean: float
    interval: tuple[float, float] | None
    tasks: int  # in the mean
    missing: int = 0  # not in it: too few samples


def is_correct(reward: float, threshold: float = 1.0) -> bool:
    """Whether a sample with this reward counts as solved."""
    return reward >= threshold - _TOLERANCE


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that one of k samples is correct, as n samples of which c are tell it: 1 - C(n-c, k) / C(n, k).

    Unbiased for n ≥ k, as 1 - (1 - c/n)^k is not. Exact: whole numbers until the last division, which rounds once.
    """
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} correct of {samples} samples cannot be")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs k from 1 to the number of samples, which is {samples}")
    ways = math.comb(samples, k)
    return (ways - math.comb(samples - correct, k)) / ways


def pass_over_tasks(
    rewards: Iterable[Collection[float]], k: int, *, threshold: float = 1.0, level: float = 0.95, seed: int = 0
) -> Estimate | None:
    """pass@k, the mean over tasks; `rewards` are those of each task's samples. None if no task has k samples."""
    if k < 1:
        raise ValueError(f"pass@{k}: k is 1 or more")
    tasks = list(rewards)
    counted = [task for task in tasks if len(task) >= k]
    values = [pass_at_k(len(task), sum(is_correct(reward, threshold) for reward in task), k) for task in counted]
    return _estimate(values, len(tasks) - len(counted), level, seed)


def reward_over_tasks(rewards: Iterable[Collection[float]], *, level: float = 0.95, seed: int = 0) -> Estimate | None:
    """The mean over tasks of each task's mean reward. None if no task has a sample."""
    tasks = list(rewards)
    values = [math.fsum(task) / len(task) for task in tasks if task]
    return _estimate(values, len(tasks) - len(values), level, seed)


def mean_interval(values: Sequence[float], *, level: float = 0.95, seed: int = 0) -> tuple[float, float] | None:
    """For the mean of one value per task; see the module. The same for the same values in any order, and seed."""
    if not values:
        raise ValueError("there is no mean of nothing")
    if not 0 < level < 1:
        raise ValueError(f"a confidence level is between 0 and 1, not {level:g}")
    if not all(map(math.isfinite, values)):
        raise ValueError("values must be finite")
    if max(values) - min(values) > _TOLERANCE:  # the mean of three 0.7 is not quite that of two
        return _bootstrap(values, level, seed)
    return _wilson(min(values), len(values), level) if min(values) >= 0 and max(values) <= 1 else None


def _estimate(values: Sequence[float], missing: int, level: float, seed: int) -> Estimate | None:
    if not values:
        return None
    interval = mean_interval(values, level=level, seed=seed)
    return Estimate(math.fsum(values) / len(values), interval, len(values), missing)


def _bootstrap(values: Sequence[float], level: float, seed: int) -> tuple[float, float]:
    random, tasks = Random(seed), sorted(values)
    means = sorted(sum(random.choices(tasks, k=len(tasks))) / len(tasks) for _ in range(RESAMPLES))
    outside = round((1 - level) / 2 * RESAMPLES)  # on each side
    return means[min(outside, RESAMPLES // 2)], means[-1 - min(outside, RESAMPLES // 2)]


def _wilson(mean: float, tasks: int, level: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle = mean + z * z / (2 * tasks)
    spread = z * math.sqrt(mean * (1 - mean) / tasks + z * z / (4 * tasks * tasks))
    scale = 1 + z * z / tasks
    # never beyond the mean itself, by rounding
    return max(0.0, min(mean, (middle - spread) / scale)), min(1.0, max(mean, (middle + spread) / scale))
