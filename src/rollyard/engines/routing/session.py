"""A session: one rollout's use of a policy's engines. It also finishes completions that were interrupted.

A completion may take several calls: an engine is lost, a call runs past `model_s`, the policy is paused to update its
weights. The tokens that a call sampled are kept. The next call gets the prompt plus the kept tokens, and samples that
many fewer. All parts are joined into one `Generation`, including logprobs and version spans.

Invariants. No token is sampled twice. `clock` runs only while an engine generates; it does not run while the session
waits for a paused policy, for an engine to come up, between two tries, or for the rest of an aborted call. A try that
sampled nothing is deducted from a bounded budget; one that sampled something is not, since `max_tokens` bounds it.
Every version span has a version: the one that the engine reports, otherwise that of its weights when the call started.
A call whose versions the engine cannot report (every streamed call is one) is cut before the weights change, so it
never spans two versions.

A streamed completion passes every token to its caller once, and never loses one that was passed on: if a call does not
obey its abort, its stream is closed and its tokens are kept.
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
from rollyard.engines.pool.pool import EngineCall, EnginePool, Health, PoolMember
from rollyard.engines.routing.calls import CompletionCaller, RouterStats, SessionSettings
from rollyard.engines.routing.completion import PartialCompletion

UNBOUND = "the rest of an interrupted completion was sampled without the constraint that its beginning had"


class RoutedSession:
    """One session. Created by `Router.open_session`."""

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
        self._nonce = secrets.token_hex(4)  # calls of an earlier attempt, with the same session id, may still run
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
        completion = PartialCompletion()
        if resume is not None and resume.token_ids:
            _check_versions(resume)
            completion.add(resume)
            if on_tokens is not None:
                on_tokens(resume.token_ids)
            if resume.finish_reason != "abort":
                return completion.generation(resume.finish_reason)
        tries = _Tries(self._settings, self._stats)
        try:
            while True:
                at = len(completion.token_ids)
                # an abort may arrive just after the last token, or a stream break just before its finish_reason
                if at and completion.token_ids[-1] in stop_token_ids:
                    return completion.generation("stop")
                if at >= max_tokens > 0:
                    return completion.generation("length")
                if stop is not None and stop.done():
                    return completion.generation("abort")
                member = await self._usable_unless_stopped(stop, tries.avoid, clock)
                self._calls += 1
                request = GenerateRequest(
                    # no id is a prefix of another: SGLang aborts every call whose id starts with the given one
                    request_id=f"{self._id}-{self._calls}-{self._nonce}",
                    prompt_ids=[*prompt_ids, *completion.token_ids] if at else prompt_ids,
                    sampling=_remaining_sampling(sampling, at) if at else sampling,
                    max_tokens=max_tokens - at,
                    # the same seed would draw the same random numbers again for the following tokens
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
                        return completion.generation("length")  # the kept tokens fill the context
                    raise
                except EngineFailure as error:
                    await tries.spend(member, error)
                    continue
                if part is not None:
                    completion.add(_unbound(part) if at and CONSTRAINTS & sampling.extra.keys() else part)
                if ended == "clock":
                    raise DeadlineExpired(f"{clock.budget_s} s are used up")
                if part is not None and part.finish_reason != "abort":
                    return completion.generation(part.finish_reason)
                if ended == "done" and part is not None and part.token_ids:
                    member.failed("a call broke off without an abort", self._settings.trip_after)
                elif ended not in ("cut", "stop") and not (part and part.token_ids):
                    error = (
                        EngineTimeout(f"engine {member.id} sampled nothing in {model_s} s")
                        if ended == "model"
                        else EngineUnavailable(f"engine {member.id} aborted a call without being asked to")
                    )
                    member.failed(error, self._settings.trip_after)
                    await tries.spend(member, error)
        except _Stopped:
            return completion.generation("abort")
        except (DeadlineExpired, EngineFailure):
            if completion.token_ids:
                salvage(completion.generation("abort"))
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
            limit = clock.with_budget(model_s)
            call = EngineCall(clock, limit, is_cuttable=False)
            member.begin(call)
            try:
                async with clock.counting(), limit.counting():
                    reply = await member.engine.chat(messages, sampling=sampling, tools=tools, session_id=self._id)
                if reply.finish_reason == "abort" and call.was_paused:
                    continue  # aborted by a weight update: repeated from the start, since text cannot be continued
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
            member.failed(failure, self._settings.trip_after)
            await tries.spend(member, failure)

    # --- which engine

    async def _usable_unless_stopped(
        self, stop: asyncio.Future[None] | None, avoid: set[PoolMember], clock: Deadline
    ) -> PoolMember:
        """`_usable`, with the clock stopped while it waits. Raises `_Stopped` when `stop` is done."""
        member = self._member
        if member.is_usable and member not in avoid and not self._is_closed:
            return member  # the usual case
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
                if finding.cancelled():  # above, because `stop` came first
                    raise _Stopped
                member = finding.result()
                if member.is_usable:  # it may have been paused again since it was found, some loop iterations ago
                    return member

    async def _usable(self, avoid: set[PoolMember]) -> PoolMember:
        """The current engine if it is usable, otherwise another one. Waits for the policy and for engines."""
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
            if member.is_usable:  # after a wait it may no longer be
                return member

    def _must_wait(self) -> bool:
        """Whether its engine is being updated and the session has to continue there."""
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
    """The rest of the completion is no longer needed."""


def _remaining_sampling(sampling: Sampling, at: int) -> Sampling:
    """The parameters for the rest of a completion that has `at` tokens. Minimum lengths are reduced, because an engine
    refuses a minimum above the maximum. Constraints are removed, because they would start again in the middle."""
    least = {name: sampling.extra.get(name) for name in ("min_tokens", "min_new_tokens")}
    minimums = {name: max(0, count - at) for name, count in least.items() if isinstance(count, int)}
    bound = CONSTRAINTS & sampling.extra.keys()
    if not minimums and not bound:
        return sampling
    return replace(sampling, extra={key: it for key, it in {**sampling.extra, **minimums}.items() if key not in bound})


def _unbound(part: Generation) -> Generation:
    return replace(part, untrainable=part.untrainable or UNBOUND)


def _check_versions(part: Generation) -> None:
    if not part.versions or part.versions[-1].end != len(part.token_ids):
        raise ValueError("the completion to resume has no weight version for some of its tokens")


class _Tries:
    """The budget of one completion for tries that sample nothing."""

    def __init__(self, settings: SessionSettings, stats: RouterStats) -> None:
        self.avoid: set[PoolMember] = set()
        self._remaining = settings.max_tries
        self._pause_s = settings.backoff_s
        self._stats = stats

    async def spend(self, member: PoolMember, error: EngineFailure) -> None:
        """Returns when the next try may start; raises the error if the budget is used up."""
        self._remaining -= 2 if isinstance(error, EngineBroken | EngineTimeout) else 1
        if self._remaining <= 0:
            raise error
        self.avoid.add(member)
        self._stats.retries += 1
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.5))
        self._pause_s *= 2
