"""What an environment says of an attempt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TurnReward:
    """A reward for one sampled span: `trace` and `span` index into the trajectory's traces and spans."""

    trace: int
    span: int
    reward: float


@dataclass(frozen=True, slots=True)
class Score:
    """The reward, what it is made of, and what else was measured.

    Invariant: every number is a finite float, whatever an environment computed with (numpy, torch, Decimal). A NaN
    reward is a crashed verifier, not a score.
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    turn_rewards: tuple[TurnReward, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", float(self.reward))
        for name in ("components", "metrics"):
            numbers: Mapping[str, float] = getattr(self, name)
            object.__setattr__(self, name, {str(key): float(value) for key, value in numbers.items()})
        numbers = [self.reward, *self.components.values(), *self.metrics.values()]
        numbers += [turn.reward for turn in self.turn_rewards]
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError(f"a score holds only finite numbers: {self}")
