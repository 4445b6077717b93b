"""The state machine of a rollout: this file contains all legal moves.

    queued ──▶ init ──▶ ready ──▶ run ──▶ eval ──▶ ended
       ▲        │         │        │       │
       └────────┴─────────┴────────┴───────┘   again, with attempt + 1
    A rollout can also move from every state directly to ended.

Invariants. `ended` is final. Moving back to `queued` raises the attempt by one; no other move changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The state of a rollout. One that waits for a slot is in the state before it (except for EVAL)."""

    QUEUED = "queued"  # durable, nothing started; waits for INIT
    INIT = "init"  # its sandbox and tools are being created
    READY = "ready"  # set up; waits for RUN
    RUN = "run"  # the agent runs
    EVAL = "eval"  # trajectory and artifacts are saved; waits for scoring, or is being scored
    ENDED = "ended"  # the one terminal record is written


MOVES: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.INIT, State.ENDED}),
    State.INIT: frozenset({State.READY, State.QUEUED, State.ENDED}),
    State.READY: frozenset({State.RUN, State.QUEUED, State.ENDED}),
    State.RUN: frozenset({State.EVAL, State.QUEUED, State.ENDED}),
    State.EVAL: frozenset({State.QUEUED, State.ENDED}),
    State.ENDED: frozenset(),
}

LIVE = frozenset({State.INIT, State.READY, State.RUN, State.EVAL})
"""States in which a rollout holds resources of the service: an asyncio task, perhaps a sandbox."""


class IllegalMove(Exception):
    """A move that the table does not contain: a bug, never a user's error."""


@dataclass(frozen=True, slots=True)
class Position:
    """State and attempt together, which a compare-and-set compares."""

    state: State = State.QUEUED
    attempt: int = 1

    def to(self, state: State) -> Position:
        """The position after a legal move; raises `IllegalMove` otherwise."""
        if state not in MOVES[self.state]:
            raise IllegalMove(f"{self.state} → {state}")
        return Position(state, self.attempt + (state is State.QUEUED))
