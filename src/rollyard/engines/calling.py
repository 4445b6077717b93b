"""One call of a completion: how it ends, and what it sampled, whoever ended it.

A call that we end (its time is up, the weights are to change, nobody wants it any more) is aborted, and is given some
time to hand over what it had sampled. A streamed one that does not obey is hung up on: what it told is kept.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Literal

from rollyard.core import Deadline, DeadlineExpired
from rollyard.core.failure import EngineFailure, EngineRefused
from rollyard.engines.base import GenerateRequest, Generation, OnTokens
from rollyard.engines.joining import stamped
from rollyard.engines.pool import Call, Member, Pool

log = logging.getLogger("rollyard.engines")


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


class Caller:
    """See the module. One per session."""

    def __init__(self, pool: Pool, settings: SessionSettings, stats: RouterStats) -> None:
        self._pool = pool
        self._settings = settings
        self._stats = stats

    async def call(
        self,
        member: Member,
        request: GenerateRequest,
        clock: Deadline,
        model_s: float,
        on_tokens: OnTokens | None,
        stop: asyncio.Future[None] | None,
    ) -> tuple[Ended, Generation | None]:
        """How the call ended, and what it sampled: None if that could not be got."""
        limit = Deadline(model_s)
        call = Call(clock, limit, is_streamed=on_tokens is not None)
        version = self._pool.version
        task: asyncio.Task[Generation] | None = None
        ended: Ended = "done"
        member.begin(call)
        try:
            try:
                async with clock.counting(), limit.counting():
                    task = asyncio.create_task(member.engine.generate(request, on_tokens))
                    ends = {task, call.cut_asked} if stop is None else {task, call.cut_asked, stop}
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    ended = "cut" if call.cut_asked.done() else "stop"
            except DeadlineExpired:
                ended = "clock" if clock.is_expired else "model"
            if task is None:
                return ended, None
            if task.done() or await self._abort(member, request.request_id, task):
                part = task.result()
            else:
                part = await self._hung_up(member, request.request_id, task) if call.is_streamed else None
            if part is None:
                self._stats.tokens_lost += 1
                return ended, None
            member.sampled(part)
            return ended, stamped(part, version)
        except EngineFailure as error:
            if ended != "done":  # we ended it: that it then failed is not held against it
                return ended, None
            if isinstance(error, EngineRefused):
                member.refused(error)
            else:
                member.failed(error.detail, self._settings.trip_after)
            raise
        finally:
            try:
                if task is not None and not task.done():
                    task.cancel()  # which frees the engine: see RemoteEngine
                    await asyncio.wait({task})
            finally:
                member.end(call)  # even if a second cancel cuts that short

    async def _hung_up(self, member: Member, request_id: str, task: asyncio.Task[Generation]) -> Generation | None:
        """What a streamed call has told so far; it is read no further. None if that is nothing."""
        member.engine.hang_up(request_id)
        await asyncio.wait({task}, timeout=self._settings.abort_grace_s)
        if not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def _abort(self, member: Member, request_id: str, task: asyncio.Task[Generation]) -> bool:
        """Aborts, again if need be (an abort may overtake its request); False if the call did not end in time."""
        pause_s = 0.1
        try:
            async with asyncio.timeout(self._settings.abort_grace_s):
                while not task.done():
                    try:
                        await member.engine.abort(request_id)
                    except EngineFailure as error:
                        log.info("an abort failed", extra={"engine": member.id, "error": error.detail})
                    await asyncio.wait({task}, timeout=pause_s)
                    pause_s = min(2 * pause_s, 2.0)
        except TimeoutError:
            log.warning("an aborted call did not end in time", extra={"engine": member.id})
        return task.done()
