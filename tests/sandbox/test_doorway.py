"""The doorway's server on real sockets with real clients, on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import socket
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollyard.sandbox.doorway import BACKLOG, Doorway, DoorwayLimits
from tests.http.loops import on_both_loops


def listening() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(BACKLOG)
    return sock


@contextlib.asynccontextmanager
async def serving(app: Any, **limits: Any) -> AsyncGenerator[Doorway, None]:
    sock = listening()
    doorway = Doorway(sock, port=sock.getsockname()[1], limits=DoorwayLimits(**limits), owner="ro-1")
    await doorway.serve(app)
    try:
        yield doorway
    finally:
        doorway.close()
        await asyncio.sleep(0)


async def raw(doorway: Doorway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", doorway.port)


async def whole(reader: asyncio.StreamReader) -> bytes:
    """Reads until the other side closes or resets the connection."""
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(65536):
            data += chunk
    return bytes(data)


async def send_raw(doorway: Doorway, data: bytes) -> bytes:
    """Sends raw bytes and returns the whole answer, until the connection ends."""
    reader, writer = await raw(doorway)
    writer.write(data)
    try:
        return await whole(reader)
    finally:
        writer.close()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def reply(send: Any, body: bytes, status: int = 200, headers: Any = ()) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


async def read_all(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body
        body += message["body"]
        if not message["more_body"]:
            return body


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = await read_all(receive)
    await reply(send, b"%s %s %s" % (scope["method"].encode(), scope["raw_path"], body))


class BlockingApp:
    """An app that starts and then waits, and records how it ended."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.was_cancelled = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        finally:
            self.ended.set()


# --- requests and answers -------------------------------------------------------------------------------


@on_both_loops
async def test_sequential_requests_share_one_connection() -> None:
    async with serving(echo) as doorway, aiohttp.ClientSession() as client:
        for number in range(3):
            async with client.post(f"{doorway.url}/a%20b?q={number}", data=b"x" * number) as answer:
                assert await answer.read() == b"POST /a%20b " + b"x" * number
        big = os.urandom(5 << 20)
        async with client.post(doorway.url, data=io.BytesIO(big)) as answer:
            assert await answer.read() == b"POST / " + big
        async with client.head(doorway.url) as answer:
            assert answer.status == 200
        assert doorway.connections == 1


@on_both_loops
async def test_chunked_bodies_and_http_1_0_are_supported() -> None:
    async with serving(echo) as doorway:
        chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        answer = await send_raw(doorway, chunked + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        assert b"POST / abcde" in answer
        assert (await send_raw(doorway, b"GET /old HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\nGET /old ")


@on_both_loops
async def test_expect_100_continue_is_answered() -> None:
    async with serving(echo) as doorway:
        reader, writer = await raw(doorway)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello")
        await reader.readuntil(b"POST / hello\r\n0\r\n\r\n")
        writer.close()


@on_both_loops
async def test_an_upgrade_header_is_ignored() -> None:
    async with serving(echo) as doorway:
        offer = b"host: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAA\r\n"
        reader, writer = await raw(doorway)
        writer.write(b"POST /one HTTP/1.1\r\n" + offer + b"content-length: 3\r\n\r\nabc")
        assert b"200" in await reader.readline()
        await reader.readuntil(b"POST /one abc\r\n0\r\n\r\n")
        writer.write(b"GET /two HTTP/1.1\r\n" + offer + b"\r\n")
        await reader.readuntil(b"GET /two \r\n0\r\n\r\n")
        writer.close()


@on_both_loops
async def test_events_are_streamed_as_they_are_sent() -> None:
    steps: asyncio.Queue[bytes] = asyncio.Queue()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        while event := await steps.get():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body"})

    async with serving(stream) as doorway, aiohttp.ClientSession() as client, client.get(doorway.url) as answer:
        for number in range(3):  # the second is sent only when the first has arrived
            steps.put_nowait(b"data: %d\n\n" % number)
            assert await answer.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
        steps.put_nowait(b"")
        assert await answer.content.read() == b""


@on_both_loops
async def test_an_app_waits_for_a_client_that_does_not_read() -> None:
    sent = 0
    is_blocked = asyncio.Event()

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            asyncio.get_running_loop().call_later(0.5, check, sent)
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
            sent += 1

    def check(then: int) -> None:
        if sent == then:
            is_blocked.set()

    async with serving(flood) as doorway:
        reader, writer = await raw(doorway)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await is_blocked.wait()
        assert sent < 100
        writer.close()
        del reader


@on_both_loops
async def test_a_client_that_does_not_read_gets_no_further_answers() -> None:
    asked = 0

    async def large(scope: Any, receive: Any, send: Any) -> None:
        nonlocal asked
        asked += 1
        await reply(send, b"x" * (4 << 20))

    async with serving(large) as doorway:
        reader, writer = await raw(doorway)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(50):  # for the server, each is sent after the previous one was answered
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            for _ in range(20):
                await asyncio.sleep(0)
        assert asked < 10
        writer.transport.abort()


@on_both_loops
async def test_the_body_waits_for_an_app_that_does_not_read() -> None:
    go = asyncio.Event()
    got = 0

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        nonlocal got
        await go.wait()
        got = len(await read_all(receive))
        await reply(send, b"")

    async with serving(slow, body_s=1.0) as doorway:
        reader, writer = await raw(doorway)
        size = 4 << 20
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        with pytest.raises(TimeoutError):  # twice the time limit of a body, which does not run while the app waits
            async with asyncio.timeout(2.1):
                await writer.drain()
        assert doorway._server is not None
        group = doorway._server._group
        group.bounds = replace(group.bounds, body_s=60.0)  # from here on, a busy machine may take its time
        go.set()
        assert b"200" in await reader.readline()
        assert got == size
        writer.close()


# --- errors of an app -----------------------------------------------------------------------------------


@on_both_loops
async def test_an_exception_in_the_app_returns_500_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("oh")

    with caplog.at_level(logging.ERROR, "rollyard.http"):
        async with serving(broken) as doorway:
            unread = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n" + b"x" * 5_000_000
            assert status_of(await send_raw(doorway, unread)) == 500
    (record,) = caplog.records
    assert record.owner == "ro-1"  # type: ignore[attr-defined]


@on_both_loops
async def test_an_incomplete_answer_never_appears_complete(caplog: pytest.LogCaptureFixture) -> None:
    async def half(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in ("/short", "/shorter"):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
            await send({"type": "http.response.body", "body": b"ab", "more_body": scope["path"] == "/short"})
            await send({"type": "http.response.body", "body": b"c"})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"abc", "more_body": True})
        if scope["path"] == "/raise":
            raise ValueError("oh")
        if scope["path"] == "/cancel":
            raise asyncio.CancelledError

    async with serving(half) as doorway, aiohttp.ClientSession() as client:
        for path in ("/raise", "/return", "/short", "/cancel"):
            with pytest.raises(aiohttp.ClientPayloadError):
                async with client.get(doorway.url + path) as answer:
                    await answer.read()
        async with client.get(doorway.url + "/shorter") as answer:  # nothing of it had been sent
            assert answer.status == 500


@on_both_loops
async def test_a_header_that_would_break_the_framing_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    async def split(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"", headers=[(b"x-a", b"1\r\nx-b: 2")])

    async with serving(split) as doorway:
        answer = await send_raw(doorway, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert status_of(answer) == 500
        assert b"x-b" not in answer


@on_both_loops
async def test_an_early_answer_reaches_a_client_that_is_still_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard.http._connection.LINGER_S", 60.0)

    async def busy(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"", 503, [(b"connection", b"close")])

    async with serving(busy) as doorway:
        reader, writer = await raw(doorway)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n")
        assert status_of(await reader.readline()) == 503
        for _ in range(5):
            writer.write(b"x" * 1_000_000)
            await writer.drain()  # a closed connection would have been reset by now
        assert not writer.is_closing()
        writer.close()


# --- limits ---------------------------------------------------------------------------------------------


@on_both_loops
async def test_a_connection_above_the_limit_is_closed_and_others_continue() -> None:
    async with serving(echo, connections=16) as doorway:
        connections = [await raw(doorway) for _ in range(16)]
        for reader, writer in connections:
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"0\r\n\r\n")
        assert await send_raw(doorway, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n") == b""
        for reader, writer in connections:
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"0\r\n\r\n")
            writer.close()
            assert await whole(reader) == b""
        assert b"200" in await send_raw(doorway, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")


@on_both_loops
async def test_slow_headers_are_refused() -> None:
    async with serving(echo, header_s=0.3) as doorway:
        reader, writer = await raw(doorway)

        async def drip() -> None:
            writer.write(b"GET / HTTP/1.1\r\n")
            while True:
                writer.write(b"x: y\r\n")
                await asyncio.sleep(0.05)

        task = asyncio.create_task(drip())
        assert status_of(await reader.readline()) == 408
        task.cancel()
        writer.close()


@on_both_loops
async def test_new_and_used_idle_connections_are_closed() -> None:
    async with serving(echo, idle_s=1.0) as doorway:
        assert await send_raw(doorway, b"") == b""
        assert await send_raw(doorway, b"\r\n") == b""  # no request has started
        assert status_of(await send_raw(doorway, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")) == 200


@on_both_loops
async def test_large_headers_are_refused_while_they_arrive() -> None:
    async with serving(echo, header_bytes=4096) as doorway:
        endless = b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000
        assert status_of(await send_raw(doorway, endless)) == 431
        ended = b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 2000 + b"\r\n"
        assert status_of(await send_raw(doorway, ended)) == 431
        assert status_of(await send_raw(doorway, b"\r\n" * 10_000)) == 431


@on_both_loops
async def test_a_large_body_is_refused_with_length_or_chunked() -> None:
    blocking_app = BlockingApp()
    async with serving(blocking_app, body_bytes=1 << 20) as doorway:
        announced = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1048577\r\n\r\n"
        assert status_of(await send_raw(doorway, announced + b"x" * 1048577)) == 413
        assert not blocking_app.started.is_set()
        _, writer = await raw(doorway)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        await blocking_app.started.wait()
    async with serving(echo, body_bytes=1 << 20) as doorway:
        chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        assert status_of(await send_raw(doorway, chunked + b"10000\r\n%s\r\n" % (b"x" * 65536) * 20)) == 413
        writer.close()


@on_both_loops
async def test_excessive_chunk_framing_is_refused() -> None:
    async with serving(echo, header_bytes=4096) as doorway:
        chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        assert status_of(await send_raw(doorway, chunked + b"1;" + b"e" * 1_000_000)) == 400
        assert status_of(await send_raw(doorway, chunked + b"0\r\n" + b"t: v\r\n" * 200_000)) == 400


@on_both_loops
async def test_a_body_that_does_not_arrive_is_refused() -> None:
    async with serving(echo, body_s=0.2) as doorway:
        assert status_of(await send_raw(doorway, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab")) == 408


@on_both_loops
async def test_invalid_requests_return_400_and_connect_405() -> None:
    async with serving(echo) as doorway:
        assert status_of(await send_raw(doorway, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")) == 400
        assert status_of(await send_raw(doorway, b"GET  HTTP/1.1\r\n\r\n")) == 400
        both = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        assert status_of(await send_raw(doorway, both)) == 400
        assert status_of(await send_raw(doorway, b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n")) == 405


@on_both_loops
async def test_pipelined_requests_are_not_queued() -> None:
    asked: list[str] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await read_all(receive)
        await reply(send, b"ok")

    async with serving(note) as doorway:
        one = b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n"
        answer = await send_raw(doorway, b"".join(one % number for number in range(1000)))
        assert (asked, answer.count(b"HTTP/1.1 200")) == (["/0"], 1)
        assert b"connection: close" in answer


# --- closing --------------------------------------------------------------------------------------------


@on_both_loops
async def test_an_app_is_cancelled_when_its_client_disconnects(caplog: pytest.LogCaptureFixture) -> None:
    for is_cut in (True, False):
        blocking_app = BlockingApp()
        async with serving(blocking_app) as doorway:
            _, writer = await raw(doorway)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await blocking_app.started.wait()
            if is_cut:
                writer.transport.abort()
            else:
                writer.close()
            await blocking_app.ended.wait()
            assert blocking_app.was_cancelled
    assert not caplog.records  # a disconnect is not an error


@on_both_loops
async def test_close_ends_the_listener_the_connections_and_the_apps() -> None:
    blocking_app = BlockingApp()
    async with serving(blocking_app) as doorway:
        busy, idle = await raw(doorway), await raw(doorway)
        busy[1].write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await blocking_app.started.wait()
        doorway.close()
        doorway.close()
        await blocking_app.ended.wait()
        assert blocking_app.was_cancelled
        assert [await whole(reader) for reader, _ in (busy, idle)] == [b"", b""]
        with pytest.raises(ConnectionError):
            await raw(doorway)
        with pytest.raises(RuntimeError, match="closed"):
            await doorway.serve(blocking_app)
        for _, writer in (busy, idle):
            writer.close()


@on_both_loops
async def test_close_cancels_an_app_that_continues_after_its_answer() -> None:
    blocking_app = BlockingApp()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"ok")
        await blocking_app(scope, receive, send)

    async with serving(app) as doorway:
        await send_raw(doorway, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await blocking_app.started.wait()
        assert not blocking_app.ended.is_set()  # the client has its answer, so its disconnect does not cancel the app
        doorway.close()
        await blocking_app.ended.wait()
        assert blocking_app.was_cancelled


@on_both_loops
async def test_connections_before_serve_wait_and_an_unserved_doorway_can_be_closed() -> None:
    sock = listening()
    doorway = Doorway(sock, port=sock.getsockname()[1])
    reader, writer = await raw(doorway)
    writer.write(b"GET /early HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    await doorway.serve(echo)
    assert b"GET /early" in await whole(reader)
    writer.close()
    with pytest.raises(RuntimeError, match="already"):
        await doorway.serve(echo)
    doorway.close()

    unused = listening()
    Doorway(unused).close()
    assert unused.fileno() == -1


@on_both_loops
async def test_200_doorways_answer_independently_and_leave_no_descriptor() -> None:
    def app_of(name: bytes) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await reply(send, name)

        return app

    def descriptors() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    async with serving(echo):  # uvloop opens an extra descriptor with the first server
        before = descriptors() - 1
    async with contextlib.AsyncExitStack() as stack:
        doorways = [await stack.enter_async_context(serving(app_of(b"%d" % n))) for n in range(200)]
        client = await stack.enter_async_context(aiohttp.ClientSession())

        async def ask(number: int) -> None:
            for _ in range(3):
                async with client.get(doorways[number].url) as answer:
                    assert await answer.read() == b"%d" % number

        async with asyncio.TaskGroup() as group:
            for number in range(200):
                group.create_task(ask(number))
    async with asyncio.timeout(90):
        while descriptors() > before:
            await asyncio.sleep(0.01)  # transports close in the loop's next iterations
