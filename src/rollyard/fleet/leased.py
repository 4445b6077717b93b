"""A rollout that is leased to a node, as the head holds it: in `Pipeline.live`, in place of an attempt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rollyard.core import Deadline, Json, Position, Rollout, RollyardError, Run, State, Timings
from rollyard.core.failure import Cancelled
from rollyard.engines.pool.seats import Seat
from rollyard.fleet.messages import Key, View
from rollyard.fleet.nodes import ConnectedNode
from rollyard.pipeline.base import MessagePage, Shutdown
from rollyard.store.base import Stale
from rollyard.store.codec import from_json

WAY = (State.INIT, State.READY, State.RUN)
"""The states through which a node moves a rollout, in order. EVAL comes with RUN's result."""

BEFORE_RUN = (State.INIT, State.READY)


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
    marks: dict[State, float] = field(default_factory=dict[State, float])  # when the head learned of each state

    @property
    def state(self) -> State:
        return self.rollout.state

    def at(self, position: Position) -> None:
        self.rollout = replace(self.rollout, position=position)
        self.marks[position.state] = time.monotonic()

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

    async def page(self, after: int) -> MessagePage | None:
        """Asks the node, which has the conversation until the end of RUN."""
        attempt = self.rollout.attempt
        if self.state in BEFORE_RUN:
            return MessagePage(attempt)
        view = await self._view(after)
        if view is None:
            return None
        return MessagePage(
            attempt,
            view.turns,
            view.sampled_tokens,
            view.messages,
            view.end,
            view.conversation,
            view.message_turns,
        )

    def timings(self) -> Timings:
        return Timings(
            queued_s=self.queued_s,
            init_s=self._seconds(State.INIT, State.READY),
            ready_s=self._seconds(State.READY, State.RUN),
            run_s=self._seconds(State.RUN, State.EVAL),
            eval_s=self._seconds(State.EVAL, State.ENDED),
        )

    def _seconds(self, state: State, following: State) -> float:
        if state not in self.marks:
            return 0.0
        return self.marks.get(following, time.monotonic()) - self.marks[state]

    async def calls(self) -> Mapping[str, Json]:
        """Asks the node, which has the log until the end of RUN."""
        view = await self._view(None)
        return from_json(view.calls, dict[str, Json]) if view is not None else {}

    async def requests(self) -> bytes:
        """Asks the node, which has them until the end of RUN."""
        view = await self._view(None, requests=True)
        return view.requests if view is not None else b""

    async def _view(self, after: int | None, *, requests: bool = False) -> View | None:
        if self.node is None or self.state is not State.RUN:
            return None
        return await self.node.views.ask(Key(self.rollout.id, self.rollout.attempt), after, requests=requests)

    def leave_seat(self) -> None:
        if self.seat is not None:
            self.seat.close()
