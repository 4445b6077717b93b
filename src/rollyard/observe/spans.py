"""Spans from queue to reward: a small interface that does nothing (at no cost) unless a collector is configured.

    rollout                        from submit to its end
    ├── init
    ├── run                        gen_ai.operation.name = invoke_agent
    │   ├── chat MODEL             gen_ai.operation.name = chat
    │   └── execute_tool NAME      gen_ai.operation.name = execute_tool
    └── eval

Attribute names follow OpenTelemetry's GenAI conventions where they exist, and are `rollyard.*` otherwise. A parent is
passed explicitly, since a rollout's stages run in different tasks. opentelemetry is imported only by `open_tracer`.

Invariants. A span never contains a prompt, a completion or a tool's arguments. A failure of tracing never fails a
rollout: export happens in a thread of the SDK, whose queue is bounded and drops spans when full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Self

from rollyard.core import Ending, Failure, Rollout

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer as OtelTracer

Value = str | int | float | bool | Sequence[str]


class Span(Protocol):
    """An operation that takes time. As a context manager, it ends with the block and fails with its exception."""

    def set(self, attributes: Mapping[str, Value]) -> None: ...

    def fail(self, code: str, detail: str = "") -> None:
        """Marks the span as failed; it must still be ended."""
        ...

    def child(self, name: str, attributes: Mapping[str, Value] | None = None) -> Span: ...

    def end(self) -> None:
        """Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None: ...


class Tracer(Protocol):
    def root(self, name: str, attributes: Mapping[str, Value], started_at: float | None = None) -> Span:
        """Starts a span without a parent. `started_at` is a time as of `time.time()`; None is now."""
        ...

    async def close(self) -> None:
        """Sends the remaining spans, within the exporter's own timeout."""
        ...


# --- the spans of a rollout ---------------------------------------------------------------------------


def rollout_span(tracer: Tracer, rollout: Rollout) -> Span:
    """Starts the root span of a rollout, as of its submission."""
    attributes: dict[str, Value] = {
        "rollyard.rollout.id": rollout.id,
        "rollyard.run": rollout.run,
        "rollyard.environment": rollout.task.environment,
        "rollyard.attempt": rollout.attempt,
        "gen_ai.conversation.id": rollout.id,
    }
    if rollout.group is not None:
        attributes["rollyard.group"] = rollout.group
    return tracer.root("rollout", attributes, rollout.created_at or None)


def stage_span(parent: Span, stage: str, *, agent: str = "") -> Span:
    """Starts the span of a stage: init, run or eval."""
    if stage != "run":
        return parent.child(stage)
    return parent.child("run", {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": agent})


def chat_span(parent: Span, *, model: str, engine: str, conversation: str, turn: int) -> Span:
    """Starts the span of one model call. `set_usage` adds its usage."""
    return parent.child(
        f"chat {model}",
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": model,
            "gen_ai.conversation.id": conversation,
            "rollyard.engine": engine,
            "rollyard.turn": turn,
        },
    )


def set_usage(span: Span, *, input_tokens: int, output_tokens: int, cached_tokens: int | None, finish: str) -> None:
    span.set(
        {
            "gen_ai.usage.input_tokens": input_tokens,
            "gen_ai.usage.output_tokens": output_tokens,
            "gen_ai.response.finish_reasons": (finish,),
            **({} if cached_tokens is None else {"gen_ai.usage.cache_read.input_tokens": cached_tokens}),
        }
    )


def tool_span(parent: Span, *, name: str, call_id: str) -> Span:
    return parent.child(
        f"execute_tool {name}",
        {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, "gen_ai.tool.call.id": call_id},
    )


def end_rollout_span(span: Span, ending: Ending) -> None:
    """Records the ending and ends the span. Only infra and task failures are errors: a truncated rollout is data."""
    attributes: dict[str, Value] = {
        "rollyard.outcome": ending.outcome.value,
        "rollyard.turns": ending.summary.turns,
        "rollyard.sampled_tokens": ending.summary.sampled_tokens,
        "rollyard.trainable": ending.is_trainable,
    }
    if ending.score is not None:
        attributes["rollyard.reward"] = ending.score.reward
    failure: Failure | None = ending.failure
    if failure is not None:
        attributes |= {"rollyard.failure.code": failure.code, "rollyard.failure.blame": failure.blame.value}
        if failure.blame in ("infra", "task"):
            span.fail(failure.code)
    span.set(attributes)
    span.end()


# --- off ----------------------------------------------------------------------------------------------


class NoSpan:
    """Does nothing and is its own child."""

    def set(self, attributes: Mapping[str, Value]) -> None: ...

    def fail(self, code: str, detail: str = "") -> None: ...

    def child(self, name: str, attributes: Mapping[str, Value] | None = None) -> Span:
        return self

    def end(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None: ...


class NoTracer:
    """The default: tracing is off."""

    def root(self, name: str, attributes: Mapping[str, Value], started_at: float | None = None) -> Span:
        return NO_SPAN

    async def close(self) -> None: ...


NO_SPAN: Span = NoSpan()


# --- on -----------------------------------------------------------------------------------------------


class TracingUnavailable(Exception):
    """Tracing is configured but not installed; the message names the package to install."""


def open_tracer(endpoint: str, *, headers: Mapping[str, str] | None = None, service: str = "rollyard") -> Tracer:
    """Returns a tracer that sends OTLP over HTTP to `endpoint` (a collector's base URL, or the whole …/v1/traces)."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise TracingUnavailable("tracing needs OpenTelemetry: pip install 'rollyard[otel]'") from error
    url = endpoint if endpoint.endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"
    return tracer_of(OTLPSpanExporter(endpoint=url, headers=dict(headers or {}), timeout=10), service=service)


def tracer_of(exporter: SpanExporter, *, service: str = "rollyard") -> Tracer:
    """Returns a tracer with any exporter of the SDK. It has its own provider: nothing global is set."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource({SERVICE_NAME: service}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return _Tracer(provider)


class _Tracer:
    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("rollyard")

    def root(self, name: str, attributes: Mapping[str, Value], started_at: float | None = None) -> Span:
        from opentelemetry.context import Context

        start = None if started_at is None else int(started_at * 1e9)
        # An empty context: the caller's current span is not this rollout's parent.
        return _Span(self._tracer, self._tracer.start_span(name, Context(), attributes=attributes, start_time=start))

    async def close(self) -> None:
        await asyncio.to_thread(self._provider.shutdown)


class _Span:
    def __init__(self, tracer: OtelTracer, span: OtelSpan) -> None:
        self._tracer = tracer
        self._span = span

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def fail(self, code: str, detail: str = "") -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", code)
        self._span.set_status(StatusCode.ERROR, detail or code)

    def child(self, name: str, attributes: Mapping[str, Value] | None = None) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self._span, Context())
        return _Span(self._tracer, self._tracer.start_span(name, context, attributes=attributes))

    def end(self) -> None:
        if self._span.is_recording():  # the SDK logs a warning for a second end
            self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(getattr(error, "code", type(error).__name__))
        self.end()
