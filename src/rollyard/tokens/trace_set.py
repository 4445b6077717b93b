"""The traces of one rollout. A prompt that extends no trace exactly starts a new one, with the reason.

Invariant. Each sampled span has one owner: the trace that it was sampled for. Traces that contain it in their prompt
mark it as a copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from rollyard.core import Sampling, Trace
from rollyard.tokens.trace import TraceBuilder


class TraceSet:
    """`forks` counts the traces by the reason for which they were started."""

    def __init__(self, *, sampling: Sampling, policy: str, model: str) -> None:
        self._sampling, self._policy, self._model = sampling, policy, model
        self._builders: list[TraceBuilder] = []
        self.forks: dict[str, int] = {}

    @property
    def sampled_tokens(self) -> int:
        return sum(builder.sampled_tokens for builder in self._builders)

    def build(self) -> tuple[Trace, ...]:
        """Returns the traces in which something was sampled."""
        return tuple(builder.build() for builder in self._builders if builder.sampled_tokens)

    def start(self, prompt: Sequence[int], reason: str | None) -> TraceBuilder:
        """Starts a trace with this prompt. `reason` None: the rollout's first."""
        packed = prompt if isinstance(prompt, array) else array("i", prompt)
        builder = TraceBuilder(sampling=self._sampling, policy=self._policy, model=self._model, fork_reason=reason)
        builder.context(packed)
        if reason is not None:
            self.forks[reason] = self.forks.get(reason, 0) + 1
        self._mark_copies(builder, packed)
        self._builders.append(builder)
        return builder

    def _mark_copies(self, builder: TraceBuilder, packed: array[int]) -> None:
        """Marks the spans that this trace shares with the trace that has the longest common prefix."""
        best, shared = None, 0
        for other in self._builders:
            common = other.common_prefix(packed, beyond=shared)
            if common > shared:
                best, shared = other, common
        if best is not None:
            builder.copies([span for span in best.spans if span.end <= shared])
