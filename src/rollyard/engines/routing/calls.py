"""One engine call of a completion: why it ended, and what it sampled.

A call that the session ends (it timed out, the weights are to change, the reader disconnected) is aborted, and has some
time to return what it sampled. The stream of a call that does not obey is closed; the tokens received are kept.
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
from rollyard.engines.base import Contact, Engine, GenerateRequest, Generation, OnTokens
from rollyard.engines.pool.pool import EngineCall, EnginePool, PoolMember
from rollyard.engines.weights.provenance import with_versions

log = logging.getLogger("rollyard.engines")

UNVERIFIED = (
    "the tokenizer of engine {engine} could not be verified, because the engine has no route to tokenize a text; if it "
    "is the model's own tokenizer, set trust_tokenizer"
)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The time limits and retries of a session."""

    engine_wait_s: float = 120.0
    """How long a session waits for any engine of its policy to be up."""
    pause_wait_s: float | None = None
    """How long a session waits for a paused policy. None: without limit; clocks are stopped meanwhile."""
    max_tries: int = 4
    """Tries that sampled nothing, per completion. It is above the breaker's threshold, so that a policy's only engine,
    if lost, is found down, waited for, and tried once more. An invalid reply or a timeout counts as two."""
    backoff_s: float = 0.1
    """The pause before the second try; doubled for each later one, with jitter."""
    abort_grace_s: float = 10.0
    """How long an aborted call may take to return what it sampled."""
    trip_after: int = 3
    """Consecutive failures that take an engine down."""


@dataclass(slots=True)
class RouterStats:
    """Counters over all engines."""

    sessions: int = 0
    moves: int = 0  # sessions that changed engine
    retries: int = 0  # tries after one that sampled nothing
    continuations: int = 0  # calls that continued from kept tokens
    tokens_lost: int = 0  # calls that returned nothing in time: how much they had sampled is unknown


Ended = Literal["done", "clock", "model", "cut", "stop"]


class CompletionCaller:
    """Makes the engine calls of one session."""

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
        """Why the call ended, and what it sampled; None if the engine did not return it."""
        if clock.is_expired:
            return "clock", None
        limit = clock.with_budget(model_s)
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
            part = await ending.unless_abandoned(member.engine.generate(request, on_first if on_tokens else None))
            if part is None:
                self._stats.tokens_lost += 1
                return ending.why, None
            ending.close()
            member.sampled(part)
            part = replace(part, engine=member.id, logprobs_kind=member.engine.info.logprobs_kind)
            return ending.why, _marked_unverified(member, await with_versions(member, call, part, first_contact))
        except EngineFailure as error:
            if ending.why != "done":  # it was ended from here, so the engine is not blamed
                self._stats.tokens_lost += ending.is_hung_up
                return ending.why, None
            if isinstance(error, EngineRefused):
                member.refused(error)
            else:
                member.failed(error, self._settings.trip_after)
            raise
        finally:
            ending.close()
            member.end(call)


def _marked_unverified(member: PoolMember, part: Generation) -> Generation:
    """The part, marked if the engine's tokenizer is not verified to be the renderer's."""
    if member.is_tokenizer_verified:
        return part
    reason = "" if member.engine.spec.trust_tokenizer else UNVERIFIED.format(engine=member.id)
    return replace(part, is_tokenizer_verified=False, untrainable=part.untrainable or reason)


class _Ending:
    """Ends a call early. The first of its clocks, a cut or `stop` aborts it, repeatedly if necessary (an abort may
    overtake its request). After the grace period its stream is closed, and finally the call is abandoned.

    The call is awaited in its caller's task, not in an extra one: nearly all calls end by themselves."""

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
        self._is_abandoned = False
        self.is_hung_up = False

    def watch(self, clock: Deadline, limit: Deadline, stop: asyncio.Future[None] | None) -> None:
        self._alarms = (clock.alarm(lambda: self._begin("clock")), limit.alarm(lambda: self._begin("model")))
        for alarm in self._alarms:
            alarm.start()
        self._call.cut_asked.add_done_callback(self._cut)
        if stop is not None:
            self._stop = stop
            stop.add_done_callback(self._stopped)

    async def unless_abandoned(self, generating: Coroutine[None, None, Generation]) -> Generation | None:
        try:
            return await generating
        except asyncio.CancelledError:
            if not self._is_abandoned or self._task is None or self._task.uncancel() > 0:
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
                alarm.stop()  # waiting for an aborted call does not count
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
        self._is_abandoned = True
        if self._task is not None:
            self._task.cancel()
