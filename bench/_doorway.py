"""Measures the latency of a doorway from inside a sandbox, with our own Python, which needs no image or package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from bench._parts import AnyRuntime
from bench.peer_drivers import CACHE
from rollyard.core import Json
from rollyard.sandbox import Bind, SandboxSpec
from rollyard.sandbox.python import INSIDE, portable_python

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CLIENT = """
import http.client, json, sys, time
port, count = int(sys.argv[1]), int(sys.argv[2])
def ask(connection):
    began = time.perf_counter()
    connection.request("GET", "/")
    assert connection.getresponse().read() == b"ok"
    return time.perf_counter() - began
def one():
    return http.client.HTTPConnection("127.0.0.1", port)
kept = one()
same = sorted([ask(kept) for _ in range(count + 10)][10:])
new = []
for _ in range(count // 2):
    connection = one()
    new.append(ask(connection))
    connection.close()
new.sort()
print(json.dumps([same[len(same) // 2], same[int(len(same) * 0.99)], new[len(new) // 2]]))
"""


async def measure_doorway(runtime: AnyRuntime, count: int) -> dict[str, Json]:
    python = await asyncio.to_thread(portable_python, CACHE / "python")
    spec = SandboxSpec(has_doorway=True, binds=(Bind(python.folder, INSIDE),), owner="bench")
    sandbox = await runtime.start(spec, lease_s=600.0)
    try:
        if sandbox.doorway is None:
            raise RuntimeError("the sandbox has no doorway")
        await sandbox.doorway.serve(answer)
        argv = [*python.argv, "-c", CLIENT, str(sandbox.doorway.port), str(count)]
        result = await sandbox.exec(argv, timeout_s=300.0, env=python.env)
    finally:
        await sandbox.kill()
    if result.status != 0:
        raise RuntimeError(f"the client inside ended with {result.status}: {result.stderr[-300:]!r}")
    p50, p99, new_p50 = (round(seconds * 1000, 3) for seconds in json.loads(result.stdout))
    return {"doorway_p50_ms": p50, "doorway_p99_ms": p99, "doorway_new_p50_ms": new_p50}


async def answer(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """A minimal ASGI app."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})
