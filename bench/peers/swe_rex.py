"""SWE-ReX's own local runtime: one bash session, `echo` again and again. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time

from swerex.deployment.local import LocalDeployment
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest


async def main(count: int) -> None:
    deployment = LocalDeployment()
    await deployment.start()
    runtime = deployment.runtime
    await runtime.create_session(CreateBashSessionRequest())
    times: list[float] = []
    for number in range(count + 3):
        started_at = time.perf_counter()
        answer = await runtime.run_in_session(BashAction(command=f"echo hello {number}"))
        if number >= 3:
            times.append((time.perf_counter() - started_at) * 1000)
        assert answer.output.strip() == f"hello {number}", answer
    await deployment.stop()
    times.sort()
    result = {"echo_p50_ms": statistics.median(times), "echo_p99_ms": times[int(len(times) * 0.99)]}
    print(json.dumps(result | {"calls": count}), flush=True)


asyncio.run(main(int(sys.argv[1])))
