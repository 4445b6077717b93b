"""What a rollout may still ask of its model, and why it may not: turns, tokens, context, time, engines.

A limit ends the rollout as it ends the native loop's. A conversation that does not fit into the context does not: a
program may make it shorter and go on, so it is only remembered, until another turn has been completed.
"""

from __future__ import annotations

import asyncio
import logging

from rollyard.core import Deadline, DeadlineExpired, Limits
from rollyard.core.failure import (
    ContextLimit,
    EngineFailure,
    EngineRefused,
    InternalError,
    PromptTooLong,
    RollyardError,
    RunDeadline,
    TokenLimit,
    TurnLimit,
)
from rollyard.engines.base import Generation, Session
from rollyard.engines.routing.call_metrics import max_context_of
from rollyard.gateway.base import Problem

log = logging.getLogger("rollyard.gateway")


class RolloutBounds:
    """See the module."""

    def __init__(self, limits: Limits, session: Session) -> None:
        self._limits = limits
        self._session = session
        self._over: asyncio.Future[RollyardError] = asyncio.get_running_loop().create_future()
        self.overflow: RollyardError | None = None
        self.refused = 0

    @property
    def room(self) -> int | None:
        """How many tokens prompt and reply may have; None: nobody says."""
        return max_context_of(self._limits, self._session)

    @property
    def failure(self) -> RollyardError | None:
        return self._over.result() if self._over.done() else None

    async def ended(self) -> RollyardError:
        return await asyncio.shield(self._over)

    def end(self, error: RollyardError) -> None:
        """It cannot go on; the first reason counts."""
        if not self._over.done():
            self._over.set_result(error)

    def limit(self, error: RollyardError) -> Problem:
        self.end(error)
        self.refused += 1
        return Problem("limit", error.detail, code=error.code)

    def too_long(self, used: int, room: int | None, *, is_first: bool, detail: str = "") -> Problem:
        detail = detail or f"the prompt has {used} tokens, the context {room}"
        self.overflow = PromptTooLong(detail) if is_first else ContextLimit(detail)
        self.refused += 1
        return Problem("context", detail, code=self.overflow.code, used_tokens=used, max_tokens=room)

    def problem(
        self, error: BaseException, clock: Deadline, rollout_id: str, prompt_tokens: int, *, is_first: bool
    ) -> Problem:
        """What a client is told of a completion that broke. Most of it ends the rollout, too."""
        if isinstance(error, DeadlineExpired):
            return self.limit(RunDeadline(f"RUN used up its {clock.budget_s:g} s"))
        if isinstance(error, EngineRefused) and error.data.get("context"):
            return self.too_long(prompt_tokens, None, is_first=is_first, detail=error.detail)
        if isinstance(error, EngineFailure):
            self.end(error)
            return Problem("unavailable", error.detail, code=error.code)
        if isinstance(error, asyncio.CancelledError):
            return Problem("unavailable", "this rollout has ended", code="ended")
        log.error("a completion broke", extra={"rollout": rollout_id}, exc_info=error)
        broken = error if isinstance(error, RollyardError) else InternalError(f"{type(error).__name__}: {error}")
        self.end(broken)
        return Problem("internal", broken.detail, code=broken.code)

    def turn(self, begun: int) -> None:
        """Another one may begin, beside those; or the limit."""
        if begun >= self._limits.max_turns:
            raise self.limit(TurnLimit(f"all {self._limits.max_turns} turns are used up"))

    def fitting(self, prompt_tokens: int, wanted: int, *, is_first: bool) -> int:
        """How many of the wanted tokens fit into the context behind the prompt."""
        room = self.room
        if room is None:
            return wanted
        if prompt_tokens + 1 > room:
            raise self.too_long(prompt_tokens, room, is_first=is_first)
        return min(wanted, room - prompt_tokens)

    def tokens_left(self, sampled: int) -> int | None:
        """Of those that the rollout may sample in all; None: as many as it likes."""
        if self._limits.max_tokens is None:
            return None
        left = self._limits.max_tokens - sampled
        if left <= 0:
            raise self.limit(TokenLimit(f"all {self._limits.max_tokens} tokens are used up"))
        return left

    def completed(self, prompt_tokens: int, generation: Generation) -> None:
        """A turn was: whatever did not fit before is forgiven, unless it is just this one."""
        room = self.room
        is_cut = generation.finish_reason == "length" and room is not None
        self.overflow = None
        if is_cut and prompt_tokens + len(generation.token_ids) >= (room or 0):
            self.overflow = ContextLimit(f"the reply was cut off where the context of {room} tokens ends")
