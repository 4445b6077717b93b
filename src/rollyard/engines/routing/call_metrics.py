"""Spans, metrics and log of a rollout's model calls, for the native agent and the gateway."""

from __future__ import annotations

import time
from typing import Self

from rollyard.core import Limits
from rollyard.core.failure import EngineFailure
from rollyard.engines.base import Session
from rollyard.observe.call_log import Call, CallLog
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import Span, chat_span, set_usage


def max_context_of(limits: Limits, session: Session) -> int | None:
    """The maximum number of prompt and reply tokens: the smaller of the task's and the engine's, None without both."""
    bounds = [bound for bound in (limits.max_context, session.engine.info.max_context) if bound is not None]
    return min(bounds, default=None)


class CallMetrics:
    """Records the model calls of one session."""

    def __init__(self, session: Session, span: Span, metrics: Metrics | None, call_log: CallLog | None = None) -> None:
        self._session = session
        self._span = span
        self._metrics = metrics
        self._call_log = call_log or CallLog()

    def call(self, turn: int, prompt_tokens: int, *, logged_turn: int | None = None) -> ObservedCall:
        """Use the result as a context manager. `logged_turn` is the turn in the log, if it differs."""
        engine = self._session.engine
        span = chat_span(
            self._span, model=engine.info.model, engine=engine.spec.id, conversation=self._session.id, turn=turn
        )
        logged = self._call_log.begin("model", turn if logged_turn is None else logged_turn, engine.spec.id)
        return ObservedCall(self._session, span, self._metrics, prompt_tokens, self._call_log, logged)


class ObservedCall:
    """Records one model call."""

    def __init__(
        self,
        session: Session,
        span: Span,
        metrics: Metrics | None,
        prompt_tokens: int,
        call_log: CallLog,
        logged: Call,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.logged = logged
        self._call_log = call_log
        self._session = session
        self._span = span
        self._metrics = metrics
        self._started_at = time.monotonic()

    def salvaged(self, tokens: int) -> None:
        """Called with the tokens that an interrupted call had sampled."""
        self.logged.tokens = tokens

    def sampled(self, tokens: int, cached_tokens: int | None, finish: str) -> None:
        self.logged.tokens = tokens
        set_usage(
            self._span,
            input_tokens=self.prompt_tokens,
            output_tokens=tokens,
            cached_tokens=cached_tokens,
            finish=finish,
        )
        if self._metrics is not None:
            self._metrics.engine_call(
                self._session.engine.spec.id,
                time.monotonic() - self._started_at,
                prompt_tokens=self.prompt_tokens,
                sampled_tokens=tokens,
                cached_tokens=cached_tokens,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._span.__exit__(kind, error, trace)
        self.logged.name = self._session.engine.spec.id  # the session may have moved
        self._call_log.end(self.logged, is_error=error is not None)
        if self._metrics is not None and isinstance(error, EngineFailure):
            self._metrics.engine_failed(self._session.engine.spec.id, error.code)
