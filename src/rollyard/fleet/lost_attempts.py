"""Whether a lost attempt was its node's own fault, and so does not count against `max_attempts`. Pure rules, no I/O.

An attempt that ended before the agent's first token shows nothing about the rollout if an engine answers the head but
not the node, or if a sandbox could not start while there are other nodes. It goes to another node, like one from a
drained node.

Invariant. A rollout is excused at most `MOST_EXCUSED` times in all; from then on each loss counts, whatever its cause,
so that no rollout is passed around for ever.
"""

from __future__ import annotations

from rollyard.core.failure import EngineBroken, EngineTimeout, EngineUnavailable, SandboxStartFailed, TokenizerMismatch

MOST_EXCUSED = 8

DRAINED = "drained"
"""Code of what a node gave back because it was drained or stopped. This is excused any number of times."""

_NO_ENGINE = frozenset((EngineUnavailable.code, TokenizerMismatch.code))
_FAILED_CALL = frozenset((EngineTimeout.code, EngineBroken.code))


def is_nodes_own(
    code: str, tokens: int, excused: int, *, is_engine_up: bool, is_served: bool, has_others: bool
) -> bool:
    """Whether the loss is the node's own fault. `is_engine_up`: an engine of the policy is up at the head. `is_served`:
    the node, too, reports that it can use one. `has_others`: another node might take the rollout."""
    if tokens or excused >= MOST_EXCUSED:
        return False
    if code in _NO_ENGINE:
        return is_engine_up
    if code in _FAILED_CALL:
        return is_engine_up and not is_served
    return code == SandboxStartFailed.code and has_others
