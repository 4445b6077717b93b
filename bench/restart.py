"""`rollyard bench restart`: the time until a killed service serves again.

It queues ten thousand rollouts, kills the service with SIGKILL, and starts it again on the same data. It measures the
time from the start of the process (including Python and its imports) until it responds, with all rollouts present.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from rollyard.cli.rig import service
from rollyard.client import AsyncClient
from rollyard.core import Json

TASK: dict[str, Json] = {"environment": "math", "data": {"question": "What is 2 + 2?", "answer": "4"}}
SETTINGS: dict[str, Json] = {"init_slots": 1, "run_slots": 1, "max_queued": 20_000}


async def bench_restart(*, quick: bool = False, peers: bool = True) -> dict[str, Json]:
    queued = 10_000
    times: list[float] = []
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as name:
        empty_s = await _start_s(Path(name), 0)
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as name:
        folder = Path(name)
        async with service(folder, SETTINGS) as served:
            async with AsyncClient(served.url, served.token) as client:
                started_at = time.monotonic()
                for _ in range(queued // 1000):
                    await client.submit([TASK] * 1000)
                submit_s = time.monotonic() - started_at
            served.process.kill()
            await served.process.wait()
        for _ in range(1 if quick else 5):
            times.append(await _start_s(folder, queued))
    metrics: dict[str, Json] = {
        "queued": queued,
        "ready_s": round(statistics.median(times), 3),
        "ready_max_s": round(max(times), 3),
        "ready_empty_s": round(empty_s, 3),
        "submit_per_s": round(queued / submit_s),
    }
    return {"metrics": metrics, "versus": {}}


async def _start_s(folder: Path, queued: int) -> float:
    started_at = time.monotonic()
    async with service(folder, SETTINGS) as served, AsyncClient(served.url, served.token) as client:
        states = (await client.status())["states"]
        if sum(states.values()) != queued:
            raise RuntimeError(f"{queued} rollouts were queued, but after the restart there are {states}")
        took_s = time.monotonic() - started_at
        served.process.kill()
        await served.process.wait()
    return took_s
