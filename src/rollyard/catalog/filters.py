"""The conditions on rows of the catalog, as SQL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows are listed. None: no such condition. `runs` are those that the caller may read; None: all."""

    runs: tuple[str, ...] | None = None
    environment: str | None = None
    agent: str | None = None
    policy: str | None = None
    version: int | None = None  # of the weights that sampled one of its tokens
    outcome: str | None = None
    code: str | None = None
    group: str | None = None  # an id, in any run
    is_trainable: bool | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    deleted: tuple[tuple[str, int], ...] = ()  # names of `runs` that a deleted run had, and its last number

    def conditions(self) -> tuple[list[str], list[object]]:
        """Returns conditions on the table `rollouts` as `r`, and their values."""
        where, values = list[str](), list[object]()

        def add(condition: str, *of: object) -> None:
            where.append(condition)
            values.extend(of)

        if self.runs is not None:
            add(*_among_runs(self.runs))
        for run, last in self.deleted:
            add("NOT (+r.run = ? AND r.seq <= ?)", run, last)
        for column in ("environment", "agent", "policy", "outcome", "code"):
            if (wanted := getattr(self, column)) is not None:
                add(f"r.{column} = ?", wanted)
        if self.group is not None:
            add('r."group" = ?', self.group)
        if self.version is not None:
            add("r.newest_version >= ? AND r.oldest_version BETWEEN 0 AND ?", self.version, self.version)
        if self.is_trainable is not None:
            add("r.is_trainable = ?", int(self.is_trainable))
        if self.min_reward is not None:
            add("r.reward >= ?", self.min_reward)
        if self.max_reward is not None:
            add("r.reward <= ?", self.max_reward)
        return where, values


def _among_runs(runs: Sequence[str]) -> tuple[str, object]:
    if len(runs) == 1:
        return "r.run = ?", runs[0]
    # "+": not by the index of the runs, whose rows would have to be sorted.
    return "+r.run IN (SELECT value FROM json_each(?))", json.dumps(list(runs))
