"""`rollyard bench pipeline`: turns per second of the service, and the cost of a turn.

There are two loads, both with a real bubblewrap sandbox per rollout and an `echo` in its shell in every turn:
- latency-bound: a thousand rollouts in flight, and a slow engine. The ideal rate is rollouts in flight / latency; the
  difference is the overhead of the service. Memory is the service's memory per rollout in flight.
- service-bound: an engine that answers immediately. The limit is CPU; the result is the best of a few numbers of slots.

The engine, the service and this client are separate processes; all of them share the machine.
"""

from __future__ import annotations

import asyncio
import json
import time

from bench.pipeline_peers import TURNS, run_peers
from rollyard.cli._console import CommandError, note
from rollyard.cli._deadline import REMEDY
from rollyard.cli.rig import Rig, machine_busy_s, rig
from rollyard.core import Json

SERVICE_TURNS = 20
"""Turns of a rollout in the service-bound load. It measures turns, so rollouts are as long as real ones. The additional
cost of short ones (mainly their own sandbox) is measured with TURNS, and reported separately."""

FILL_S = 120.0
"""Limit for a thousand rollouts to reach RUN."""


def _call(name: str, **arguments: Json) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def script(turns: int = TURNS) -> dict[str, Json]:
    """Returns a script with an `echo` in every turn, and `finish` in the last."""
    replies = [_call("shell", command=f"echo turn {turn}") for turn in range(1, turns + 1)]
    replies[-1] += "\n" + _call("finish", answer="4")
    return {"rules": [], "default": replies}


def task(number: int) -> dict[str, Json]:
    """Returns a task with a unique prompt: equal tasks share the tokens of the first prompt, which would favour us."""
    return {
        "environment": "math",
        "data": {"question": f"Question {number}: what is 2 + 2?", "answer": "4"},
        "agent": {"options": {"tools": ["shell", "finish"]}},
        "limits": {"run_s": 600.0},
    }


async def bench_pipeline(*, quick: bool = False, peers: bool = True) -> dict[str, Json]:
    metrics = await _latency_bound(in_flight=200 if quick else 1000, latency_s=1.0 if quick else 5.0, quick=quick)
    window_s = 5.0 if quick else 15.0
    slots = (64,) if quick else (32, 64, 128)
    metrics |= await _service_bound(slots, turns=SERVICE_TURNS, window_s=window_s)
    short = await _service_bound((64,), turns=TURNS, window_s=window_s)
    metrics |= {f"{name}_at_{TURNS}_turns": short[name] for name in ("peak_turns_per_s", "cpu_ms_per_turn")}
    versus: dict[str, Json] = {}
    if peers:
        versus = await run_peers(quick=quick, turns=SERVICE_TURNS)
    return {"metrics": metrics, "versus": versus}


async def _latency_bound(*, in_flight: int, latency_s: float, quick: bool) -> dict[str, Json]:
    window_s = latency_s * TURNS * (1 if quick else 2)
    # All of them start together, so they end together: READY must hold enough rollouts to replace them.
    settings: dict[str, Json] = {
        "run_slots": in_flight,
        "init_slots": 32,
        "ready_slots": in_flight // 2,
        "eval_slots": 64,
    }
    async with rig(script(), latency_s=latency_s, settings=settings) as bench:
        idle_mb = bench.service.rss_mb()
        async with _load(bench, in_flight * (4 if quick else 5)):
            reached = await fill(bench, in_flight)
            calls, started_at, cpu = await _calls(bench), time.monotonic(), bench.service.cpu_s()
            await asyncio.sleep(window_s / 2)
            full_mb, middle = bench.service.rss_mb(), await _in_flight(bench)
            await asyncio.sleep(window_s / 2)
            turns, took_s = await _calls(bench) - calls, time.monotonic() - started_at
            cpu_s = bench.service.cpu_s() - cpu
    if reached < in_flight:  # more may have reached RUN since then
        reached = max(1, middle)
    return {
        "rollouts_wanted": in_flight,
        "rollouts_in_flight": reached,
        "engine_latency_s": latency_s,
        "ideal_turns_per_s": round(reached / latency_s, 1),
        "turns_per_s": round(turns / took_s, 1),
        "rss_mb_idle": round(idle_mb, 1),
        "rss_mb_per_rollout": round((full_mb - idle_mb) / reached, 4),
        "latency_bound_cpu_ms_per_turn": round(1000 * cpu_s / max(1, turns), 3),
    }


async def _service_bound(slots: tuple[int, ...], *, turns: int, window_s: float) -> dict[str, Json]:
    best: dict[str, Json] = {"peak_turns_per_s": 0.0}
    for size in slots:
        settings: dict[str, Json] = {"run_slots": size, "init_slots": 8, "ready_slots": 16, "eval_slots": 16}
        async with rig(script(turns), settings=settings) as bench, _load(bench, int((window_s + 4) * 1000 / turns)):
            await asyncio.sleep(2.0)
            calls, started_at = await _calls(bench), time.monotonic()
            before = bench.service.cpu_s(), bench.engine.cpu_s(), machine_busy_s()
            await asyncio.sleep(window_s)
            completed, took_s = await _calls(bench) - calls, time.monotonic() - started_at
            after = bench.service.cpu_s(), bench.engine.cpu_s(), machine_busy_s()
        rate = completed / took_s
        service, engine, machine = (1000 * (b - a) / max(1, completed) for a, b in zip(before, after, strict=True))
        if rate > float(best["peak_turns_per_s"]):  # type: ignore[arg-type]
            best = {
                "peak_turns_per_s": round(rate, 1),
                "peak_run_slots": size,
                "turns_per_rollout": turns,
                "cpu_ms_per_turn": round(service, 3),
                "engine_cpu_ms_per_turn": round(engine, 3),
                "machine_cpu_ms_per_turn": round(machine, 3),
            }
    return best


class _load:
    """Submits enough rollouts for the whole measurement, and cancels the rest at the end."""

    def __init__(self, bench: Rig, count: int) -> None:
        self._bench = bench
        self._count = count

    async def __aenter__(self) -> None:
        client = self._bench.client
        await client.create_run(id="bench")
        for start in range(0, self._count, 500):
            await client.submit([task(number) for number in range(start, min(start + 500, self._count))], run="bench")

    async def __aexit__(self, *_: object) -> None:
        await self._bench.client.resize_pools(init=0)
        await self._bench.client.delete_run("bench")


async def fill(bench: Rig, target: int) -> int:
    """Waits until `target` rollouts are in RUN, at most FILL_S. Returns how many are."""
    deadline = time.monotonic() + FILL_S
    while (reached := await _in_flight(bench)) < target:
        if time.monotonic() > deadline:
            if not reached:
                raise CommandError(
                    f"filling RUN: waited {FILL_S:g} s for {target} rollouts, but none is in flight", REMEDY
                )
            note(f"{reached} of {target} rollouts are in flight after {FILL_S:g} s; the figures are for {reached}")
            break
        await asyncio.sleep(0.2)
    return min(reached, target)


async def _in_flight(bench: Rig) -> int:
    return (await bench.client.status())["pools"]["run"]["active"]


async def _calls(bench: Rig) -> int:
    return sum(engine["calls"] for engine in await bench.client.engines())
