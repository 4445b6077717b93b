"""How a run treats rollouts that are too long. Both methods are from DAPO (arXiv:2503.14476, section 3.4).

Overlong filtering (`Run.mask_truncated`): a truncated rollout is weak evidence about the policy, so it is in neither
loss nor baseline. The soft overlong punishment (`OverlongPenalty`): the reward falls with the sampled tokens, from 0 at
`from_tokens` to `-most` at `to_tokens`, so that a policy learns to finish before it is truncated.

Invariants. The penalty is a component of the score with its own name, even if it is 0: no reward changes silently.
Whether a task is solved, and whether a draw's filter keeps a group, depends on the environment's own reward, without
the penalty: a group of correct answers does not become worth training on because they differ in length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollyard.core.failure import ContextLimit, RunDeadline, TokenLimit, TurnLimit
from rollyard.core.score import Score

COMPONENT = "overlong_penalty"
"""The name of the score's component; no environment may use it."""

TRUNCATIONS = frozenset({TurnLimit.code, TokenLimit.code, ContextLimit.code, RunDeadline.code})
"""Failures that truncate a rollout because of its length or its duration."""


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """The soft overlong punishment: 0 up to `from_tokens` sampled tokens, `-most` from `to_tokens` on."""

    from_tokens: int
    to_tokens: int
    most: float = 1.0

    def of(self, sampled_tokens: int) -> float:
        """Returns what is added to the reward: 0 or less."""
        over = min(max(0, sampled_tokens - self.from_tokens), self.to_tokens - self.from_tokens)
        return -self.most * over / (self.to_tokens - self.from_tokens) if over else 0.0

    def applied(self, score: Score, sampled_tokens: int) -> Score:
        penalty = self.of(sampled_tokens)
        return replace(score, reward=score.reward + penalty, components={**score.components, COMPONENT: penalty})
