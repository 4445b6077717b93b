"""The engines of one policy (or the judges): how loaded each is, whether it is up, and who waits for one.

Invariants. `pick` gives the engine with the fewest live sessions per unit of capacity, calls in flight breaking
ties; a session that sits in a tool still counts, since its prefix is still in the engine's cache. Every count goes
up and down in this file alone. The heap deletes lazily: each change pushes a new entry with a new stamp, and
entries with an old stamp are dropped when they surface; it is rebuilt before it outgrows its engines.

The breaker: `trip_after` consecutive failures take an engine down; only the router's watch, which asks it for a
token, brings it up again. A failure that is the request's own fault (EngineRefused) does not count.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum

from rollyard.core import Deadline
from rollyard.core.failure import EngineFailure, EngineUnavailable
from rollyard.engines.base import Engine, EngineInfo, EngineSpec, Generation

log = logging.getLogger("rollyard.engines")


class Health(StrEnum):
    UP = "up"  # takes sessions
    DOWN = "down"  # its breaker is open, or it has not answered its first probe
    GONE = "gone"  # removed: its sessions move at their next call


@dataclass(slots=True)
class EngineStats:
    """Plain counters of one engine since it was added, and its two gauges."""

    sessions: int = 0  # live now
    in_flight: int = 0  # calls now
    calls: int = 0
    failures: int = 0
    refusals: int = 0
    aborts: int = 0
    trips: int = 0  # times that the breaker opened
    tokens: int = 0  # sampled
    prompt_tokens: int = 0
    cached_tokens: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One line of the engine list."""

    spec: EngineSpec
    info: EngineInfo | None  # None: it has not answered its first probe
    health: Health
    stats: EngineStats


class Call:
    """A call in flight: what the router can do to it from outside."""

    def __init__(self, *clocks: Deadline, is_cuttable: bool = True, is_streamed: bool = False) -> None:
        self.is_cuttable = is_cuttable
        self.is_streamed = is_streamed  # its tokens count as they come, their versions are told at its end, if then
        self.cut_asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clocks = clocks
        self._holds: ExitStack | None = None

    def cut(self) -> None:
        """Its session aborts it, keeps what was sampled, and goes on from there when it may."""
        if self.is_cuttable and not self.cut_asked.done():
            self.cut_asked.set_result(None)

    def hold(self) -> None:
        if self._holds is None:
            self._holds = ExitStack()
            for clock in self._clocks:
                self._holds.enter_context(clock.held())

    def release(self) -> None:
        if self._holds is not None:
            self._holds.close()
            self._holds = None


@dataclass(eq=False, slots=True)
class Member:
    """One engine in a pool."""

    engine: Engine
    pool: Pool
    health: Health = Health.DOWN
    is_probed: bool = False
    says_versions: bool = False  # its last generation named the versions of its tokens
    failures_in_a_row: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    calls: set[Call] = field(default_factory=set[Call])
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    stamp: int = 0

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def id(self) -> str:
        return self.engine.spec.id

    @property
    def load(self) -> tuple[float, int]:
        return self.stats.sessions / max(1, self.engine.spec.capacity), self.stats.in_flight

    def status(self) -> EngineStatus:
        return EngineStatus(self.engine.spec, self.engine.info if self.is_probed else None, self.health, self.stats)

    def seat(self) -> None:
        self.stats.sessions += 1
        self.pool.touch(self)

    def unseat(self) -> None:
        self.stats.sessions -= 1
        self.pool.touch(self)

    def begin(self, call: Call) -> None:
        self.calls.add(call)
        self.idle.clear()
        self.stats.calls += 1
        self.stats.in_flight += 1
        self.pool.touch(self)

    def names_versions_of(self, call: Call) -> bool:
        """Whether each token of the call will have its true version, even if the weights change under it."""
        return self.says_versions and not call.is_streamed

    def end(self, call: Call) -> None:
        call.release()
        call.ended.set_result(None)
        self.calls.discard(call)
        self.stats.in_flight -= 1
        if not self.calls:
            self.idle.set()
        self.pool.touch(self)

    def sampled(self, generation: Generation) -> None:
        if generation.finish_reason != "abort":  # one that broke off has not shown that it works
            self.failures_in_a_row = 0
        if generation.token_ids and (generation.versions or generation.finish_reason != "abort"):
            # an abort without versions says nothing of the engine: it may be a stream that broke off before its end
            self.says_versions = bool(generation.versions) and self.engine.info.reports_versions
        self.stats.tokens += len(generation.token_ids)
        self.stats.prompt_tokens += generation.prompt_tokens
        self.stats.cached_tokens += generation.cached_tokens or 0
        self.stats.aborts += generation.finish_reason == "abort"

    def refused(self, error: EngineFailure) -> None:
        self.stats.refusals += 1
        self.stats.last_error = error.detail

    def failed(self, detail: str, trip_after: int) -> None:
        """Counts a failure; so many in a row take the engine down."""
        self.stats.failures += 1
        self.stats.last_error = detail
        self.failures_in_a_row += 1
        if self.health is not Health.UP or self.failures_in_a_row < trip_after:
            return
        self.stats.trips += 1
        self.set_health(Health.DOWN)
        log.warning("engine is down", extra={"engine": self.id, "error": detail})

    def set_health(self, health: Health) -> None:
        self.health = health
        if health is Health.UP:
            self.failures_in_a_row = 0
        self.pool.touch(self)


_Entry = tuple[tuple[float, int], int, Member]
"""(load, stamp, engine). Stamps are unique, so engines themselves are never compared."""


class Pool:
    """See the module. A policy's weights have one version, and one gate that a weight update shuts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 0
        self.members: dict[str, Member] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._heap: list[_Entry] = []
        self._stamps = 0
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def is_paused(self) -> bool:
        return not self._open.is_set()

    def shut(self) -> None:
        self._open.clear()
        for member in self.members.values():
            for call in member.calls:
                call.hold()

    def open(self) -> None:
        self._open.set()
        for member in self.members.values():
            for call in member.calls:
                call.release()

    async def opened(self) -> None:
        await self._open.wait()

    def add(self, member: Member) -> None:
        self.members[member.id] = member
        self.touch(member)

    def drop(self, member: Member) -> None:
        self.members.pop(member.id, None)
        member.set_health(Health.GONE)

    def touch(self, member: Member) -> None:
        """Its load or health changed."""
        self._stamps += 1
        member.stamp = self._stamps
        if member.health is not Health.UP:
            return
        if len(self._heap) > 64 + 4 * len(self.members):
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].stamp]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (member.load, self._stamps, member))
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def pick(self, avoid: Collection[Member] = ()) -> Member | None:
        """The least loaded that is up and not to be avoided."""
        skipped: list[_Entry] = []
        found: Member | None = None
        while self._heap and found is None:
            entry = self._heap[0]
            member = entry[2]
            if entry[1] != member.stamp or member.health is not Health.UP:
                heapq.heappop(self._heap)
            elif member in avoid:
                skipped.append(heapq.heappop(self._heap))
            else:
                found = member
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return found

    async def wait_for_one(self, timeout_s: float) -> Member:
        """The least loaded, as soon as any is up; EngineUnavailable when none comes up in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while (member := self.pick()) is None:
                    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiters.add(waiter)
                    try:
                        await waiter
                    finally:
                        self._waiters.discard(waiter)
                return member
        except TimeoutError:
            raise EngineUnavailable(f"no engine of {self.name} came up within {timeout_s} s: {self._why()}") from None

    def _why(self) -> str:
        if not self.members:
            return "it has none"
        return "; ".join(
            f"{m.id} is {m.health}: {m.stats.last_error or 'no answer yet'}" for m in self.members.values()
        )
