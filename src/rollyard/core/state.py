"""The life of a rollout as a state machine: the legal moves, all in this file.

    queued ──▶ init ──▶ ready ──▶ run ──▶ eval ──▶ ended
       ▲        │         │        │       │
       └────────┴─────────┴────────┴───────┘   again, with attempt + 1
    and from every state straight to ended.

Invariants. `ended` is final. Moving back to `queued` raises the attempt by one; no other move changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Where a rollout is. What waits for a slot is in the state before it (but see EVAL)."""

    QUEUED = "queued"  # durable, nothing started; waits for INIT
    INIT = "init"  # its sandbox and tools are being made
    READY = "ready"  # waits, set up, for RUN
    RUN = "run"  # the agent works
    EVAL = "eval"  # trajectory and artifacts are saved; waits for, or is in, its scoring
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
"""States in which a rollout holds something of ours: a task, maybe a sandbox."""


class IllegalMove(Exception):
    """A move that the table does not have: a bug, never a user's error."""


@dataclass(frozen=True, slots=True)
class Position:
    """State and attempt together: what a compare-and-set compares."""

    state: State = State.QUEUED
    attempt: int = 1

    def to(self, state: State) -> Position:
        """The position after a legal move; raises `IllegalMove` otherwise."""
        if state not in MOVES[self.state]:
            raise IllegalMove(f"{self.state} → {state}")
        return Position(state, self.attempt + (state is State.QUEUED))
