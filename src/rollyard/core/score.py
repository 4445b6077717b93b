"""The score that an environment gives an attempt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial


@dataclass(frozen=True, slots=True)
class TurnReward:
    """A reward for one sampled span: `trace` and `span` index into the trajectory's traces and spans."""

    trace: int
    span: int
    reward: float


@dataclass(frozen=True, slots=True)
class Score:
    """The reward, its components, and other measurements.

    Invariant: every number is a finite float, whatever type the environment used (numpy, torch, Decimal). A NaN reward
    is a crashed verifier, not a score.
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    turn_rewards: tuple[TurnReward, ...] = ()

    def __post_init__(self) -> None:
        set_field = partial(object.__setattr__, self)
        set_field("reward", _finite(self.reward))
        set_field("components", {name: _finite(value) for name, value in self.components.items()})
        set_field("metrics", {name: _finite(value) for name, value in self.metrics.items()})
        set_field(
            "turn_rewards",
            tuple(TurnReward(int(turn.trace), int(turn.span), _finite(turn.reward)) for turn in self.turn_rewards),
        )


MOST = 1e150
"""The limit of any number: the sum of the squares of a million of them is still finite."""

MOST_REWARD = 1e15
"""The limit of a new reward: the same holds in the 32-bit floats of a trainer's tensors."""


def _finite(number: float) -> float:
    number = float(number)
    if not math.isfinite(number):
        raise ValueError(f"a score holds only finite numbers, not {number}")
    if abs(number) > MOST:
        raise ValueError(f"a score holds no number beyond {MOST:g}, such as {number:g}")
    return number
