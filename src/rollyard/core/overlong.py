"""What a run does about rollouts that are too long. Both ways are DAPO's (arXiv:2503.14476, section 3.4).

Overlong filtering (`Run.mask_truncated`): a rollout that was cut off says little about the policy, so it is in neither
loss nor baseline. The soft overlong punishment (`OverlongPenalty`): the reward falls with the sampled tokens, from 0 at
`from_tokens` to `-most` at `to_tokens`, so that a policy learns to finish before it is cut off.

Invariants. The penalty is a component of the score by its own name, also where it is 0: no reward is changed silently.
What counts as solved, and what a draw's filter sees, is the environment's own reward, without the penalty: a group of
correct answers is not worth training on because they differ in length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollyard.core.failure import ContextLimit, RunDeadline, TokenLimit, TurnLimit
from rollyard.core.score import Score

COMPONENT = "overlong_penalty"
"""Of a score; no environment may use the name."""

TRUNCATIONS = frozenset({TurnLimit.code, TokenLimit.code, ContextLimit.code, RunDeadline.code})
"""Failures by which a rollout was cut off for its length, or for the time that it took."""


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """See the module."""

    from_tokens: int
    to_tokens: int
    most: float = 1.0

    def of(self, sampled_tokens: int) -> float:
        """What is added to the reward: 0 or less."""
        over = min(max(0, sampled_tokens - self.from_tokens), self.to_tokens - self.from_tokens)
        return -self.most * over / (self.to_tokens - self.from_tokens) if over else 0.0

    def applied(self, score: Score, sampled_tokens: int) -> Score:
        penalty = self.of(sampled_tokens)
        return replace(score, reward=score.reward + penalty, components={**score.components, COMPONENT: penalty})
