"""`rollyard bench stages`: whether a slow EVAL slows down RUN. It must not: the pools are independent.

It runs the same load twice, latency-bound in RUN: once with a fast check, once with a check that is slow in a tenth of
the rollouts and an EVAL pool that can hold them. The result is the ratio of the two RUN throughputs. The computed ratio
of a design in which EVAL holds the worker that ran the agent is in `versus`.
"""

from __future__ import annotations

import asyncio
import json
import time

from rollyard.cli.rig import Rig, rig
from rollyard.core import Json

TURNS = 3
SLOTS = 40
LATENCY_S = 1.0


def _script() -> dict[str, Json]:
    call = {"name": "shell", "arguments": {"command": "echo hello > hello.txt"}}
    turn = "<tool_call>\n" + json.dumps(call) + "\n</tool_call>"
    finish = "<tool_call>\n" + json.dumps({"name": "finish", "arguments": {}}) + "\n</tool_call>"
    return {"rules": [], "default": [turn] * (TURNS - 1) + [finish]}


def _tasks(count: int, slow_s: float) -> list[dict[str, Json]]:
    def check(index: int) -> str:
        return f"sleep {slow_s}; test -s hello.txt" if slow_s and index % 10 == 0 else "test -s hello.txt"

    return [
        {"environment": "shell", "data": {"instruction": "Write hello.txt.", "checks": [check(index)]}}
        for index in range(count)
    ]


async def bench_stages(*, quick: bool = False, peers: bool = True) -> dict[str, Json]:
    slow_s = 5.0 if quick else 30.0
    window_s = 12.0 if quick else 60.0
    plain = await _throughput(0.0, window_s)
    slow = await _throughput(slow_s, window_s)
    run_s = TURNS * LATENCY_S
    metrics: dict[str, Json] = {
        "slow_eval_s": slow_s,
        "slow_share": 0.1,
        "run_per_s_without": round(plain, 2),
        "run_per_s_with": round(slow, 2),
        "run_throughput_ratio": round(slow / plain, 4),
    }
    return {
        "metrics": metrics,
        "versus": {
            "one pool for RUN and EVAL (computed)": {"run_throughput_ratio": round(run_s / (run_s + 0.1 * slow_s), 4)}
        },
    }


async def _throughput(slow_s: float, window_s: float) -> float:
    """Returns the rollouts per second that leave RUN, once the slow ones have filled EVAL."""
    rate = SLOTS / (TURNS * LATENCY_S)
    warm_s = 3 * TURNS * LATENCY_S + slow_s
    settings: dict[str, Json] = {
        "run_slots": SLOTS,
        "init_slots": 8,
        "ready_slots": 16,
        "eval_slots": 16 + int(rate * 0.1 * slow_s * 2),
    }
    async with rig(_script(), latency_s=LATENCY_S, settings=settings) as bench:
        await bench.client.create_run(id="bench")
        await bench.client.submit(_tasks(int(rate * (warm_s + window_s) * 1.3), slow_s), run="bench")
        await asyncio.sleep(warm_s)
        calls, started_at = await _calls(bench), time.monotonic()
        await asyncio.sleep(window_s)
        turns, took_s = await _calls(bench) - calls, time.monotonic() - started_at
        await bench.client.resize_pools(init=0)
        await bench.client.delete_run("bench")
    return turns / TURNS / took_s


async def _calls(bench: Rig) -> int:
    return sum(engine["calls"] for engine in await bench.client.engines())
