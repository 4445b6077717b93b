"""The bounds on a rollout's use of its model: turns, tokens, context, time, engines.

A limit ends the rollout as it ends the native loop's. A conversation that does not fit into the context does not end
it: a program may shorten the conversation and continue, so the overflow is only remembered until another turn is
completed.
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
    """Checks the bounds of one rollout, and holds the reason why it cannot continue."""

    def __init__(self, limits: Limits, session: Session) -> None:
        self._limits = limits
        self._session = session
        self._over: asyncio.Future[RollyardError] = asyncio.get_running_loop().create_future()
        self.overflow: RollyardError | None = None
        self.refused = 0

    @property
    def room(self) -> int | None:
        """How many tokens prompt and reply may have together; None if it is unknown."""
        return max_context_of(self._limits, self._session)

    @property
    def failure(self) -> RollyardError | None:
        return self._over.result() if self._over.done() else None

    async def ended(self) -> RollyardError:
        return await asyncio.shield(self._over)

    def end(self, error: RollyardError) -> None:
        """Ends the rollout. The first reason is kept."""
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
        """Converts an error in a completion to a Problem. Most errors also end the rollout."""
        if isinstance(error, DeadlineExpired):
            return self.limit(RunDeadline(f"RUN used up its {clock.budget_s:g} s"))
        if isinstance(error, EngineRefused) and error.data.get("context"):
            return self.too_long(prompt_tokens, None, is_first=is_first, detail=error.detail)
        if isinstance(error, EngineFailure):
            self.end(error)
            return Problem("unavailable", error.detail, code=error.code)
        if isinstance(error, asyncio.CancelledError):
            return Problem("unavailable", "this rollout has ended", code="ended")
        log.error("a completion failed", extra={"rollout": rollout_id}, exc_info=error)
        broken = error if isinstance(error, RollyardError) else InternalError(f"{type(error).__name__}: {error}")
        self.end(broken)
        return Problem("internal", broken.detail, code=broken.code)

    def turn(self, started: int) -> None:
        """Raises Problem if no other turn may begin after `started` turns."""
        if started >= self._limits.max_turns:
            raise self.limit(TurnLimit(f"all {self._limits.max_turns} turns are used up"))

    def fitting(self, prompt_tokens: int, requested: int, *, is_first: bool) -> int:
        """Returns how many of the requested tokens fit into the context after the prompt. Raises Problem if none do."""
        room = self.room
        if room is None:
            return requested
        if prompt_tokens + 1 > room:
            raise self.too_long(prompt_tokens, room, is_first=is_first)
        return min(requested, room - prompt_tokens)

    def tokens_left(self, sampled: int) -> int | None:
        """Returns how many tokens the rollout may still sample; None if there is no limit. Raises Problem at the
        limit."""
        if self._limits.max_tokens is None:
            return None
        remaining = self._limits.max_tokens - sampled
        if remaining <= 0:
            raise self.limit(TokenLimit(f"all {self._limits.max_tokens} tokens are used up"))
        return remaining

    def completed(self, prompt_tokens: int, generation: Generation) -> None:
        """Called when a turn is completed. Clears an earlier overflow, and sets one if this turn was cut off by the
        context."""
        room = self.room
        is_cut = generation.finish_reason == "length" and room is not None
        self.overflow = None
        if is_cut and prompt_tokens + len(generation.token_ids) >= (room or 0):
            self.overflow = ContextLimit(f"the reply was cut off where the context of {room} tokens ends")
