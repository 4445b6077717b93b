"""`rollyard bench ipython`: latency of cells in a sandbox's Python, compared with a Jupyter kernel.

Ours is the tool itself in a sandbox: with IPython from our own Python, which is the compared one (`cell_…`), and with
the plain Python of an image that has no IPython (`plain_cell_…`). The kernel runs directly on this machine, driven by
`jupyter_client`. Both run the same cell, which prints a line and shows a value. `start_ms` is the time from the start
to the first value: the sandbox is already running, and the kernel needs none.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from bench.peer_drivers import CACHE, measure
from rollyard.core import Json
from rollyard.sandbox import Bind, BubblewrapRuntime, Sandbox, SandboxSpec
from rollyard.sandbox.python import INSIDE, portable_python
from rollyard.tools.ipython import IMAGES_OWN, CellOutcome, Command, PythonSession

WARM_UP = 20


async def bench_ipython(*, quick: bool = False, peers: bool = True) -> dict[str, Json]:
    """Returns `metrics` and `versus`; a peer that cannot be measured is {"error": reason}."""
    cells, starts = (100, 5) if quick else (500, 15)
    python = await asyncio.to_thread(portable_python, CACHE / "python")
    portable: Command = (python.argv, python.env)
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as folder:
        async with BubblewrapRuntime(root=Path(folder)) as runtime:
            spec = SandboxSpec(binds=(Bind(python.folder, INSIDE),), owner="bench")
            sandbox = await runtime.start(spec, lease_s=600.0)
            metrics: dict[str, Json] = {
                **await _cells(sandbox, portable, cells, "cell"),
                **await _cells(sandbox, IMAGES_OWN, cells, "plain_cell"),
                "cells": cells,
                "start_ms": await _starts(sandbox, portable, starts),
                "plain_start_ms": await _starts(sandbox, IMAGES_OWN, starts),
            }
            await sandbox.kill()
    versus: dict[str, Json] = {}
    if peers:
        versus["jupyter_client"] = await asyncio.to_thread(measure, "jupyter", cells)
    return {"metrics": metrics, "versus": versus}


async def _cells(sandbox: Sandbox, python: Command, count: int, name: str) -> dict[str, Json]:
    times: list[float] = []
    async with PythonSession(sandbox, [python], output_bytes=1 << 20) as session:
        for number in range(count + WARM_UP):
            started_at = time.perf_counter()
            await _cell(session, f"x = {number}\nprint('hello')\nx + 1", f"hello\n{number + 1}\n")
            times.append((time.perf_counter() - started_at) * 1000)
    ordered = sorted(times[WARM_UP:])
    p99 = ordered[int(count * 0.99)]
    return {f"{name}_p50_ms": round(statistics.median(ordered), 4), f"{name}_p99_ms": round(p99, 4)}


async def _starts(sandbox: Sandbox, python: Command, count: int) -> float:
    times: list[float] = []
    for _ in range(count + 1):  # the first one reads from the disk
        started_at = time.perf_counter()
        async with PythonSession(sandbox, [python], output_bytes=1 << 20) as session:
            await _cell(session, "0", "0\n")
            times.append((time.perf_counter() - started_at) * 1000)
    return round(statistics.median(times[1:]), 2)


async def _cell(session: PythonSession, code: str, expected: str) -> None:
    result = await session.run(code, 60.0)
    if result.outcome is not CellOutcome.COMPLETED or result.output != expected:
        raise RuntimeError(f"a cell returned {result}")
