"""`rollyard bench pipeline`: how many turns a second the service carries, and what a turn costs it.

Two loads, both with a real bubblewrap sandbox per rollout and an `echo` in its shell in every turn:
- latency-bound: a thousand rollouts in flight, an engine that takes its time. Ideal is in flight / latency; what is
  missing from it is what the service adds. Memory is what a rollout in flight costs the service.
- service-bound: an engine that answers at once. What limits is CPU; the best of a few numbers of slots counts.

The engine, the service and this client are processes of their own; all of them share the machine.
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
"""Of a rollout in the service-bound load. It is to measure turns, so a rollout is as long as real ones are; what a
short one costs besides (a sandbox of its own, most of all) is measured with TURNS as well, and reported apart."""

FILL_S = 120.0
"""For a thousand rollouts to reach RUN."""


def _call(name: str, **arguments: Json) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def script(turns: int = TURNS) -> dict[str, Json]:
    """An `echo` in every turn; the last one ends as well."""
    replies = [_call("shell", command=f"echo turn {turn}") for turn in range(1, turns + 1)]
    replies[-1] += "\n" + _call("finish", answer="4")
    return {"rules": [], "default": replies}


def task(number: int) -> dict[str, Json]:
    """Each has a prompt of its own: rollouts of one task share their first prompt's tokens, which would flatter us."""
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
    # All of them start together, so they end together: READY holds enough of the next ones to take their places.
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
            calls, begun, cpu = await _calls(bench), time.monotonic(), bench.service.cpu_s()
            await asyncio.sleep(window_s / 2)
            full_mb, middle = bench.service.rss_mb(), await _in_flight(bench)
            await asyncio.sleep(window_s / 2)
            turns, took_s = await _calls(bench) - calls, time.monotonic() - begun
            cpu_s = bench.service.cpu_s() - cpu
    if reached < in_flight:  # RUN may have filled further
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
            calls, begun = await _calls(bench), time.monotonic()
            before = bench.service.cpu_s(), bench.engine.cpu_s(), machine_busy_s()
            await asyncio.sleep(window_s)
            done, took_s = await _calls(bench) - calls, time.monotonic() - begun
            after = bench.service.cpu_s(), bench.engine.cpu_s(), machine_busy_s()
        rate = done / took_s
        service, engine, machine = (1000 * (b - a) / max(1, done) for a, b in zip(before, after, strict=True))
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
    """Rollouts enough for the whole measurement; what is left of them is cancelled."""

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


async def fill(bench: Rig, wanted: int) -> int:
    """How many rollouts are in RUN: those that were wanted, or what a slow machine reaches in FILL_S."""
    deadline = time.monotonic() + FILL_S
    while (reached := await _in_flight(bench)) < wanted:
        if time.monotonic() > deadline:
            if not reached:
                raise CommandError(
                    f"filling RUN: waited {FILL_S:g} s for {wanted} rollouts, and none is in flight", REMEDY
                )
            note(f"{reached} of {wanted} rollouts are in flight after {FILL_S:g} s; the figures are for {reached}")
            break
        await asyncio.sleep(0.2)
    return min(reached, wanted)


async def _in_flight(bench: Rig) -> int:
    return (await bench.client.status())["pools"]["run"]["active"]


async def _calls(bench: Rig) -> int:
    return sum(engine["calls"] for engine in await bench.client.engines())
