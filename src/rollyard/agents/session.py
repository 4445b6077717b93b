"""The agent `session`: a client elsewhere does the work and calls the model through the service's gateway.

RUN only waits: it makes the rollout's gateway reachable under its id, and ends when the client posts a reward, cancels,
or has used up `limits.run_s`, which counts from the beginning of RUN to its end (a client that died must not hold a
slot forever, and the service cannot measure the client's own tools).

A limit of turns, tokens or context ends the model calls, not the session: the client gets the error and has the rest of
`run_s` to post a reward. The rollout is then truncated, with that reward.

Invariants. A reward is never invented: a session that ends without one in time is SessionAbandoned. The sampled tokens
exist only in this process until RUN ends, and the service cannot repeat the work: a session that had started and was
lost, with its engine or with the service, ends as SessionLost and is not retried. A session that had not started starts
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rollyard.agents.base import Agent, AgentContext
from rollyard.core import CODES, DeadlineExpired, Json, LostAttempt, Message, State, Task
from rollyard.core.failure import (
    EngineFailure,
    PolicyFailure,
    RollyardError,
    SessionAbandoned,
    SessionConflict,
    SessionLost,
    TaskInvalid,
)
from rollyard.gateway.options import NAMES, options_of
from rollyard.gateway.session import GatewaySession

log = logging.getLogger("rollyard.agents")

NAME = "session"
POSTED = "score"  # the key in `Trajectory.info` under which the environment `session` finds what the client posted
BEATS = 3  # within limits.stall_s: a client that is busy is not a stall


class LiveSession:
    """An open session: its gateway, and the future of its reward."""

    def __init__(self, gateway: GatewaySession, nonce: int) -> None:
        """`nonce` distinguishes it from other sessions with the same id."""
        self.gateway = gateway
        self.nonce = nonce
        self.posted: asyncio.Future[Mapping[str, Json]] = asyncio.get_running_loop().create_future()

    def give(self, posted: Mapping[str, Json]) -> None:
        """Ends the session with `reward` and the other fields. Posting the same again has no effect; another reward
        raises SessionConflict."""
        if not self.posted.done():
            self.posted.set_result(posted)
        elif self.posted.result() != posted:
            raise SessionConflict("this session already has another reward")


class SessionAgent(Agent):
    """The agent of all sessions. It holds the open ones."""

    name: ClassVar[str] = NAME
    default_tools: ClassVar[tuple[str, ...]] = ()
    needs_gateway: ClassVar[bool] = True
    is_head_only: ClassVar[bool] = True  # its client calls the service's port

    def __init__(self) -> None:
        self._live: dict[str, LiveSession] = {}
        self._waiting: dict[str, list[asyncio.Future[LiveSession]]] = {}

    # --- sessions by id -------------------------------------------------------------------------------

    def live(self, session_id: str) -> LiveSession | None:
        return self._live.get(session_id)

    async def opened(self, session_id: str) -> LiveSession:
        """Waits until the session is open and returns it. It may never open, so the caller has to set a timeout."""
        if (live := self._live.get(session_id)) is not None:
            return live
        future: asyncio.Future[LiveSession] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(session_id, [])
        waiting.append(future)
        try:
            return await future
        finally:
            waiting.remove(future)
            if not waiting and self._waiting.get(session_id) is waiting:
                del self._waiting[session_id]

    # --- the agent ------------------------------------------------------------------------------------

    def check(self, task: Task) -> None:
        if task.environment != NAME:
            raise TaskInvalid(f"agent.name: {NAME!r} requires the environment {NAME!r} (POST /v1/sessions)")
        unknown = sorted(set(task.agent.options) - set(NAMES))
        if unknown:
            raise TaskInvalid(f"agent.options.{unknown[0]}: unknown; there are {', '.join(NAMES)}")
        options_of(task)

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        if (lost := _used_attempt(context.lost)) is not None:
            raise SessionLost(f"the session was lost in attempt {lost.attempt}: {lost.detail}", cause=lost.code)
        session = LiveSession(context.gateway, context.seq)
        self._open(context.rollout_id, session)
        limit: RollyardError | None = None
        try:
            async with context.clock.counting():
                limit = await self._wait(context, session)
        except DeadlineExpired as error:
            if not session.posted.done():  # else it was accepted at the last moment
                raise SessionAbandoned(f"there was no reward within the {context.clock.budget_s:g} s of RUN") from error
        finally:
            del self._live[context.rollout_id]
        self._take(context, session.posted.result())
        limit = limit or _policy_failure(context.gateway.failure) or _policy_failure(context.gateway.overflow)
        if limit is not None:
            raise limit
        return "reward"

    def _open(self, session_id: str, session: LiveSession) -> None:
        self._live[session_id] = session
        for future in self._waiting.get(session_id, ()):
            if not future.done():
                future.set_result(session)

    async def _wait(self, context: AgentContext, session: LiveSession) -> RollyardError | None:
        """Waits for the reward. Returns the limit that had ended the model calls, if any."""
        every_s = context.task.limits.stall_s / BEATS
        ended = asyncio.ensure_future(session.gateway.ended())
        watched: set[asyncio.Future[Any]] = {session.posted, ended}
        limit: RollyardError | None = None
        try:
            while not session.posted.done():
                await asyncio.wait(watched, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
                context.beat()
                if limit is None and ended.done():
                    watched.discard(ended)
                    limit = _policy_failure(ended.result())
                    if limit is None:
                        raise _lost(ended.result())
        finally:
            ended.cancel()
        return limit

    def _take(self, context: AgentContext, posted: Mapping[str, Json]) -> None:
        """Stores what the client posted; an answer goes where every environment's evidence has it."""
        context.info[POSTED] = {name: value for name, value in posted.items() if name != "answer"}
        if posted.get("answer") is not None:
            context.info["answer"] = posted["answer"]


def _policy_failure(error: RollyardError | None) -> RollyardError | None:
    return error if isinstance(error, PolicyFailure) else None


def _lost(error: RollyardError) -> RollyardError:
    """Converts a failure that is retryable for other agents to SessionLost."""
    if not error.retryable:
        return error
    log.warning("a session was lost", extra={"code": error.code})
    return SessionLost(error.detail, cause=error.code)


def _used_attempt(lost: Sequence[LostAttempt]) -> LostAttempt | None:
    """Returns the attempt that a client may have used. Attempts that got no engine were never open."""
    for attempt in lost:
        if attempt.stage == State.RUN and not issubclass(CODES.get(attempt.code, RollyardError), EngineFailure):
            return attempt
    return None
