"""Notifies waiting clients: of the end of one rollout, or of every change of state.

Events are kept in a bounded ring in memory. An event contains what changed, not the resulting record. After a gap (a
slow reader, a restart) the reader gets a `gap` event and lists the store, whose terminal order is durable.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from weakref import WeakValueDictionary

from rollyard.core import Outcome, Rollout, State


@dataclass(frozen=True, slots=True)
class Event:
    """A change of state. `id` is "epoch-number"; `kind` is "state" or "gap"."""

    id: str
    at: float
    kind: str = "state"
    rollout: str = ""
    run: str = ""
    state: State | None = None
    attempt: int = 0
    outcome: Outcome | None = None
    code: str | None = None


class EventLog:
    """The newest events of one process. `epoch` identifies the process; `ring` is the number of events kept."""

    def __init__(self, epoch: int, ring: int = 20_000) -> None:
        self._epoch = epoch
        self._next = 1
        self._ring: deque[Event | None] = deque(maxlen=ring)  # None: an event of a deleted run
        self._news: asyncio.Future[None] | None = None
        self._ends: WeakValueDictionary[str, asyncio.Future[None]] = WeakValueDictionary()

    def publish(self, rollout: Rollout) -> None:
        ending = rollout.ending
        self._ring.append(
            Event(
                id=f"{self._epoch}-{self._next}",
                at=time.time(),
                rollout=rollout.id,
                run=rollout.run,
                state=rollout.state,
                attempt=rollout.attempt,
                outcome=ending.outcome if ending else None,
                code=ending.failure.code if ending and ending.failure else None,
            )
        )
        self._next += 1
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        if rollout.state is State.ENDED:
            future = self._ends.pop(rollout.id, None)
            if future is not None and not future.done():
                future.set_result(None)

    def forget_run(self, run_id: str) -> None:
        """Drops the events of a deleted run, which readers of a later run of that name must not get. The ids of the
        others stay."""
        kept = (None if event is not None and event.run == run_id else event for event in self._ring)
        self._ring = deque(kept, maxlen=self._ring.maxlen)

    @property
    def last_id(self) -> str:
        """The newest event's id. To miss nothing, read it before the store, then follow events from it."""
        return f"{self._epoch}-{self._next - 1}"

    def end_of(self, rollout_id: str) -> asyncio.Future[None]:
        """Returns a future that is done when the rollout has ended. To miss no end, take it before reading the store.
        It is shared between waiters (shield it) and kept only while one of them holds it."""
        future = self._ends.get(rollout_id)
        if future is None:
            future = self._ends[rollout_id] = asyncio.get_running_loop().create_future()
        return future

    async def events(self, after: str | None = None) -> AsyncGenerator[Event, None]:
        """Yields the events after that id, then each new one, without end."""
        position = self._next if after is None else self._position(after)
        while True:
            first = self._next - len(self._ring)
            if position < first:
                yield Event(id=f"{self._epoch}-{first - 1}", at=time.time(), kind="gap")
                position = first
            while position < self._next:
                index = position - (self._next - len(self._ring))
                if index < 0:  # overwritten while the reader was busy
                    break
                event = self._ring[index]
                position += 1
                if event is not None:
                    yield event
            else:
                if self._news is None or self._news.done():
                    self._news = asyncio.get_running_loop().create_future()
                await asyncio.shield(self._news)

    def _position(self, event_id: str) -> int:
        epoch, _, number = event_id.partition("-")
        if epoch == str(self._epoch) and number.isascii() and number.isdigit() and len(number) <= 18:
            return min(int(number) + 1, self._next)
        return -1  # another epoch: a gap
