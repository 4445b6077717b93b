"""A session: one rollout's hold on a policy's engines, and the art of finishing a completion that was interrupted.

A completion may take several calls: an engine is lost, a call runs past `model_s`, the policy is paused to change its
weights. What a call had sampled is kept, the next one is sent prompt + kept tokens with as many fewer to sample, and
all of it is joined into one `Generation`, logprobs and version spans included.

Invariants. No token is sampled twice. `clock` counts only while an engine generates for us; waiting for a paused
policy, for an engine to come up, between two tries, or for the rest of an aborted call, is free. A try that sampled
nothing costs from a bounded budget; one that sampled something costs nothing, since `max_tokens` bounds it.
Every version span has a version: the engine's where it says, else that of its weights when the call began (a call
that an engine cannot number is cut before the weights change, so it never spans two; a streamed call is such a one).

A streamed completion tells its caller every token once, and what was told is never lost: a call that does not obey
its abort is hung up on, and its tokens are kept.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rollyard.core import Deadline, DeadlineExpired, Json, Message, Sampling
from rollyard.core.failure import EngineBroken, EngineFailure, EngineRefused, EngineTimeout, EngineUnavailable
from rollyard.engines.base import ChatReply, Engine, GenerateRequest, Generation, OnTokens
from rollyard.engines.clients.sampling_extra import CONSTRAINTS
from rollyard.engines.routing.calls import CompletionCaller, RouterStats, SessionSettings
from rollyard.engines.routing.completion import PartialCompletion
from rollyard.engines.routing.pool import EngineCall, EnginePool, Health, PoolMember

UNBOUND = "the rest of an interrupted completion is not constrained as its beginning was"


class RoutedSession:
    """See the module. Made by `Router.open_session`."""

    def __init__(
        self,
        pool: EnginePool,
        member: PoolMember,
        session_id: str,
        priority: int,
        settings: SessionSettings,
        stats: RouterStats,
    ) -> None:
        self._pool = pool
        self._member = member
        self._id = session_id
        self._priority = priority
        self._settings = settings
        self._stats = stats
        self._caller = CompletionCaller(pool, settings, stats)
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
        on_tokens: OnTokens | None = None,
        resume: Generation | None = None,
        stop: asyncio.Future[None] | None = None,
        stop_texts: tuple[str, ...] = (),
        top_logprobs: int = 0,
    ) -> Generation:
        kept = PartialCompletion()
        if resume is not None and resume.token_ids:
            _check_versions(resume)
            kept.add(resume)
            if on_tokens is not None:
                on_tokens(resume.token_ids)
            if resume.finish_reason != "abort":
                return kept.generation(resume.finish_reason)
        tries = _Tries(self._settings, self._stats)
        try:
            while True:
                at = len(kept.token_ids)
                # an abort may come just after the last token, and a stream break just before it says so
                if at and kept.token_ids[-1] in stop_token_ids:
                    return kept.generation("stop")
                if at >= max_tokens > 0:
                    return kept.generation("length")
                if stop is not None and stop.done():
                    return kept.generation("abort")
                member = await self._unless(stop, tries.avoid, clock)
                self._calls += 1
                request = GenerateRequest(
                    # no id begins another: SGLang aborts all that begin with the one it is told
                    request_id=f"{self._id}-{self._calls}-{self._nonce}",
                    prompt_ids=[*prompt_ids, *kept.token_ids] if at else prompt_ids,
                    sampling=_rest_of(sampling, at) if at else sampling,
                    max_tokens=max_tokens - at,
                    # the same seed again would draw the same numbers for other tokens
                    seed=seed if seed is None or not at else (seed + 1_000_003 * at) % (1 << 31),
                    stop_token_ids=stop_token_ids,
                    stop=stop_texts,
                    top_logprobs=top_logprobs,
                    session_id=self._id,
                    cache_salt=f"{self._pool.name}:{member.version}",
                    priority=self._priority,
                )
                self._stats.continuations += at > 0
                try:
                    ended, part = await self._caller.call(member, request, clock, model_s, on_tokens, stop)
                except EngineRefused as error:
                    if at and error.data.get("context"):
                        return kept.generation("length")  # the kept tokens fill the context to the brim
                    raise
                except EngineFailure as error:
                    await tries.spend(member, error)
                    continue
                if part is not None:
                    kept.add(_unbound(part) if at and CONSTRAINTS & sampling.extra.keys() else part)
                if ended == "clock":
                    raise DeadlineExpired(f"{clock.budget_s} s are used up")
                if part is not None and part.finish_reason != "abort":
                    return kept.generation(part.finish_reason)
                if ended == "done" and part is not None and part.token_ids:
                    member.failed("a call broke off that nobody had aborted", self._settings.trip_after)
                elif ended not in ("cut", "stop") and not (part and part.token_ids):
                    error = (
                        EngineTimeout(f"engine {member.id} sampled nothing in {model_s} s")
                        if ended == "model"
                        else EngineUnavailable(f"engine {member.id} aborted a call that nobody asked it to")
                    )
                    member.failed(error.detail, self._settings.trip_after)
                    await tries.spend(member, error)
        except _Stopped:
            return kept.generation("abort")
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
            limit = clock.alike(model_s)
            call = EngineCall(clock, limit, is_cuttable=False)
            member.begin(call)
            try:
                async with clock.counting(), limit.counting():
                    reply = await member.engine.chat(messages, sampling=sampling, tools=tools, session_id=self._id)
                if reply.finish_reason == "abort" and call.was_paused:
                    continue  # the weights are to change: it is asked again, whole, since text cannot be continued
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

    async def _unless(self, stop: asyncio.Future[None] | None, avoid: set[PoolMember], clock: Deadline) -> PoolMember:
        """`_usable`, with the clock held while it waits; `_Stopped` if nobody wants it any more."""
        member = self._member
        if member.is_usable and member not in avoid and not self._is_closed:
            return member  # nearly always: nothing to wait for
        with clock.held():
            if stop is None:
                return await self._usable(avoid)
            while True:
                finding = asyncio.ensure_future(self._usable(avoid))
                try:
                    await asyncio.wait({finding, stop}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not finding.done():
                        finding.cancel()
                        await asyncio.wait({finding})
                if finding.cancelled():  # by us: it is `stop` that came first
                    raise _Stopped
                member = finding.result()
                if member.is_usable:  # it may be paused again: we hear of a member some steps after it was found
                    return member

    async def _usable(self, avoid: set[PoolMember]) -> PoolMember:
        """The engine it sticks to if that can be used, else another one; waits for the policy and for engines."""
        if self._is_closed:
            raise RuntimeError(f"session {self._id} is closed")
        while True:
            if self._must_wait():
                await self._resumed()
                continue
            member: PoolMember | None = self._member
            if not self._member.is_usable or self._member in avoid:
                member = self._pool.pick(avoid) or self._pool.pick()
            if member is None:
                wait_s, pause_wait_s = self._settings.engine_wait_s, self._settings.pause_wait_s
                member = await self._pool.wait_for_one(wait_s, pause_wait_s)
            if member is not self._member:
                self._stats.moves += 1
                self._member.unseat()
                self._member = member
                member.seat()
            if member.is_usable:  # it may not be, after a wait
                return member

    def _must_wait(self) -> bool:
        """Its engine gets new weights, and it is to go on there."""
        member = self._member
        if not member.is_paused or member.health is not Health.UP:
            return False
        return not member.is_leaving or self._pool.pick() is None

    async def _resumed(self) -> None:
        wait_s = self._settings.pause_wait_s
        try:
            async with asyncio.timeout(wait_s):
                while self._must_wait():
                    await self._pool.gates_moved()
        except TimeoutError:
            raise EngineUnavailable(f"policy {self._pool.name} was paused for more than {wait_s} s") from None


class _Stopped(Exception):
    """Nobody wants the rest of it."""


def _rest_of(sampling: Sampling, at: int) -> Sampling:
    """The same when so many tokens are there already: an engine refuses a least number above the most. A form that the
    completion is bound to would begin anew in the middle of it, so the rest is not bound."""
    least = {name: sampling.extra.get(name) for name in ("min_tokens", "min_new_tokens")}
    left = {name: max(0, count - at) for name, count in least.items() if isinstance(count, int)}
    bound = CONSTRAINTS & sampling.extra.keys()
    if not left and not bound:
        return sampling
    return replace(sampling, extra={key: it for key, it in {**sampling.extra, **left}.items() if key not in bound})


def _unbound(part: Generation) -> Generation:
    return replace(part, untrainable=part.untrainable or UNBOUND)


def _check_versions(part: Generation) -> None:
    if not part.versions or part.versions[-1].end != len(part.token_ids):
        raise ValueError("what is resumed does not say which weights sampled it")


class _Tries:
    """The budget of tries that sampled nothing, of one completion."""

    def __init__(self, settings: SessionSettings, stats: RouterStats) -> None:
        self.avoid: set[PoolMember] = set()
        self._left = settings.max_tries
        self._pause_s = settings.backoff_s
        self._stats = stats

    async def spend(self, member: PoolMember, error: EngineFailure) -> None:
        """Returns when the next try may be made; raises the error if there is none left."""
        self._left -= 2 if isinstance(error, EngineBroken | EngineTimeout) else 1
        if self._left <= 0:
            raise error
        self.avoid.add(member)
        self._stats.retries += 1
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.5))
        self._pause_s *= 2
