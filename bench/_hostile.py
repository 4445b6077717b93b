"""Requests that are cheap to send but can cost a server seconds, for `rollyard bench gateway`.

Two sessions send them, one after the other, while a third has ordinary conversations. The result is the longest time
that the gateway's event loop was blocked: every stream stalls for that long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from http.client import HTTPConnection

import orjson

from bench._gateway_processes import GatewayProcess
from bench._load import Line
from rollyard.cli._console import note
from rollyard.core import Json

CONTEXT = 1 << 18
MOST = 8 << 20  # the gateway accepts 8.25 MiB for that context
HOSTILE_SESSIONS = 2


def _list(item: Json, **fields: Json) -> bytes:
    """Returns a body with as many copies of an item as fit."""
    one = orjson.dumps(item) + b","
    suffix = orjson.dumps({"model": "policy", **fields})[1:]
    return b'{"messages":[' + (one * (MOST // len(one)))[:-1] + b"]," + suffix


def _user(content: Json, **fields: Json) -> bytes:
    return orjson.dumps({"model": "policy", "messages": [{"role": "user", "content": content}], **fields})


def _tool(parameters: Json, name: str = "f") -> Json:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _deep(depth: int) -> Json:
    value: Json = {}
    for _ in range(depth):
        value = {"properties": value}
    return value


def requests() -> Mapping[str, bytes]:
    properties: Json = {f"p{number}": {"type": "string"} for number in range(15_000)}
    return {
        "many messages": _list({"role": "user", "content": ""}),
        "messages at the bound": _user("").replace(b"[{", b"[" + b'{"role":"user","content":"a"},' * 4000 + b"{"),
        "many parts": _user([{"type": "text", "text": "a"}] * 300_000),
        "parts at the bound": _user([{"type": "text", "text": "a"}] * 4000),
        "deep nesting": b'{"messages":' + b"[" * MOST,
        "one huge text": _user("word " * (MOST // 5)),
        "a huge text of few tokens": _user(" " * MOST),
        "a huge text of escapes": _user("\n\t" * (MOST // 4)),
        "a text that fits": _user("a few words, {more}, " * 4000),
        "many tools": _user("a", tools=[_tool({}, f"f{number}") for number in range(200_000)]),
        "tools at the bound": _user("a", tools=[_tool({}, f"f{number}") for number in range(1000)]),
        "a long schema": _user("a", tools=[_tool({"type": "object", "properties": properties})]),
        "a deep schema": _user("a", tools=[_tool(_deep(200))]),
        "a huge number of arguments": _user("a", tools=[_tool({"enum": [1] * 5_000_000})]),
    }


def _attack(url: str, path: str, body: bytes) -> None:
    """Runs in a thread, because this process also times the ordinary requests."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=600)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        connection.getresponse().read()
    finally:
        connection.close()


async def hostile(gateway: GatewayProcess, path: str, honest: Callable[[str], bytes]) -> dict[str, Json]:
    """Sends hostile requests and returns the figures. `honest` returns the body of an ordinary request for a text."""
    bodies = requests()
    stalls: dict[str, float] = {}
    waits: list[float] = []
    is_over = False
    *hostiles, friend = gateway.urls[: HOSTILE_SESSIONS + 1]

    async def ordinary() -> None:
        line = await Line.open(friend)
        number = 0
        while not is_over:
            started_at = time.perf_counter()
            status, answer = await line.post(path, honest(f"task {number}"))
            if status != 200:
                raise RuntimeError(f"an ordinary request was refused: {answer[:200]!r}")
            waits.append(time.perf_counter() - started_at)
            number += 1
            await asyncio.sleep(0.01)
        line.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(ordinary())
        await asyncio.sleep(1.0)
        await gateway.stall_ms()
        await asyncio.sleep(2.0)
        stalls["honest"] = await gateway.stall_ms()
        undisturbed = sorted(waits)
        waits.clear()
        for name, body in bodies.items():
            note(f"hostile requests: {name}")
            await asyncio.gather(*(asyncio.to_thread(_attack, url, path, body) for url in hostiles))
            stalls[name] = await gateway.stall_ms()
        is_over = True
    quiet = stalls.pop("honest")
    worst = max(stalls, key=lambda name: stalls[name])
    beside = sorted(waits)
    return {
        "hostile_loop_stall_ms": round(stalls[worst], 1),
        "hostile_loop_stall_by": worst,
        "honest_loop_stall_ms": round(quiet, 1),
        "hostile_honest_p95_ms": round(1000 * beside[int(len(beside) * 0.95)], 1),
        "honest_p95_ms": round(1000 * undisturbed[int(len(undisturbed) * 0.95)], 1),
        "hostile_loop_stalls_ms": {name: round(stall, 1) for name, stall in stalls.items()},
    }
