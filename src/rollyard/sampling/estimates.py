"""Means over tasks, with confidence intervals.

The tasks are the sample, not the rollouts. Rollouts of one task are alike (the task is easy, or it is hard); counted as
independent, they would make an interval far too narrow. So everything is first computed per task, then averaged over
tasks with equal weight, and the interval shows what other tasks of the same kind might have given.

The interval is the percentile bootstrap over tasks. A task's value is a fraction (pass@k of n samples, or a reward), so
no formula for proportions applies, and near 0 and 1 the means are skewed, which no normal interval is. If all tasks
have the same value (all solved, no task solved, a single task), resampling has no spread and would claim certainty.
Then Wilson's interval with one trial per task is used. It is wide enough for any values between 0 and 1, because no
values with that mean vary more than a coin does. For equal values outside that range there is no bound, and no
interval.

Missing samples (failures of infra) are neither right nor wrong: leave them out of a task's rewards. A task with fewer
than k samples has no pass@k and is counted in `missing`. Many of those bias the mean, as hard tasks may fail more often
than easy ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from statistics import NormalDist
from typing import TYPE_CHECKING

from rollyard.core.passk import TOLERANCE, is_correct, pass_at_k

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

RESAMPLES = 2_000
"""With this number, the ends of a 95 % interval vary between seeds by 2 % of its width."""

AT_ONCE = 1_000_000  # draws held in memory while resampling

_pass_at_k = lru_cache(maxsize=65_536)(pass_at_k)  # thousands of tasks share a few dozen values


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and its interval, which is None if it cannot be determined."""

    mean: float
    interval: tuple[float, float] | None
    tasks: int  # in the mean
    missing: int = 0  # not in the mean: too few samples


def pass_over_tasks(
    rewards: Iterable[Collection[float]], k: int, *, threshold: float = 1.0, level: float = 0.95, seed: int = 0
) -> Estimate | None:
    """Returns pass@k as a mean over tasks, from the rewards of each task's samples. None if no task has k samples."""
    if k < 1:
        raise ValueError(f"pass@{k}: k is 1 or more")
    counts = [(len(task), sum(is_correct(reward, threshold) for reward in task)) for task in rewards]
    return pass_curve(counts, [k], level=level, seed=seed)[k]


def pass_curve(
    counts: Sequence[tuple[int, int]], ks: Iterable[int], *, level: float = 0.95, seed: int = 0
) -> dict[int, Estimate | None]:
    """Returns pass@k for many k, from each task's number of samples and of correct ones. Those k for which the same
    tasks have enough samples share their resamples."""
    curve: dict[int, Estimate | None] = {}
    sizes = sorted(samples for samples, _ in counts)
    for tasks, together in groupby(sorted(ks), key=lambda k: len(sizes) - bisect_left(sizes, k)):
        these = list(together)
        if not tasks:
            curve |= dict.fromkeys(these)
            continue
        eligible = [count for count in counts if count[0] >= these[-1]]
        columns = [[_pass_at_k(samples, correct, k) for samples, correct in eligible] for k in these]
        for k, column, interval in zip(these, columns, mean_intervals(columns, level=level, seed=seed), strict=True):
            curve[k] = Estimate(math.fsum(column) / tasks, interval, tasks, len(counts) - tasks)
    return curve


def reward_over_tasks(rewards: Iterable[Collection[float]], *, level: float = 0.95, seed: int = 0) -> Estimate | None:
    """Returns the mean over tasks of each task's mean reward. None if no task has a sample."""
    tasks = list(rewards)
    values = [math.fsum(task) / len(task) for task in tasks if task]
    if not values:
        return None
    interval = mean_interval(values, level=level, seed=seed)
    return Estimate(math.fsum(values) / len(values), interval, len(values), len(tasks) - len(values))


def mean_interval(values: Sequence[float], *, level: float = 0.95, seed: int = 0) -> tuple[float, float] | None:
    """Returns the interval of the mean of one value per task. It depends on the values and seed, not on their order."""
    return mean_intervals([values], level=level, seed=seed)[0]


def mean_intervals(
    columns: Sequence[Sequence[float]], *, level: float = 0.95, seed: int = 0
) -> list[tuple[float, float] | None]:
    """Returns the intervals for several values of the same tasks, from the same resamples."""
    import numpy as np  # 0.1 s: not when the service starts

    values = np.asarray(columns, np.float64).T
    if not values.size:
        raise ValueError("at least one value is needed")
    if not 0 < level < 1:
        raise ValueError(f"a confidence level is between 0 and 1, not {level:g}")
    if not np.isfinite(values).all():
        raise ValueError("values must be finite")
    intervals: list[tuple[float, float] | None] = []
    lows, highs = values.min(axis=0), values.max(axis=0)
    ends = _bootstrap(values, level, seed) if (highs - lows > TOLERANCE).any() else None
    for at, (low, high) in enumerate(zip(lows.tolist(), highs.tolist(), strict=True)):
        if ends is not None and high - low > TOLERANCE:  # rounding: the mean of three 0.7 differs from that of two
            intervals.append((float(ends[0][at]), float(ends[1][at])))
        else:
            intervals.append(_wilson(low, len(values), level) if low >= 0 and high <= 1 else None)
    return intervals


def _bootstrap(values: Floats, level: float, seed: int) -> tuple[Floats, Floats]:
    """Returns the interval ends of values [tasks, columns]. Resamples are only counted by distinct rows, of which
    thousands of tasks have a few dozen if rewards are 0 and 1: then all columns cost little more than one."""
    import numpy as np

    distinct, places = np.unique(values, axis=0, return_inverse=True)
    kinds = np.sort(places.reshape(-1))  # the same for any order of the tasks
    tasks, width = len(kinds), len(distinct)
    random = np.random.default_rng(abs(seed))
    rows = max(1, AT_ONCE // tasks)
    means: list[Floats] = []
    for start in range(0, RESAMPLES, rows):
        size = min(rows, RESAMPLES - start)
        drawn = kinds[random.integers(0, tasks, (size, tasks))] + np.arange(size)[:, None] * width
        counts = np.bincount(drawn.reshape(-1), minlength=size * width).reshape(size, width)
        means.append(counts @ distinct / tasks)
    ordered = np.sort(np.concatenate(means), axis=0)
    outside = min(round((1 - level) / 2 * RESAMPLES), RESAMPLES // 2)  # on each side
    return ordered[outside], ordered[-1 - outside]


def _wilson(mean: float, tasks: int, level: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle = mean + z * z / (2 * tasks)
    spread = z * math.sqrt(mean * (1 - mean) / tasks + z * z / (4 * tasks * tasks))
    scale = 1 + z * z / tasks
    # rounding must not exclude the mean itself
    return max(0.0, min(mean, (middle - spread) / scale)), min(1.0, max(mean, (middle + spread) / scale))
