"""A run's figures over time or over weight versions, as sums over its rows in the catalog.

A point is a bucket of equal width. A run of a hundred thousand rollouts takes about 0.2 s, off the event loop; the
catalog keeps a result for a while (`catalog.py`).
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rollyard.store.base import GroupCount

By = Literal["time", "version"]

MOST_FAILURES = 20
"""Failures with a series of their own; the rarest others are left out of it, and are in the totals."""

STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Widths of a bucket of time. Above the last: whole days."""


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """Rollouts that ended with a code and a blame, for each point. A code may have several blames."""

    code: str
    blame: str
    counts: list[int]


@dataclass(frozen=True, slots=True)
class Series:
    """Columns of equal length. None: no rollout of that bucket counts."""

    by: By
    width: int = 1  # of a bucket: seconds or versions; each x is a multiple of it
    x: list[float] = field(default_factory=list[float])
    count: list[int] = field(default_factory=list[int])
    reward: list[float | None] = field(default_factory=list[float | None])
    pass_rate: list[float | None] = field(default_factory=list[float | None])
    response_tokens: list[float | None] = field(default_factory=list[float | None])
    turns: list[float | None] = field(default_factory=list[float | None])
    staleness: list[float | None] = field(default_factory=list[float | None])
    share: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    failures: list[FailureCounts] = field(default_factory=list[FailureCounts])
    environments: list[str] = field(default_factory=list[str])
    totals: dict[str, object] = field(default_factory=dict[str, object])
    sampled_tokens: int = 0
    groups: tuple[GroupCount, ...] = ()  # from the store, in spans of `width`


def series(connection: sqlite3.Connection, run: str, by: By, points: int, after: int = 0) -> Series:
    """Returns at most `points` points of a run. Its rows up to number `after` are of a deleted run of that name."""
    column = "ended_at" if by == "time" else "newest_version"
    own, of_run = ("run = ? AND seq > ?", (run, after)) if after else ("run = ?", (run,))
    counted = own if by == "time" else f"{own} AND r.newest_version >= 0"
    totals, environments = _totals(connection, own, of_run), _environments(connection, own, of_run)
    sampled = int(totals.pop("sampled_tokens"))  # type: ignore[call-overload]
    rest = {"environments": environments, "totals": totals, "sampled_tokens": sampled}
    low, high = connection.execute(
        f"SELECT MIN({column}), MAX({column}) FROM rollouts r WHERE {counted}", of_run
    ).fetchone()
    if low is None:
        return Series(by, share={name: [] for name in ("model", "tool", "waiting", "other")}, **rest)
    width = _time_step(high - low, points) if by == "time" else math.ceil((high - low + 1) / points)
    first = math.floor(low / width)
    size = math.floor(high / width) - first + 1
    bucket = f"CAST({column} / {width} AS INTEGER) - {first}"
    rows = {
        row[0]: row[1:]
        for row in connection.execute(
            f"SELECT {bucket} AS b, COUNT(*), COUNT(reward), SUM(reward), SUM(reward >= 1 - 1e-9), "
            "SUM(sampled_tokens), SUM(turns), COUNT(lag), SUM(lag), SUM(model_s), SUM(tool_s), SUM(waiting_s), "
            f"SUM(total_s) FROM rollouts r WHERE {counted} GROUP BY b",
            of_run,
        ).fetchall()
    }
    failed = connection.execute(
        f"SELECT {bucket} AS b, code, blame, COUNT(*) FROM rollouts r WHERE {counted} AND code IS NOT NULL "
        "GROUP BY b, code, blame",
        of_run,
    ).fetchall()
    taken = sorted(rows) if by == "version" else range(size)  # versions without rollouts have no point

    def ratio(part: int, whole: int) -> list[float | None]:
        return [_ratio(rows[b][part], rows[b][whole]) if b in rows else None for b in taken]

    def others(b: int) -> float:
        _, _, _, _, _, _, _, _, model_s, tool_s, waiting_s, total_s = rows[b]
        return max(0.0, total_s - model_s - tool_s - waiting_s)

    return Series(
        by,
        width,
        x=[float((first + b) * width) for b in taken],
        count=[rows[b][0] if b in rows else 0 for b in taken],
        reward=ratio(2, 1),
        pass_rate=ratio(3, 1),
        response_tokens=ratio(4, 0),
        turns=ratio(5, 0),
        staleness=ratio(7, 6),
        share={
            "model": ratio(8, 11),
            "tool": ratio(9, 11),
            "waiting": ratio(10, 11),
            "other": [_ratio(others(b), rows[b][11]) if b in rows else None for b in taken],
        },
        failures=_failures(failed, [*taken]),
        **rest,
    )


def _failures(failed: list[tuple[int, str, str, int]], taken: list[int]) -> list[FailureCounts]:
    counts: dict[tuple[str, str], dict[int, int]] = {}
    for b, code, blame, count in failed:
        counts.setdefault((code, blame), {})[b] = count
    frequent = sorted(counts, key=lambda failure: (-sum(counts[failure].values()), failure))[:MOST_FAILURES]
    return [FailureCounts(*failure, [counts[failure].get(b, 0) for b in taken]) for failure in frequent]


def _totals(connection: sqlite3.Connection, own: str, of_run: tuple[object, ...]) -> dict[str, object]:
    count, rewarded, rewards, passes, tokens = connection.execute(
        "SELECT COUNT(*), COUNT(reward), SUM(reward), SUM(reward >= 1 - 1e-9), COALESCE(SUM(sampled_tokens), 0) "
        f"FROM rollouts WHERE {own}",
        of_run,
    ).fetchone()
    failures = connection.execute(
        f"SELECT code, blame, COUNT(*) FROM rollouts WHERE {own} AND code IS NOT NULL GROUP BY code, blame "
        "ORDER BY 3 DESC, 1, 2 LIMIT 100",
        of_run,
    ).fetchall()
    return {
        "count": count,
        "reward": _ratio(rewards, rewarded),
        "pass_rate": _ratio(passes, rewarded),
        "failures": [{"code": code, "blame": blame, "count": number} for code, blame, number in failures],
        "sampled_tokens": tokens,
    }


def _environments(connection: sqlite3.Connection, own: str, of_run: tuple[object, ...]) -> list[str]:
    rows = connection.execute(
        f"SELECT DISTINCT environment FROM rollouts WHERE {own} ORDER BY 1 LIMIT 100", of_run
    ).fetchall()
    return [row[0] for row in rows]


def _time_step(span_s: float, points: int) -> int:
    fits: Callable[[int], bool] = lambda step: span_s / step < points - 1  # noqa: E731
    return next((step for step in STEPS_S if fits(step)), 86400 * math.ceil(span_s / 86400 / max(1, points - 1)))


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if not whole or part is None else part / whole
