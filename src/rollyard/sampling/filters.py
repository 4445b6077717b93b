"""The declared filter of a draw: which groups a trainer can learn from.

A filter gets one reward per trained member, and the task. Whether a rollout reaches the trainer may depend on these,
and never on how long it took: a filter does not get the time.

Early termination is based on `is_hopeless`. It may return True only if the group will be rejected whatever its missing
members score, and whether or not they can be trained on. So an accepted group always has all its members, and one that
is ended early would have been rejected anyway.

An installed filter is a function of a `FilterInput` and the options that the draw names, registered under the entry
point group `rollyard.filters`. It is called once, when all members have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollyard.core import Json
from rollyard.core.draw import KeepSpec
from rollyard.core.failure import InvalidRequest
from rollyard.core.group import pass_rate_of, spread_of
from rollyard.core.passk import TOLERANCE
from rollyard.core.task import Task
from rollyard.plugins import plugins

ENTRY_POINTS = "rollyard.filters"


@dataclass(frozen=True, slots=True)
class FilterInput:
    """What a filter may base its decision on."""

    rewards: tuple[float, ...]  # of the members that are trained on, by index
    task: Task


class GroupFilter(Protocol):
    def keeps(self, judged: FilterInput) -> bool: ...

    def is_hopeless(self, rewards: Sequence[float], missing: int) -> bool: ...


class KeepAll:
    """Keeps every group."""

    def keeps(self, judged: FilterInput) -> bool:
        return True

    def is_hopeless(self, rewards: Sequence[float], missing: int) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class KeepSpread:
    """Keeps groups whose rewards have a standard deviation above `above`."""

    above: float = 0.0

    def keeps(self, judged: FilterInput) -> bool:
        spread = spread_of(judged.rewards)
        return spread is not None and spread > self.above

    def is_hopeless(self, rewards: Sequence[float], missing: int) -> bool:
        return False  # rewards have no bounds: one missing member can give any spread


@dataclass(frozen=True, slots=True)
class KeepPassRate:
    """Keeps groups whose share of solved members is within a range, both ends included."""

    low: float
    high: float
    threshold: float = 1.0

    def keeps(self, judged: FilterInput) -> bool:
        rate = pass_rate_of(judged.rewards, self.threshold)
        return rate is not None and self.low - TOLERANCE <= rate <= self.high + TOLERANCE

    def is_hopeless(self, rewards: Sequence[float], missing: int) -> bool:
        total = len(rewards) + missing
        if not total:
            return True
        passes = round((pass_rate_of(rewards, self.threshold) or 0.0) * len(rewards))
        # A missing member that cannot be trained on is not counted at all. That moves the rate up from its lowest
        # (all of them fail) and down from its highest (all of them pass), so these two bound every case.
        return passes / total > self.high + TOLERANCE or (passes + missing) / total < self.low - TOLERANCE


class InstalledFilter:
    """A filter from an installed package."""

    def __init__(self, name: str, judge: Callable[..., object], options: Mapping[str, Json]) -> None:
        self._name = name
        self._judge = judge
        self._options = options

    def keeps(self, judged: FilterInput) -> bool:
        try:
            return bool(self._judge(judged, **self._options))
        except Exception as error:
            raise RuntimeError(f"the filter {self._name!r} raised {type(error).__name__}: {error}") from error

    def is_hopeless(self, rewards: Sequence[float], missing: int) -> bool:
        return False


class MissingFilter:
    """Replaces a filter that is no longer installed: its draw can only be read."""

    def __init__(self, error: InvalidRequest) -> None:
        self.error = error

    def keeps(self, judged: FilterInput) -> bool:
        raise self.error

    def is_hopeless(self, rewards: Sequence[float], missing: int) -> bool:
        return False


def keep_of(spec: KeepSpec) -> GroupFilter:
    """Returns the filter that a draw names. Raises InvalidRequest if there is none."""
    if spec.kind == "all":
        return KeepAll()
    if spec.kind == "spread":
        return KeepSpread(spec.above)
    if spec.kind == "pass_rate":
        return KeepPassRate(spec.low, spec.high, spec.threshold)
    installed = {entry.name: entry for entry in plugins(ENTRY_POINTS)}
    if spec.name not in installed:
        known = ", ".join(sorted(installed)) or "none is installed"
        raise InvalidRequest(f"keep: there is no filter {spec.name!r} ({known})")
    try:
        return InstalledFilter(spec.name, installed[spec.name].load(), spec.options)
    except Exception as error:  # importing another package's module may raise anything
        raise InvalidRequest(f"keep: the filter {spec.name!r} cannot be loaded: {error}") from error
