"""How loaded an engine says it is: a few numbers out of its `/metrics`, in one cheap question.

vLLM and SGLang tell the same things by different names. Several label sets are several ranks behind one URL: the
fullest cache counts, since a session lands on one rank and that one preempts; requests and preemptions add up.

Invariants. `read_load` never raises and is bounded in bytes and time: whatever an engine answers, it is a `EngineLoad` or
None. There is no `EngineLoad` without a KV use; what else is missing counts as 0. A cache that only *could* be reused
(prefixes of sessions that sit in a tool) is counted as free by both engines.
"""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollyard.core.failure import EngineFailure

if TYPE_CHECKING:
    from rollyard.engines.clients.transport import EngineTransport

LOAD_S = 5.0
"""As long as a health check may take: an engine that prefills a long batch answers late."""

MAX_METRICS_BYTES = 8 << 20
"""A rank of vLLM 0.32 tells about 60 kB, mostly histograms; this is room for a hundred."""

MOST_COUNT = 1e15  # beyond it a float is no count any more

_KV_USE = frozenset({"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"})
_RUNNING = frozenset({"vllm:num_requests_running", "sglang:num_running_reqs"})
_WAITING = frozenset({"vllm:num_requests_waiting", "sglang:num_queue_reqs"})
_PREEMPTIONS = frozenset({"vllm:num_preemptions_total", "sglang:num_retracted_requests_total"})
"""Counters only. SGLang's older gauge of retracted requests is the last batch's, and says nothing between two looks."""

_SAMPLE = re.compile(
    rb"^((?:vllm|sglang):(?:kv_cache_usage_perc|gpu_cache_usage_perc|token_usage|num_requests_running|"
    rb"num_running_reqs|num_requests_waiting|num_queue_reqs|num_preemptions_total|num_retracted_requests_total))"
    rb"(?:\{[^\n]*\})?[ \t]+([^\s]+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One look at an engine."""

    kv_use: float  # of its fullest rank, 0 to 1
    running: int = 0  # requests that it samples for
    waiting: int = 0  # requests in its own queue
    preemptions: int = 0  # since it started


def parse_load(body: bytes) -> EngineLoad | None:
    """What a scrape says; None where it does not tell its KV use, or tells nonsense."""
    kv_use: float | None = None
    counts = {"running": 0.0, "waiting": 0.0, "preemptions": 0.0}
    for sample in _SAMPLE.finditer(body):
        name = sample[1].decode()
        try:
            value = float(sample[2])
        except ValueError:
            return None
        if not math.isfinite(value) or not 0 <= value <= MOST_COUNT:
            return None
        if name in _KV_USE:
            kv_use = max(kv_use or 0.0, min(1.0, value))
        elif name in _RUNNING:
            counts["running"] += value
        elif name in _WAITING:
            counts["waiting"] += value
        elif name in _PREEMPTIONS:
            counts["preemptions"] += value
    if kv_use is None:
        return None
    return EngineLoad(kv_use, **{name: int(count) for name, count in counts.items()})


_STARTED = re.compile(rb"^process_start_time_seconds(?:\{[^\n]*\})?[ \t]+([0-9.eE+]{1,32})[ \t\r]*$", re.MULTILINE)


def parse_started(body: bytes) -> str | None:
    """When the engine's process started, as it says; None where it does not, or where several processes answer."""
    found = {one.decode() for one in _STARTED.findall(body)}
    return found.pop() if len(found) == 1 else None


async def read_load(wire: EngineTransport) -> EngineLoad | None:
    """Asks once. None: it did not answer, or does not tell."""
    return parse_load(await _metrics(wire))


async def read_started(wire: EngineTransport) -> str | None:
    return parse_started(await _metrics(wire))


async def _metrics(wire: EngineTransport) -> bytes:
    """Empty if it did not answer."""
    try:
        async with asyncio.timeout(LOAD_S):
            return await wire.get("/metrics", MAX_METRICS_BYTES)
    except (EngineFailure, TimeoutError):
        return b""
