"""A rollout that is leased to a node, as the head holds it: in `Pipeline.live`, in place of an attempt."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from rollyard.core import Deadline, Position, Rollout, RollyardError, Run, State
from rollyard.core.failure import Cancelled
from rollyard.engines.pool.seats import Seat
from rollyard.fleet.messages import Key
from rollyard.fleet.nodes import ConnectedNode
from rollyard.pipeline.base import Shutdown
from rollyard.store.base import Stale

WAY = (State.INIT, State.READY, State.RUN)
"""The states through which a node moves a rollout, in order. EVAL comes with RUN's result."""


@dataclass(eq=False, slots=True)
class LeasedRollout:
    """A leased rollout. `node` is None if it was leased before this process started and is not claimed yet."""

    rollout: Rollout
    run: Run
    node: ConnectedNode | None
    seat: Seat | None
    cancelled: Cancelled | None = None
    is_settling: bool = False  # its end, or its return to the queue, is being written
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)  # serializes writes of this rollout
    queued_s: float = 0.0
    claimant: str = ""  # the node that had it before this process
    clock: Deadline = field(default_factory=Deadline)  # does not run: the node has its own

    @property
    def state(self) -> State:
        return self.rollout.state

    def at(self, position: Position) -> None:
        self.rollout = replace(self.rollout, position=position)

    def stop(self, reason: RollyardError | Shutdown | Stale) -> None:
        """Sends a cancel to the node, which cleans up and reports the end. Ignores any other reason: when a head shuts
        down, its nodes continue."""
        if isinstance(reason, Cancelled) and self.cancelled is None:
            self.cancelled = reason
            if self.node is not None:
                self.node.cancel(Key(self.rollout.id, self.rollout.attempt), reason.detail)

    def tick(self, now: float) -> float | None:
        """Returns None: the node checks for stalls."""
        return None

    def snapshot(self) -> None:
        """Returns None: the node has the conversation."""
        return

    def leave_seat(self) -> None:
        if self.seat is not None:
            self.seat.close()
