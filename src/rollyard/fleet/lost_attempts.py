"""Whether a lost attempt was its node's own fault, and so does not count against `max_attempts`. Pure rules, no I/O.

An attempt that ended before the agent's first token, for an engine that answers the head but not the node, or for a
sandbox that could not start while other nodes are there, says nothing about the rollout: it goes to another node, as
one from a drained node does.

Invariant. A rollout is excused at most `MOST_EXCUSED` times in all; from then on each loss counts, whosever it is, so
that no rollout goes round for ever.
"""

from __future__ import annotations

from rollyard.core.failure import EngineBroken, EngineTimeout, EngineUnavailable, SandboxStartFailed, TokenizerMismatch

MOST_EXCUSED = 8

DRAINED = "drained"
"""Of what a node gave back because it was drained or stopped: as often as an operator likes."""

_NO_ENGINE = frozenset((EngineUnavailable.code, TokenizerMismatch.code))
_FAILED_CALL = frozenset((EngineTimeout.code, EngineBroken.code))


def is_nodes_own(
    code: str, tokens: int, excused: int, *, is_engine_up: bool, is_served: bool, has_others: bool
) -> bool:
    """`is_engine_up`: an engine of the policy is up at the head. `is_served`: the node, too, says that it can use one.
    `has_others`: another node might take the rollout."""
    if tokens or excused >= MOST_EXCUSED:
        return False
    if code in _NO_ENGINE:
        return is_engine_up
    if code in _FAILED_CALL:
        return is_engine_up and not is_served
    return code == SandboxStartFailed.code and has_others
