"""A group: n rollouts of one task, and its one terminal record.

    open ──▶ complete ──▶ delivered          complete: all its members have ended; in a draw, the filter kept it
      │          ├──▶ dropped, void           too old (if its draw drops such groups); undone by a rewind
      └──▶ filtered, failed, cancelled, dropped, void

Rollout k of group G is `G-k`. The members are the first `size` rollouts that did not fail because of infrastructure. A
spare has an index of `size` or more and is started only to replace a rollout that did.

Invariant: statistics use one score per rollout. `GroupStats.mean` and the fields after it cover only the members that
are trained on; a member that is in neither loss nor baseline is not in them either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollyard.core.passk import TOLERANCE, is_correct


class GroupState(StrEnum):
    OPEN = "open"  # its members are running
    COMPLETE = "complete"  # it has its members; in a draw it waits for a batch
    DELIVERED = "delivered"  # in a batch
    FILTERED = "filtered"  # the draw's filter did not keep it
    FAILED = "failed"  # too few members, or the task cannot be done
    CANCELLED = "cancelled"
    DROPPED = "dropped"  # older than the draw allows
    VOID = "void"  # undone by a rewind


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Statistics of a group's members. None means that no member counts."""

    members: int = 0
    scored: int = 0  # members with a reward
    trainable: int = 0  # scored members that are trained on
    mean: float | None = None
    spread: float | None = None  # standard deviation
    pass_rate: float | None = None  # share of rewards of at least 1, before an overlong penalty
    lowest: float | None = None
    highest: float | None = None
    sampled_tokens: int = 0  # of all started rollouts, including spares
    infra_failures: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """One group and its state."""

    id: str
    run: str
    size: int
    spares: int = 1
    min_members: int | None = None  # the least number with which it is delivered; None: all of them
    priority: int = 0
    state: GroupState = GroupState.OPEN
    reason: str | None = None  # of its state, where one is needed
    started: int = 0  # rollouts 0 … started − 1 exist
    members: tuple[int, ...] = ()  # their indices, once it is complete
    stats: GroupStats | None = None
    admitted_version: int = 0  # the policy's, when it started
    oldest_version: int = -1  # of its members' sampled tokens; −1: no token was sampled
    newest_version: int = -1
    draw: str | None = None
    order: int = 0  # of admission in its draw
    epoch: int = 0
    item: int = 0  # of the draw's source
    tries: int = 0  # earlier infrastructure failures of this item
    turn: int = 0  # earlier starts of this item in this epoch
    batch: int | None = None
    place: int | None = None  # in order of delivery, from 1
    batch_version: int | None = None  # the policy's, when that batch was requested
    created_at: float = 0.0
    updated_at: float = 0.0

    @property
    def staleness(self) -> int | None:
        """By how many versions its oldest token is older than its batch."""
        if self.batch_version is None or self.oldest_version < 0:
            return None
        return max(0, self.batch_version - self.oldest_version)

    def rollout_id(self, index: int) -> str:
        return f"{self.id}-{index}"


def mean_of(rewards: Sequence[float]) -> float | None:
    return math.fsum(rewards) / len(rewards) if rewards else None


def spread_of(rewards: Sequence[float]) -> float | None:
    """Returns the population standard deviation; exactly 0 if all rewards are equal."""
    mean = mean_of(rewards)
    if mean is None:
        return None
    if max(rewards) - min(rewards) <= TOLERANCE:
        return 0.0
    farthest = max(abs(reward - mean) for reward in rewards)  # scaled by it, no square overflows
    return farthest * math.sqrt(math.fsum(((reward - mean) / farthest) ** 2 for reward in rewards) / len(rewards))


def pass_rate_of(rewards: Sequence[float], threshold: float = 1.0) -> float | None:
    if not rewards:
        return None
    return sum(is_correct(reward, threshold) for reward in rewards) / len(rewards)
