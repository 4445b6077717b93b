"""The load that an engine reports: a few numbers from its `/metrics`, read with one cheap request.

vLLM and SGLang report the same numbers under different names. Several label sets are several ranks behind one URL: the
fullest cache counts, since a session lands on one rank and that rank preempts; requests, preemptions and sampled tokens
are summed.

Invariants. `read_load` never raises and is bounded in bytes and time: it returns an `EngineLoad` or None whatever the
engine answers. An `EngineLoad` always has a KV use; other missing numbers count as 0. Both engines count cache blocks
that are only kept for reuse (prefixes of sessions that are in a tool call) as free.
"""

from __future__ import annotations

import asyncio
import math
import re

from rollyard.core.failure import EngineFailure
from rollyard.engines.base import EngineLoad
from rollyard.engines.clients.transport import EngineTransport

LOAD_S = 5.0
"""The same as a health check: an engine that prefills a long batch answers late."""

MAX_METRICS_BYTES = 8 << 20
"""A rank of vLLM 0.32 reports about 60 kB, mostly histograms; this allows for a hundred ranks."""

MOST_COUNT = 1e15  # a float beyond this is not an exact count

_KV_USE = frozenset({"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"})
_RUNNING = frozenset({"vllm:num_requests_running", "sglang:num_running_reqs"})
_WAITING = frozenset({"vllm:num_requests_waiting", "sglang:num_queue_reqs"})
_PREEMPTIONS = frozenset({"vllm:num_preemptions_total", "sglang:num_retracted_requests_total"})
"""Counters only. SGLang's older gauge of retracted requests covers only the last batch, so it misses the others."""

_SAMPLED = frozenset({"vllm:generation_tokens_total", "sglang:generation_tokens_total"})

_SAMPLE = re.compile(
    rb"^((?:vllm|sglang):(?:kv_cache_usage_perc|gpu_cache_usage_perc|token_usage|num_requests_running|"
    rb"num_running_reqs|num_requests_waiting|num_queue_reqs|num_preemptions_total|num_retracted_requests_total|"
    rb"generation_tokens_total))"
    rb"(?:\{[^\n]*\})?[ \t]+([^\s]+)",
    re.MULTILINE,
)


def parse_load(body: bytes) -> EngineLoad | None:
    """The load in a scrape; None if it has no KV use or an invalid number."""
    kv_use: float | None = None
    sampled_tokens: int | None = None
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
        elif name in _SAMPLED:
            sampled_tokens = (sampled_tokens or 0) + int(value)
    if kv_use is None:
        return None
    return EngineLoad(kv_use, **{name: int(count) for name, count in counts.items()}, sampled_tokens=sampled_tokens)


_STARTED = re.compile(rb"^process_start_time_seconds(?:\{[^\n]*\})?[ \t]+([0-9.eE+]{1,32})[ \t\r]*$", re.MULTILINE)


def parse_started(body: bytes) -> str | None:
    """The start time of the engine's process; None if the scrape has none, or those of several processes."""
    start_times = {one.decode() for one in _STARTED.findall(body)}
    return start_times.pop() if len(start_times) == 1 else None


async def read_load(wire: EngineTransport) -> EngineLoad | None:
    """One request; None if the engine did not answer or reports no load."""
    return parse_load(await _metrics(wire))


async def read_started(wire: EngineTransport) -> str | None:
    return parse_started(await _metrics(wire))


async def _metrics(wire: EngineTransport) -> bytes:
    """The body of `/metrics`; empty if the engine did not answer."""
    try:
        async with asyncio.timeout(LOAD_S):
            return await wire.get("/metrics", MAX_METRICS_BYTES)
    except (EngineFailure, TimeoutError):
        return b""
