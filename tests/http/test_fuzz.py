"""Random and mutated bytes against both HTTP servers: the service's port, and a sandbox's doorway.

For every input, the server ends the exchange by itself within its bounds, answers with no 5xx, logs no traceback, and
keeps no state.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollyard.sandbox.doorway import BACKLOG, Doorway, DoorwayLimits
from tests.http.loops import on_both_loops
from tests.service.site import open_site, task

SEED = 21
INPUTS = 2000  # for each server
AT_ONCE = BACKLOG - 4  # a connection above a doorway's backlog waits in the kernel for minutes
HANG_S = 60.0
SHORT_S = 0.1  # the time for a request that never ends

WORDS = [
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\r\n\r\n",
        b"\0",
        b" ",
        b"\t",
        b":",
        b"%",
        b"%00",
        b"%2e%2e/",
        b"\xff",
        b"\xc3\xa9",
        b"?",
    ),
    *(b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"GET ", b"HEAD ", b"CONNECT ", b"OPTIONS * ", b"PRI * HTTP/2.0\r\n\r\n"),
    *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"0\r\n\r\n"),
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: identity, chunked\r\n",
        b"ffffffffffffffff\r\n",
        b"1;a=b\r\n",
    ),
    *(b"Connection: close\r\n", b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b"Expect: 100-continue\r\n"),
    *(b"Host: [::1\r\n", b"Authorization: Basic ####\r\n", b"x: " + b"y" * 40_000, b"a: b\r\n" * 300, b" folded\r\n"),
]


def mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(1, 400))
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.randrange(1, 30))
        match rng.randrange(6):
            case 0:
                data[at:end] = b""
            case 1:
                data[at:at] = data[at:end] * rng.randrange(1, 5)
            case 2:
                data[at:at] = rng.choice(WORDS)
            case 3:
                data[at:end] = rng.randbytes(end - at)
            case 4:
                data = data[:at] + bytearray(rng.choice(seeds))[at:]
            case _:
                del data[at:]
    return bytes(data)


async def answers(port: int, fuzz_input: Input) -> list[int]:
    """Returns the statuses of all responses to these bytes, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    response = bytearray()
    try:
        with contextlib.suppress(ConnectionError):
            for piece in fuzz_input.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if fuzz_input.is_cut:
                writer.transport.abort()
                return []
            while chunk := await reader.read(65536):
                response += chunk
    finally:
        writer.transport.abort()
    return [int(status) for status in re.findall(rb"(?:^|\n)HTTP/1\.1 (\d{3}) ", bytes(response))]


@dataclass(frozen=True)
class Input:
    """Raw bytes, sent in these pieces. With `is_cut`, the client then disconnects without reading."""

    pieces: list[bytes]
    is_cut: bool

    @classmethod
    def random(cls, rng: random.Random, seeds: list[bytes]) -> Input:
        data = mutated(rng, seeds)
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
        pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        return cls(pieces, rng.random() < 0.2)


async def fuzz(port: int, seeds: list[bytes]) -> set[int]:
    """Returns the statuses of all responses."""
    rng = random.Random(SEED)
    inputs = iter([Input.random(rng, seeds) for _ in range(INPUTS)])
    statuses_seen: set[int] = set()

    async def some() -> None:
        for fuzz_input in inputs:
            try:
                async with asyncio.timeout(HANG_S):
                    statuses = await answers(port, fuzz_input)
            except TimeoutError:
                pytest.fail(f"the server hangs: {fuzz_input}")
            assert all(status < 500 for status in statuses), (statuses, fuzz_input)
            statuses_seen.update(statuses)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(some())
    return statuses_seen


def check(statuses: set[int], records: list[logging.LogRecord]) -> None:
    assert {200, 400, 408, 431} <= statuses, f"some of these statuses are missing: {statuses}"
    loud = [record for record in records if record.exc_info or record.levelno >= logging.ERROR]
    assert not loud, [record.getMessage() for record in loud]


async def settled(count: Callable[[], int]) -> None:
    async with asyncio.timeout(HANG_S):
        while count():
            await asyncio.sleep(0.01)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def requests(host: bytes, token: bytes = b"") -> list[bytes]:
    """Returns valid requests, which are then mutated."""
    body = json.dumps({"id": "r1", "task": task()}).encode()
    headers = b"Host: %s\r\nAuthorization: Bearer %s\r\nUser-Agent: fuzz\r\nAccept: */*\r\n" % (host, token)
    chunks = b"%x\r\n%s\r\n%x;a=b\r\n%s\r\n0\r\nTrailer: x\r\n\r\n" % (20, body[:20], len(body) - 20, body[20:])
    return [
        b"GET /healthz HTTP/1.1\r\n%s\r\n" % headers,
        b"GET /v1/rollouts?limit=5&state=queued HTTP/1.1\r\n%s\r\n" % headers,
        b"POST /v1/rollouts HTTP/1.1\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (headers, len(body), body),
        b"POST /v1/rollouts HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n%s" % (headers, chunks),
        b"POST /v1/runs HTTP/1.1\r\n%sExpect: 100-continue\r\nContent-Length: 12\r\n\r\n" % headers + b'{"id": "a1"}',
        b"HEAD /healthz HTTP/1.0\r\n%sConnection: keep-alive\r\n\r\n" % headers,
        b"GET /healthz HTTP/1.1\r\n%sConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" % headers,
        (b"GET /healthz HTTP/1.1\r\n%s\r\n" % headers) * 3,
    ]


@pytest.mark.slow
@on_both_loops
async def test_a_doorway_withstands_any_bytes(caplog: pytest.LogCaptureFixture) -> None:
    sock = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    port = sock.getsockname()[1]
    limits = DoorwayLimits(connections=64, header_s=SHORT_S, idle_s=SHORT_S, body_s=SHORT_S)
    doorway = Doorway(sock, port=port, limits=limits)
    await doorway.serve(echo)
    try:
        check(await fuzz(port, requests(b"127.0.0.1:%d" % port)), caplog.records)
        await settled(lambda: doorway.connections)
    finally:
        doorway.close()
        await asyncio.sleep(0)


@pytest.mark.slow
async def test_the_service_withstands_any_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    short = {"http_header_s": SHORT_S, "http_idle_s": SHORT_S, "http_body_s": SHORT_S}
    async with open_site(tmp_path, **short) as site:
        await site.hold()
        port = int(site.url.rpartition(":")[2])
        check(await fuzz(port, requests(b"127.0.0.1:%d" % port, site.token.encode())), caplog.records)
        assert (await site.get("/healthz")).status == 200
        await settled(lambda: site.served.http.connections)
