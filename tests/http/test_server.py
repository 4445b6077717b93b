"""The HTTP server as the service uses it; `tests/sandbox/test_doorway.py` tests what doorways also use."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import subprocess
from collections.abc import AsyncGenerator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollyard.http import HttpServer, ListenerBounds, Reason, Refusals
from rollyard.http._connection import Connection
from rollyard.http._connection_group import network_of
from tests.http.loops import on_both_loops

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(
    app: Any, *, tls: ssl.SSLContext | None = None, refusals: Refusals | None = None, **bounds: Any
) -> AsyncGenerator[tuple[HttpServer, int], None]:
    server = HttpServer(app, ListenerBounds(**{"connections": 100, **bounds}), refusals=refusals)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
    sock.bind(("127.0.0.1", 0))
    await server.start(sock, backlog=100, tls=tls)
    try:
        yield server, sock.getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0)


async def connect(port: int, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, **options)


async def slow_reader(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    return client


async def whole(reader: asyncio.StreamReader) -> bytes:
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(65536):
            data += chunk
    return bytes(data)


async def reply(send: Any, body: bytes, status: int = 200) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    await reply(send, body)


# --- responses ------------------------------------------------------------------------------------------


@on_both_loops
async def test_the_scope_contains_both_addresses_and_a_response_has_a_date() -> None:
    addresses: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        addresses.append((scope["client"], scope["server"], scope["scheme"]))
        await reply(send, b"ok")

    async with serving(app) as (_, port):
        reader, writer = await connect(port)
        writer.write(GET)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert addresses == [(writer.get_extra_info("sockname"), ("127.0.0.1", port), "http")]
        (date,) = (line[6:] for line in head.split("\r\n") if line.startswith("date: "))
        assert parsedate_to_datetime(date).year >= 2024
        writer.close()


@on_both_loops
async def test_a_slow_reader_receives_a_large_response_completely() -> None:
    """`unread_s` and `idle_s` apply only to clients that read nothing at all."""

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"x" * 400_000)

    async with serving(large, unread_s=600, idle_s=600) as (server, port):
        client, loop = await slow_reader(port), asyncio.get_running_loop()
        await loop.sock_sendall(client, GET)
        got = len(await loop.sock_recv(client, 10_000))
        (connection,) = server._group.connections
        assert isinstance(connection, Connection)
        transport = connection._transport
        assert transport is not None
        for _ in range(3):
            unsent_bytes = transport.get_write_buffer_size()
            while transport.get_write_buffer_size() == unsent_bytes:
                got += len(await loop.sock_recv(client, 10_000))
                await asyncio.sleep(0)
            connection._too_slow()  # as if its time had expired
            assert not transport.is_closing()
        while got < 400_000:
            got += len(await loop.sock_recv(client, 100_000))
        client.close()


@on_both_loops
async def test_a_client_that_reads_nothing_is_disconnected() -> None:
    is_over = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await send_or_leave(send)) and not is_disconnected.is_set():
            pass
        is_over.set()

    async def send_or_leave(send: Any) -> bool:
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await asyncio.sleep(0)
        return True

    is_disconnected = asyncio.Event()
    reasons: list[str] = []

    def note(reason: str) -> None:
        reasons.append(reason)
        is_disconnected.set()

    async with serving(endless, unread_s=0.2, refusals=Refusals(note, is_logged=False)) as (server, port):
        client = await slow_reader(port)
        await asyncio.get_running_loop().sock_sendall(client, GET)
        await is_over.wait()
        assert reasons == [Reason.ANSWER_UNREAD]
        while server.connections:
            await asyncio.sleep(0.01)
        client.close()


# --- bodies ---------------------------------------------------------------------------------------------


@on_both_loops
async def test_a_refusal_to_a_client_that_has_just_closed_raises_nothing() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"")

    async with serving(app) as (server, port):
        client = await slow_reader(port)
        await asyncio.get_running_loop().sock_sendall(client, b"GET / HT")
        while not server._group.connections:
            await asyncio.sleep(0.001)
        (connection,) = server._group.connections
        assert isinstance(connection, Connection)
        client.close()  # its kernel answers the refusal with a reset, before the server's loop runs again
        connection._too_slow()
        while server._group.connections:
            await asyncio.sleep(0.001)


async def test_a_slow_body_gets_more_time_for_each_byte() -> None:
    async with serving(echo, body_s=2.0, body_bytes_per_s=1) as (_, port):
        reader, writer = await connect(port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 24\r\n\r\n")
        for _ in range(24):  # 2.4 s in all; each byte adds a second
            writer.write(b"x")
            await asyncio.sleep(0.1)
        assert b" 200 " in await reader.readline()
        writer.close()


@on_both_loops
async def test_an_early_response_is_not_followed_by_a_second_one() -> None:
    async def busy(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"later", 503)

    async with serving(busy, body_s=0.2) as (_, port):
        reader, writer = await connect(port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\nabc")
        assert (await whole(reader)).count(b"HTTP/1.1") == 1
        writer.close()


# --- disconnects and drains ------------------------------------------------------------------------------


@on_both_loops
async def test_an_app_whose_client_disconnects_is_notified_and_not_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    notified, ended = asyncio.Event(), asyncio.Event()

    async def several_steps(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        notified.set()
        await asyncio.sleep(0.05)  # it completes what it has started
        await reply(send, b"nobody reads this")
        ended.set()

    async with serving(several_steps) as (_, port):
        _, writer = await connect(port)
        writer.write(GET)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await notified.wait()
        await ended.wait()
    assert not caplog.records


@on_both_loops
async def test_a_drain_answers_started_requests_and_closes_other_connections() -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def waiting_app(scope: Any, receive: Any, send: Any) -> None:
        started.set()
        await go.wait()
        await reply(send, b"done")

    async with serving(waiting_app) as (server, port):
        busy, idle, half = [await connect(port) for _ in range(3)]
        busy[1].write(GET)
        half[1].write(GET[:-2])
        await started.wait()
        draining = asyncio.create_task(server.drain(60))
        assert await whole(idle[0]) == b""
        assert await whole(half[0]) == b""
        with pytest.raises(ConnectionError):
            await connect(port)
        go.set()
        answer = await whole(busy[0])
        assert answer.endswith(b"done") and b"connection: close" in answer
        await draining
        assert server.connections == 0
        for _, writer in (busy, idle, half):
            writer.close()


@on_both_loops
async def test_a_drain_cancels_requests_that_do_not_end(caplog: pytest.LogCaptureFixture) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def stuck(scope: Any, receive: Any, send: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(stuck) as (server, port):
        reader, writer = await connect(port)
        writer.write(GET)
        await started.wait()
        await server.drain(0.1)
        assert cancelled.is_set()
        assert await whole(reader) == b""
        writer.close()
    (record,) = caplog.records
    assert record.getMessage() == "requests were aborted"


# --- the log --------------------------------------------------------------------------------------------


async def test_many_refusals_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("rollyard.http.refusals.time.monotonic", lambda: now)
    counted: list[str] = []
    refusals = Refusals(counted.append)
    for _ in range(500):
        refusals.note(Reason.MALFORMED, "192.0.2.1")
    refusals.note(Reason.HEADERS_TOO_SLOW, "192.0.2.2")
    now += 61
    refusals.note(Reason.MALFORMED, "192.0.2.3")
    logged = [(record.reason, record.times, record.last_from) for record in caplog.records]  # type: ignore[attr-defined]
    assert logged == [
        ("malformed", 1, "192.0.2.1"),
        ("headers_too_slow", 1, "192.0.2.2"),
        ("malformed", 500, "192.0.2.3"),
    ]
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert len(counted) == 502


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_one_host_with_many_addresses_is_one_client(address: str, network: str) -> None:
    assert network_of(address) == network


# --- TLS ------------------------------------------------------------------------------------------------


@on_both_loops
async def test_the_server_uses_tls_if_it_has_a_certificate(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))

    async def scheme(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, scope["scheme"].encode())

    async with serving(scheme, tls=tls) as (_, port), aiohttp.ClientSession() as http:
        async with http.get(f"https://127.0.0.1:{port}/", ssl=trusting) as answer:
            assert await answer.read() == b"https"
        reader, writer = await connect(port, ssl=trusting)
        writer.write(b"nonsense\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
