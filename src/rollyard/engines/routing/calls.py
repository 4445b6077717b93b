"""One call of a completion: how it ends, and what it sampled, whoever ended it.

A call that we end (its time is up, the weights are to change, nobody wants it any more) is aborted, and is given some
time to hand over what it had sampled. A streamed one that does not obey is hung up on: what it told is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rollyard.core import Deadline
from rollyard.core.deadline import Alarm
from rollyard.core.failure import EngineFailure, EngineRefused
from rollyard.engines.base import Engine, GenerateRequest, Generation, OnTokens
from rollyard.engines.clients.http import Contact
from rollyard.engines.routing.pool import EngineCall, EnginePool, PoolMember
from rollyard.engines.weights.provenance import with_versions

log = logging.getLogger("rollyard.engines")

UNVERIFIED = (
    "the tokenizer of engine {engine} could not be verified, as it does not tokenize for us; if it is the model's own, "
    "say so with trust_tokenizer"
)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How patient a session is."""

    engine_wait_s: float = 120.0
    """How long it waits for any engine of its policy to be up."""
    pause_wait_s: float | None = None
    """How long it waits for a paused policy. None: as long as the trainer takes; clocks stand still."""
    max_tries: int = 4
    """Tries that sampled nothing, per completion. Above the breaker's threshold, so that a lone engine that went
    away is found down, waited for, and tried once more. Nonsense and time-outs cost two."""
    backoff_s: float = 0.1
    """Before the second try; doubled for each later one, with jitter."""
    abort_grace_s: float = 10.0
    """How long an aborted call may take to hand over what it had sampled."""
    trip_after: int = 3
    """Consecutive failures that take an engine down."""


@dataclass(slots=True)
class RouterStats:
    """Counters over all engines."""

    sessions: int = 0
    moves: int = 0  # sessions that changed engine
    retries: int = 0  # tries after one that sampled nothing
    continuations: int = 0  # calls that went on from kept tokens
    tokens_lost: int = 0  # calls of which nothing was got back in time: how much they had sampled is unknown


Ended = Literal["done", "clock", "model", "cut", "stop"]


class CompletionCaller:
    """See the module. One per session."""

    def __init__(self, pool: EnginePool, settings: SessionSettings, stats: RouterStats) -> None:
        self._pool = pool
        self._settings = settings
        self._stats = stats

    async def call(
        self,
        member: PoolMember,
        request: GenerateRequest,
        clock: Deadline,
        model_s: float,
        on_tokens: OnTokens | None,
        stop: asyncio.Future[None] | None,
    ) -> tuple[Ended, Generation | None]:
        """How the call ended, and what it sampled: None if that could not be got."""
        if clock.is_expired:
            return "clock", None
        limit = clock.alike(model_s)
        call = EngineCall(clock, limit, is_streamed=on_tokens is not None)
        first_contact: Contact | None = None

        def on_first(tokens: Sequence[int]) -> None:
            nonlocal first_contact
            if first_contact is None:
                first_contact = member.engine.contact
            assert on_tokens is not None
            on_tokens(tokens)

        ending = _Ending(self._settings.abort_grace_s, member.engine, request.request_id, call)
        member.begin(call)
        try:
            ending.watch(clock, limit, stop)
            part = await ending.unless_given_up(member.engine.generate(request, on_first if on_tokens else None))
            if part is None:
                self._stats.tokens_lost += 1
                return ending.why, None
            ending.close()
            member.sampled(part)
            return ending.why, _vetted(member, await with_versions(member, call, part, first_contact))
        except EngineFailure as error:
            if ending.why != "done":  # we ended it: that it then failed is not held against it
                self._stats.tokens_lost += ending.is_hung_up
                return ending.why, None
            if isinstance(error, EngineRefused):
                member.refused(error)
            else:
                member.failed(error.detail, self._settings.trip_after)
            raise
        finally:
            ending.close()
            member.end(call)


def _vetted(member: PoolMember, part: Generation) -> Generation:
    """The part, marked if nothing shows that its ids mean to the engine what they mean to us."""
    if member.is_tokenizer_verified:
        return part
    reason = "" if member.engine.spec.trust_tokenizer else UNVERIFIED.format(engine=member.id)
    return replace(part, is_tokenizer_verified=False, untrainable=part.untrainable or reason)


class _Ending:
    """What ends a call before it is done, and how: the first of its clocks, of a cut and of `stop` has it aborted,
    again if need be (an abort may overtake its request). After the grace it is hung up on, and in the end given up.

    The call itself is awaited in its own task, not in one more: nearly all calls just end."""

    def __init__(self, grace_s: float, engine: Engine, request_id: str, call: EngineCall) -> None:
        self.why: Ended = "done"
        self._grace_s = grace_s
        self._engine = engine
        self._request_id = request_id
        self._call = call
        self._task = asyncio.current_task()
        self._alarms: tuple[Alarm, ...] = ()
        self._stop: asyncio.Future[None] | None = None
        self._aborting: asyncio.Task[None] | None = None
        self._is_given_up = False
        self.is_hung_up = False

    def watch(self, clock: Deadline, limit: Deadline, stop: asyncio.Future[None] | None) -> None:
        self._alarms = (clock.alarm(lambda: self._begin("clock")), limit.alarm(lambda: self._begin("model")))
        for alarm in self._alarms:
            alarm.start()
        self._call.cut_asked.add_done_callback(self._cut)
        if stop is not None:
            self._stop = stop
            stop.add_done_callback(self._stopped)

    async def unless_given_up(self, generating: Coroutine[None, None, Generation]) -> Generation | None:
        try:
            return await generating
        except asyncio.CancelledError:
            if not self._is_given_up or self._task is None or self._task.uncancel() > 0:
                raise
            return None

    def close(self) -> None:
        for alarm in self._alarms:
            alarm.stop()
        self._call.cut_asked.remove_done_callback(self._cut)
        if self._stop is not None:
            self._stop.remove_done_callback(self._stopped)
        if self._aborting is not None:
            self._aborting.cancel()

    def _cut(self, _: asyncio.Future[None]) -> None:
        self._begin("cut")

    def _stopped(self, _: asyncio.Future[None]) -> None:
        self._begin("stop")

    def _begin(self, why: Ended) -> None:
        if self.why == "done":
            self.why = why
            for alarm in self._alarms:
                alarm.stop()  # waiting for the rest of an aborted call is free
            self._aborting = asyncio.create_task(self._abort(), name=f"abort {self._request_id}")

    async def _abort(self) -> None:
        pause_s = 0.1
        try:
            async with asyncio.timeout(self._grace_s):
                while True:
                    try:
                        await self._engine.abort(self._request_id)
                    except EngineFailure as error:
                        log.info("an abort failed", extra={"engine": self._engine.spec.id, "error": error.detail})
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, 2.0)
        except TimeoutError:
            log.warning("an aborted call did not end in time", extra={"engine": self._engine.spec.id})
        if self._call.is_streamed:
            self.is_hung_up = True
            self._engine.hang_up(self._request_id)
            await asyncio.sleep(self._grace_s)
        self._is_given_up = True
        if self._task is not None:
            self._task.cancel()
