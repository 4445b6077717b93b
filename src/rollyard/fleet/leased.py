"""A rollout that is out at a node, as the head sees it: in `Pipeline.live`, in the place of an attempt."""

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
"""What a node moves a rollout through, in order. EVAL comes with what RUN left."""


@dataclass(eq=False, slots=True)
class LeasedRollout:
    """See the module. `node` None: out since before this process, and not claimed yet."""

    rollout: Rollout
    run: Run
    node: ConnectedNode | None
    seat: Seat | None
    cancelled: Cancelled | None = None
    is_settling: bool = False  # its end, or its return to the queue, is being written
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)  # one at a time: who comes next finds it as it is then
    queued_s: float = 0.0
    claimant: str = ""  # the node that had it before this process
    clock: Deadline = field(default_factory=Deadline)  # stands still: the node has the one that counts

    @property
    def state(self) -> State:
        return self.rollout.state

    def at(self, position: Position) -> None:
        self.rollout = replace(self.rollout, position=position)

    def stop(self, reason: RollyardError | Shutdown | Stale) -> None:
        """A cancel goes to its node, which cleans up and says so. Nothing else ends it from here: a head that goes down
        leaves its nodes to their work."""
        if isinstance(reason, Cancelled) and self.cancelled is None:
            self.cancelled = reason
            if self.node is not None:
                self.node.cancel(Key(self.rollout.id, self.rollout.attempt), reason.detail)

    def tick(self, now: float, lease_s: float) -> float | None:
        """Its node looks after it."""
        return None

    def leave_seat(self) -> None:
        if self.seat is not None:
            self.seat.close()
