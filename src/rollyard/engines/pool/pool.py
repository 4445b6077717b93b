"""The engines of one policy (or the judges): the load, health and gate of each, and the callers that wait for one.

Invariants. `pick` returns the engine with the fewest live sessions per unit of capacity; calls in flight break ties. A
session that is in a tool call still counts, since its prefix is still in the engine's cache. Only this file changes
the counts. The heap deletes lazily: each change pushes a new entry with a new stamp, and entries with an old stamp
are dropped when they reach the top; it is rebuilt before it outgrows its engines.

Caps: an engine below its session cap is preferred to one at its cap, and a capped engine's load is relative to its
cap. The number of seats of a policy (`seats.py`) is the sum of the caps of its engines that are up, or of all of them
while no engine is up. It is unlimited if one of these has no cap, or if there is no engine. RUN admits rollouts by
seats; `pick` does not limit them.

The breaker: `trip_after` consecutive failures take an engine down. Only the router's watch, which has it sample a
token, brings it up again. A failure caused by the request (EngineRefused) does not count.

The gate: no call starts on an engine that is paused, or quarantined because it failed a weight update. Waiting for
such an engine is bounded only by `pause_wait_s` (`engines/weights/policies.py`); waiting for an engine that is down is
bounded by `engine_wait_s`. The `mode` of a closed gate decides what happens to calls in flight. It may become stricter
while the gate is closed, but never less strict, since nodes that follow these gates do the same to their calls
(`engines/weights/weight_gates.py`). The sessions and calls of nodes count as an engine's load.
The file is long because an engine's counts, gate and breaker change together.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rollyard.core import Deadline
from rollyard.core.failure import EngineFailure, EngineUnavailable
from rollyard.engines.base import Contact, Engine, EngineInfo, EngineLoad, EngineSpec, Generation, PauseMode
from rollyard.engines.pool.admission import SessionCap
from rollyard.engines.pool.remote_load import RemoteLoad
from rollyard.engines.pool.seats import Seats

log = logging.getLogger("rollyard.engines")

_STRICTNESS = {PauseMode.DRAIN: 0, PauseMode.KEEP: 1, PauseMode.ABORT: 2}


class Health(StrEnum):
    UP = "up"  # takes sessions
    DOWN = "down"  # its breaker is open, or it has not answered its first probe
    GONE = "gone"  # removed: its sessions move at their next call
    QUARANTINED = "quarantined"  # its weights are unknown: only a resume that names a version brings it up

    @property
    def is_reachable(self) -> bool:
        """Whether the engine answers, whatever its weights are."""
        return self in (Health.UP, Health.QUARANTINED)


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
    last_error_words: str = ""  # with the engine's own words, which may quote the prompt of a call

    def set_error(self, what: EngineFailure | str) -> None:
        """Records an error. `last_error` is shown to everyone who may use the engine, so it quotes no reply to a call;
        `last_error_words` is for operators."""
        self.last_error_words = what if isinstance(what, str) else what.detail
        status = None if isinstance(what, str) else what.data.get("status")
        self.last_error = self.last_error_words if status is None else f"it answered {status} to a call"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One entry of the engine list."""

    spec: EngineSpec
    info: EngineInfo | None  # None: it has not answered its first probe
    health: Health
    stats: EngineStats
    cap: int | None = None  # sessions it may have; None: unlimited
    load: EngineLoad | None = None  # as last reported
    version: int = 0  # of its weights
    is_paused: bool = False
    is_tokenizer_verified: bool = True  # False: the engine has no route to check its tokenizer with
    tokens_per_s: float | None = None  # sampled for all its clients, running calls included; None: not reported


class EngineCall:
    """A call in flight, as the router controls it."""

    def __init__(self, *clocks: Deadline, is_cuttable: bool = True, is_streamed: bool = False) -> None:
        self.is_cuttable = is_cuttable
        self.is_streamed = is_streamed  # its tokens count as they arrive; their versions arrive at its end, or never
        self.was_paused = False  # whether its engine was paused at any time since the call started
        self.version = 0  # of its engine's weights when the call started
        self.versions: set[int] = set()  # those its engine had, or was about to get, since then
        self.reported_version = -1  # the highest that its engine had reported by then
        self.is_version_accepted = False  # whether Rollyard had set its engine's version by then
        self.contact = Contact()  # with its engine when the call started
        self.cut_asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clocks = clocks
        self._holds: ExitStack | None = None

    def cut(self) -> None:
        """Makes its session abort the call, keep the sampled tokens, and continue from them when allowed."""
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
class PoolMember:
    """One engine in a pool."""

    engine: Engine
    pool: EnginePool
    health: Health = Health.DOWN
    is_probed: bool = False
    is_tokenizer_verified: bool = True
    reports_versions: bool = False  # its last generation reported the versions of its tokens
    reported_version: int = -1  # the highest that it reported since its version was set
    failures_in_a_row: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    calls: set[EngineCall] = field(default_factory=set[EngineCall])
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    stamp: int = 0
    session_cap: SessionCap | None = None
    reported_load: EngineLoad | None = None
    reported_at_s: float = 0.0
    tokens_per_s: float | None = None  # between its last two reports
    version: int = 0  # of its weights, as last set here
    is_version_accepted: bool = False  # the engine itself accepted this version
    started: str | None = None  # when the process started that has this version, as the engine reports it
    verified: Contact | None = None  # the contact in which the engine was last known to have this version
    next_version: int | None = None  # the version it is about to get
    is_paused: bool = False  # no call starts
    is_leaving: bool = False  # while it is paused, its sessions move to other engines if they can
    mode: PauseMode | None = None  # while it is paused: what happens to its calls in flight
    is_joined: bool = False  # it has the version of its policy, and may take calls
    is_pause_accepted: bool = False  # the engine itself accepted a pause
    remote_load: RemoteLoad = field(default_factory=RemoteLoad)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def id(self) -> str:
        return self.engine.spec.id

    @property
    def cap(self) -> int | None:
        return None if self.session_cap is None else self.session_cap.current

    @property
    def load(self) -> tuple[bool, float, int]:
        sessions, cap = self.sessions, self.cap
        is_full = cap is not None and sessions >= cap
        in_flight = self.stats.in_flight + self.remote_load.in_flight
        return is_full, sessions / max(1, cap or self.engine.spec.capacity), in_flight

    @property
    def sessions(self) -> int:
        """Live sessions of this router and of nodes."""
        return self.stats.sessions + self.remote_load.sessions

    def record_load(self, load: EngineLoad | None, now_s: float, *, is_anew: bool = False) -> None:
        """Records the reported load and adjusts the cap. `is_anew`: the engine has just come up."""
        self.tokens_per_s = _rate(self.reported_load, load, now_s - self.reported_at_s)
        self.reported_load, self.reported_at_s = load, now_s
        if self.session_cap is None:
            return
        before = self.cap
        if is_anew:
            self.session_cap.restart()
        if self.is_paused:
            self.session_cap.settle(now_s)
        elif load is not None:
            self.session_cap.observe(load, self.sessions, self.pool.seats.waiting, now_s)
        if self.cap != before:
            self.pool.touch(self)
            self.pool.rebound()

    def status(self) -> EngineStatus:
        info = self.engine.info if self.is_probed else None
        stats, more = self.stats, self.remote_load
        if more.sessions or more.in_flight or more.tokens:
            in_flight, tokens = stats.in_flight + more.in_flight, stats.tokens + more.tokens
            stats = replace(stats, sessions=self.sessions, in_flight=in_flight, tokens=tokens)
        return EngineStatus(
            self.engine.spec,
            info,
            self.health,
            stats,
            self.cap,
            self.reported_load,
            self.version,
            self.is_paused,
            self.is_tokenizer_verified,
            self.tokens_per_s if self.health is Health.UP else None,
        )

    @property
    def is_usable(self) -> bool:
        return self.health is Health.UP and not self.is_paused

    def seat(self) -> None:
        self.stats.sessions += 1
        self.pool.touch(self)

    def unseat(self) -> None:
        self.stats.sessions -= 1
        self.pool.touch(self)

    def begin(self, call: EngineCall) -> None:
        self.calls.add(call)
        self.idle.clear()
        call.version, call.versions = self.version, {self.version}
        if self.next_version is not None:
            call.versions.add(self.next_version)
        call.reported_version, call.is_version_accepted = self.reported_version, self.is_version_accepted
        call.contact = self.engine.contact
        self.stats.calls += 1
        self.stats.in_flight += 1
        self.pool.touch(self)

    def expect(self, version: int) -> None:
        """The engine is about to get this version: calls in flight may report it from now on."""
        self.next_version = version
        self.pool.moved()
        for call in self.calls:
            call.versions.add(version)

    def has(self, version: int) -> None:
        """The engine now has this version. Versions that it reported before no longer count."""
        self.expect(version)
        self.version, self.next_version, self.reported_version = version, None, -1

    def names_versions_of(self, call: EngineCall) -> bool:
        """Whether each token of the call will have its true version, even if the weights change during the call."""
        return self.reports_versions and not call.is_streamed

    def end(self, call: EngineCall) -> None:
        call.release()
        call.ended.set_result(None)
        self.calls.discard(call)
        self.stats.in_flight -= 1
        if not self.calls:
            self.idle.set()
            if self.is_paused:
                self.pool.wake()  # drained
        self.pool.touch(self)

    def cut(self, *, is_sparing: bool) -> list[asyncio.Future[None]]:
        """Cuts its calls, or (sparing) only those that cannot report their versions. Returns one future per cut call,
        done when the call has ended."""
        if self.is_paused:
            self._set_stricter_mode(PauseMode.KEEP if is_sparing else PauseMode.ABORT)
        cut = [call for call in self.calls if call.is_cuttable and not (is_sparing and self.names_versions_of(call))]
        for call in cut:
            call.cut()
        return [call.ended for call in cut]

    def _set_stricter_mode(self, mode: PauseMode) -> None:
        if self.mode is None or _STRICTNESS[mode] > _STRICTNESS[self.mode]:
            self.mode = mode
            self.pool.moved()

    def cut_calls(self) -> list[asyncio.Future[None]]:
        """The futures of calls that were cut and have not ended."""
        return [call.ended for call in self.calls if call.cut_asked.done()]

    def pause(self, mode: PauseMode = PauseMode.KEEP, *, is_leaving: bool = False) -> None:
        """No call starts from now on. The clocks of calls in flight are stopped, unless the mode lets them finish. The
        caller cuts calls as the mode requires."""
        self.is_paused = True
        self.is_leaving = is_leaving
        self._set_stricter_mode(mode)
        for call in self.calls:
            call.was_paused = True
            if mode is not PauseMode.DRAIN:
                call.hold()
        self.pool.touch(self)
        self.pool.wake()

    def unpause(self) -> None:
        self.is_paused = self.is_leaving = self.is_pause_accepted = False
        self.mode = None
        for call in self.calls:
            call.release()
        self.pool.touch(self)
        self.pool.wake()

    def quarantine(self, why: str) -> None:
        self.stats.set_error(why)
        self.set_health(Health.QUARANTINED)
        log.warning("engine is quarantined", extra={"engine": self.id, "error": why})

    def sampled(self, generation: Generation) -> None:
        if generation.finish_reason != "abort":  # an abort does not show that the engine works
            self.failures_in_a_row = 0
        if generation.token_ids and (generation.versions or generation.finish_reason != "abort"):
            # an abort without versions proves nothing: it may be a stream that broke off before its end
            has_named = bool(generation.versions) and generation.versions[-1].version >= 0
            self.reports_versions = has_named and self.engine.info.reports_versions
        if generation.versions:
            self.reported_version = max(self.reported_version, generation.versions[-1].version)
        self.stats.tokens += len(generation.token_ids)
        self.stats.prompt_tokens += generation.prompt_tokens
        self.stats.cached_tokens += generation.cached_tokens or 0
        self.stats.aborts += generation.finish_reason == "abort"

    def refused(self, error: EngineFailure) -> None:
        self.stats.refusals += 1
        self.stats.set_error(error)

    def failed(self, why: EngineFailure | str, trip_after: int) -> None:
        """Counts a failure; `trip_after` in a row take the engine down."""
        self.stats.failures += 1
        self.stats.set_error(why)
        self.failures_in_a_row += 1
        if self.health is not Health.UP or self.failures_in_a_row < trip_after:
            return
        self.stats.trips += 1
        self.set_health(Health.DOWN)
        log.warning("engine is down", extra={"engine": self.id, "error": self.stats.last_error_words})

    def set_health(self, health: Health) -> None:
        self.health = health
        if health is Health.UP:
            self.failures_in_a_row = 0
        self.pool.touch(self)
        self.pool.wake()


def _rate(before: EngineLoad | None, load: EngineLoad | None, elapsed_s: float) -> float | None:
    """Sampled tokens per second between two reports; None if one has no count, or the engine was restarted."""
    start, end = (None if one is None else one.sampled_tokens for one in (before, load))
    if start is None or end is None or end < start or elapsed_s <= 0:
        return None
    return (end - start) / elapsed_s


_Entry = tuple[tuple[bool, float, int], int, PoolMember]
"""(load, stamp, engine). Stamps are unique, so engines themselves are never compared."""


class EnginePool:
    """The engines of a policy. The policy's version is the last one resumed; each engine has its own, and a gate."""

    def __init__(self, name: str, moved: Callable[[], None] = lambda: None) -> None:
        """`moved` is called after each change that nodes must receive."""
        self.name = name
        self.moved = moved
        self.version = 0
        self.is_named = False  # a version has been set
        self.is_paused = False  # the policy as a whole: engines that are added are paused too
        self.members: dict[str, PoolMember] = {}
        self.seats = Seats()
        self._heap: list[_Entry] = []
        self._stamps = 0
        self._waiters: set[asyncio.Future[None]] = set()  # for an engine
        self._is_waiting_logged = False
        self._gate_waiters: set[asyncio.Future[None]] = set()  # for a change of gates or health

    @property
    def is_awaiting_weights(self) -> bool:
        """Whether an engine waits for new weights: a session that finds no other engine waits for it."""
        return self.is_paused or any(m.is_paused or m.health is Health.QUARANTINED for m in self.members.values())

    @property
    def is_unused(self) -> bool:
        """Whether it has no engine and no state, and nothing waits for one."""
        is_waited_for = self._waiters or self._gate_waiters or self.seats.taken or self.seats.waiting
        return not (self.members or self.is_named or self.is_paused or is_waited_for)

    def shut(self) -> None:
        self.is_paused = True
        for member in self.members.values():
            member.pause()

    def open(self) -> None:
        self.is_paused = False
        for member in self.members.values():
            member.unpause()
        self.wake()

    def wake(self) -> None:
        """Notifies waiters and nodes that a gate or a health changed."""
        self.rebound()
        self.moved()
        for waiter in (*self._waiters, *self._gate_waiters):
            if not waiter.done():
                waiter.set_result(None)

    async def gates_moved(self) -> None:
        """Waits until a gate or a health changes."""
        await _next(self._gate_waiters)

    def add(self, member: PoolMember) -> None:
        self.members[member.id] = member
        self.touch(member)
        self.rebound()

    def drop(self, member: PoolMember) -> None:
        self.members.pop(member.id, None)
        member.set_health(Health.GONE)

    def rebound(self) -> None:
        """Updates the number of seats after a change of a cap, a pause or an engine's health. There are none while all
        engines wait for weights: a rollout that started would hold its RUN slot until the policy is resumed."""
        if self.is_awaiting_weights and not any(member.is_usable for member in self.members.values()):
            self.seats.set_bound(0)
            return
        members = [member for member in self.members.values() if member.health is Health.UP] or self.members.values()
        caps = [member.cap for member in members]
        known = [cap for cap in caps if cap is not None]
        self.seats.set_bound(sum(known) if caps and len(known) == len(caps) else None)

    def touch(self, member: PoolMember) -> None:
        """Updates the heap after a change of an engine's load or health."""
        self._stamps += 1
        member.stamp = self._stamps
        if not member.is_usable:
            return
        if len(self._heap) > 64 + 4 * len(self.members):
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].stamp]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (member.load, self._stamps, member))
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def pick(self, avoid: Collection[PoolMember] = ()) -> PoolMember | None:
        """The least loaded engine that is up, not paused, and not in `avoid`."""
        skipped: list[_Entry] = []
        picked: PoolMember | None = None
        while self._heap and picked is None:
            entry = self._heap[0]
            member = entry[2]
            if entry[1] != member.stamp or not member.is_usable:
                heapq.heappop(self._heap)
            elif member in avoid:
                skipped.append(heapq.heappop(self._heap))
            else:
                picked = member
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return picked

    def pick_paused(self) -> PoolMember | None:
        """The least loaded engine that is up and paused: a session there waits, and costs nothing meanwhile."""
        paused = [m for m in self.members.values() if m.is_paused and m.health is Health.UP]
        return min(paused, key=lambda m: m.load, default=None)

    async def wait_for_one(self, timeout_s: float, pause_wait_s: float | None = None) -> PoolMember:
        """The least loaded engine, as soon as one is up. Raises EngineUnavailable if none comes up in time. While the
        policy waits for new weights, that time is `pause_wait_s` (None: unlimited)."""
        while (member := self.pick()) is None:
            is_awaiting_weights = self.is_awaiting_weights
            try:
                async with asyncio.timeout(pause_wait_s if is_awaiting_weights else timeout_s):
                    while self.pick() is None and self.is_awaiting_weights == is_awaiting_weights:
                        self._log_waiting(is_awaiting_weights)
                        await _next(self._waiters)
            except TimeoutError:
                if is_awaiting_weights:
                    raise EngineUnavailable(f"policy {self.name} was paused for more than {pause_wait_s} s") from None
                raise EngineUnavailable(
                    f"no engine of {self.name} came up within {timeout_s} s: {self._why()}"
                ) from None
        self._is_waiting_logged = False
        return member

    def _log_waiting(self, is_awaiting_weights: bool) -> None:
        """Logs that calls wait for an engine, once until one is up again."""
        if not self._is_waiting_logged and not is_awaiting_weights:
            self._is_waiting_logged = True
            log.warning("no engine serves a policy: its calls wait", extra={"policy": self.name, "why": self._why()})

    def _why(self) -> str:
        if not self.members:
            return "it has none"
        return "; ".join(
            f"{m.id} is {m.health}: {m.stats.last_error or 'no answer yet'}" for m in self.members.values()
        )


async def _next(waiters: set[asyncio.Future[None]]) -> None:
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.add(waiter)
    try:
        await waiter
    finally:
        waiters.discard(waiter)
