"""A session: one rollout's hold on a policy's engines, and the art of finishing a completion that was interrupted.

A completion may take several calls: an engine is lost, a call runs past `model_s`, the policy is paused to change its
weights. What a call had sampled is kept, the next one is sent prompt + kept tokens with as many fewer to sample, and
all of it is joined into one `Generation`, logprobs and version spans included.

Invariants. No token is sampled twice. `clock` counts only while an engine generates for us; waiting for a paused
policy, for an engine to come up, between two tries, or for the rest of an aborted call, is free. A try that sampled
nothing costs from a bounded budget; one that sampled something costs nothing, since `max_tokens` bounds it.
Every version span has a version: the engine's where it says, else that of the policy when the call began (a call
that an engine cannot number is cut before the weights change, so it never spans two).
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollyard.core import Deadline, DeadlineExpired, Json, Message, Sampling
from rollyard.core.failure import EngineBroken, EngineFailure, EngineRefused, EngineTimeout, EngineUnavailable
from rollyard.engines.base import ChatReply, Engine, GenerateRequest, Generation
from rollyard.engines.joining import Kept, stamped
from rollyard.engines.pool import Call, Health, Member, Pool

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
    tokens_lost: int = 0  # calls whose abort gave nothing back in time: how much they had sampled is unknown


Ended = Literal["done", "clock", "model", "cut"]


class RoutedSession:
    """See the module. Made by `Router.open_session`."""

    def __init__(
        self, pool: Pool, member: Member, session_id: str, priority: int, settings: SessionSettings, stats: RouterStats
    ) -> None:
        self._pool = pool
        self._member = member
        self._id = session_id
        self._priority = priority
        self._settings = settings
        self._stats = stats
        self._nonce = secrets.token_hex(4)  # an earlier attempt's calls, same session id, may still be ending
        self._calls = 0
        self._is_closed = False
        stats.sessions += 1
        member.seat()

    @property
    def id(self) -> str:
        return self._id

    @property
    def engine(self) -> Engine:
        return self._member.engine

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._member.unseat()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        sampling: Sampling,
        max_tokens: int,
        seed: int | None,
        stop_token_ids: tuple[int, ...],
        clock: Deadline,
        model_s: float,
        salvage: Callable[[Generation], None] = lambda _: None,
    ) -> Generation:
        kept = Kept()
        tries = _Tries(self._settings, self._stats)
        try:
            while True:
                member = await self._usable(tries.avoid)
                self._calls += 1
                at = len(kept.token_ids)
                request = GenerateRequest(
                    request_id=f"{self._id}-{self._nonce}-{self._calls}",
                    prompt_ids=[*prompt_ids, *kept.token_ids] if at else prompt_ids,
                    sampling=sampling,
                    max_tokens=max_tokens - at,
                    # the same seed again would draw the same numbers for other tokens
                    seed=seed if seed is None or not at else (seed + 1_000_003 * at) % (1 << 31),
                    stop_token_ids=stop_token_ids,
                    session_id=self._id,
                    cache_salt=f"{self._pool.name}:{self._pool.version}",
                    priority=self._priority,
                )
                self._stats.continuations += at > 0
                try:
                    ended, part = await self._call(member, request, clock, model_s)
                except EngineRefused as error:
                    if at and error.data.get("context"):
                        return kept.generation("length")  # the kept tokens fill the context to the brim
                    raise
                except EngineFailure as error:
                    await tries.spend(member, error)
                    continue
                if part is not None:
                    kept.add(part)
                if ended == "clock":
                    raise DeadlineExpired(f"{clock.budget_s} s are used up")
                if part is not None and part.finish_reason != "abort":
                    return kept.generation(part.finish_reason)
                if len(kept.token_ids) >= max_tokens:
                    return kept.generation("length")
                if ended != "cut" and not (part and part.token_ids):
                    error = (
                        EngineTimeout(f"engine {member.id} sampled nothing in {model_s} s")
                        if ended == "model"
                        else EngineUnavailable(f"engine {member.id} aborted a call that nobody asked it to")
                    )
                    member.failed(error.detail, self._settings.trip_after)
                    await tries.spend(member, error)
        except (DeadlineExpired, EngineFailure):
            if kept.token_ids:
                salvage(kept.generation("abort"))
            raise

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling,
        tools: Sequence[Mapping[str, Json]],
        clock: Deadline,
        model_s: float,
    ) -> ChatReply:
        tries = _Tries(self._settings, self._stats)
        while True:
            member = await self._usable(tries.avoid)
            limit = Deadline(model_s)
            call = Call(clock, limit, is_cuttable=False)
            member.begin(call)
            try:
                async with clock.counting(), limit.counting():
                    reply = await member.engine.chat(messages, sampling=sampling, tools=tools, session_id=self._id)
                member.failures_in_a_row = 0
                member.stats.tokens += reply.completion_tokens
                member.stats.prompt_tokens += reply.prompt_tokens
                return reply
            except DeadlineExpired:
                if clock.is_expired:
                    raise
                failure: EngineFailure = EngineTimeout(f"engine {member.id} did not answer in {model_s} s")
            except EngineRefused as error:
                member.refused(error)
                raise
            except EngineFailure as error:
                failure = error
            finally:
                member.end(call)
            member.failed(failure.detail, self._settings.trip_after)
            await tries.spend(member, failure)

    # --- which engine

    async def _usable(self, avoid: set[Member]) -> Member:
        """The engine it sticks to if that can be used, else another one; waits for the policy and for engines."""
        if self._is_closed:
            raise RuntimeError(f"session {self._id} is closed")
        while True:
            if self._pool.is_paused:
                await self._resumed()
            member = self._member
            if member.health is not Health.UP or member in avoid:
                member = self._pool.pick(avoid) or self._pool.pick()
            if member is None:
                member = await self._pool.wait_for_one(self._settings.engine_wait_s)
            if member is not self._member:
                self._stats.moves += 1
                self._member.unseat()
                self._member = member
                member.seat()
            if not self._pool.is_paused:  # it may have been, while we waited
                return member

    async def _resumed(self) -> None:
        wait_s = self._settings.pause_wait_s
        try:
            async with asyncio.timeout(wait_s):
                await self._pool.opened()
        except TimeoutError:
            raise EngineUnavailable(f"policy {self._pool.name} was paused for more than {wait_s} s") from None

    # --- one call

    async def _call(
        self, member: Member, request: GenerateRequest, clock: Deadline, model_s: float
    ) -> tuple[Ended, Generation | None]:
        """How the call ended, and what it sampled: None if that could not be got."""
        limit = Deadline(model_s)
        call = Call(clock, limit)
        version = self._pool.version
        task: asyncio.Task[Generation] | None = None
        ended: Ended = "done"
        member.begin(call)
        try:
            try:
                async with clock.counting(), limit.counting():
                    task = asyncio.create_task(member.engine.generate(request))
                    await asyncio.wait({task, call.cut_asked}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    ended = "cut"
            except DeadlineExpired:
                ended = "clock" if clock.is_expired else "model"
            if task is None:
                return ended, None
            if not task.done() and not await self._abort(member, request.request_id, task):
                self._stats.tokens_lost += 1
                return ended, None
            part = task.result()
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
            log.warning("an aborted call gave nothing back in time", extra={"engine": member.id})
        return task.done()


class _Tries:
    """The budget of tries that sampled nothing, of one completion."""

    def __init__(self, settings: SessionSettings, stats: RouterStats) -> None:
        self.avoid: set[Member] = set()
        self._left = settings.max_tries
        self._pause_s = settings.backoff_s
        self._stats = stats

    async def spend(self, member: Member, error: EngineFailure) -> None:
        """Returns when the next try may be made; raises the error if there is none left."""
        self._left -= 2 if isinstance(error, EngineBroken | EngineTimeout) else 1
        if self._left <= 0:
            raise error
        self.avoid.add(member)
        self._stats.retries += 1
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.5))
        self._pause_s *= 2
