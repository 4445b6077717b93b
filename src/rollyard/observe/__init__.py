"""Metrics, logs and spans. Every package except core may use it."""

from rollyard.observe.logs import bound, configure
from rollyard.observe.metrics import EngineState, Metrics, PoolState, Snapshot
from rollyard.observe.spans import NO_SPAN, NoTracer, Span, Tracer, TracingUnavailable, open_tracer

__all__ = [
    "NO_SPAN",
    "EngineState",
    "Metrics",
    "NoTracer",
    "PoolState",
    "Snapshot",
    "Span",
    "Tracer",
    "TracingUnavailable",
    "bound",
    "configure",
    "open_tracer",
]
