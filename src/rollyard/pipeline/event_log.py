"""Notifies waiting clients: of the end of one rollout, or of every change of state.

Events are kept in a bounded ring in memory. An event contains what changed, not the resulting record. After a gap (a
slow reader, a restart) the reader gets a `gap` event and lists the store, whose terminal order is durable.

Invariant. A waiting reader is woken by events of the runs that it follows, and by no others. It has read everything
that happened in them when it waits, so the events of others are never a gap for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
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


class _Reader:
    """What a reader follows, and the future of its next event while it waits."""

    __slots__ = ("grows", "news", "runs")

    def __init__(self, runs: Iterable[str] | None, grows: Callable[[str], bool] | None) -> None:
        self.runs = None if runs is None else set(runs)  # None: all
        self.grows = grows
        self.news: asyncio.Future[int] | None = None

    def follows(self, run_id: str) -> bool:
        return self.runs is None or run_id in self.runs

    def wake(self, number: int) -> None:
        if self.news is not None and not self.news.done():
            self.news.set_result(number)


class EventLog:
    """The newest events of one process. `epoch` identifies the process; `ring` is the number of events kept."""

    def __init__(self, epoch: int, ring: int = 20_000) -> None:
        self._epoch = epoch
        self._next = 1
        self._ring: deque[Event | None] = deque(maxlen=ring)  # None: an event of a deleted run
        self._readers: dict[str | None, set[_Reader]] = {}  # by run; None: those of all runs
        self._growing: set[_Reader] = set()
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
        for key in (rollout.run, None):
            for reader in self._readers.get(key, ()):
                reader.wake(self._next - 1)
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

    def run_created(self, run_id: str) -> None:
        """Called for every new run: readers of a growing set of runs may follow it."""
        for reader in self._growing:
            if reader.runs is not None and reader.grows is not None and reader.grows(run_id):
                reader.runs.add(run_id)
                self._readers.setdefault(run_id, set()).add(reader)

    async def events(
        self,
        after: str | None = None,
        runs: Iterable[str] | None = None,
        *,
        grows: Callable[[str], bool] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Yields the events after that id, then each new one, without end. `runs`: only of these; `grows` returns
        whether it follows a run that is created later, too."""
        position = self._next if after is None else self._position(after)
        reader = _Reader(runs, grows)
        self._add(reader)
        try:
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
                    if event is not None and reader.follows(event.run):
                        yield event
                else:
                    reader.news = asyncio.get_running_loop().create_future()
                    position = await reader.news
        finally:
            self._remove(reader)

    def _add(self, reader: _Reader) -> None:
        for key in (None,) if reader.runs is None else reader.runs:
            self._readers.setdefault(key, set()).add(reader)
        if reader.grows is not None:
            self._growing.add(reader)

    def _remove(self, reader: _Reader) -> None:
        for key in (None,) if reader.runs is None else reader.runs:
            readers = self._readers.get(key, set())
            readers.discard(reader)
            if not readers:
                self._readers.pop(key, None)
        self._growing.discard(reader)

    def _position(self, event_id: str) -> int:
        epoch, _, number = event_id.partition("-")
        if epoch == str(self._epoch) and number.isascii() and number.isdigit() and len(number) <= 18:
            return min(int(number) + 1, self._next)
        return -1  # another epoch: a gap
