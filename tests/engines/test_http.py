"""The HTTP client over real sockets: connections that are kept or closed, and its failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from rollyard.engines.clients import http as http_module
from rollyard.engines.clients.http import HttpFailure, HttpPool, Target, TooLarge

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


class Server:
    """Answers each request with the next of its replies; None closes the connection instead."""

    def __init__(self, *replies: bytes | None) -> None:
        self.replies = list(replies)
        self.connections = 0
        self.closed = asyncio.Event()
        self.target = Target("127.0.0.1", 0, False, "")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                reply = self.replies.pop(0)
                if reply is None:
                    break
                writer.write(reply)
                await writer.drain()
                if b"Connection: close" in reply or b"until the end" in reply:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.set()
            writer.close()


@asynccontextmanager
async def serving(*replies: bytes | None) -> AsyncGenerator[Server, None]:
    server = Server(*replies)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.target = Target("127.0.0.1", listener.sockets[0].getsockname()[1], False, "")
    async with listener:
        yield server


async def ask(http: HttpPool, server: Server, most: int = 1000) -> bytes:
    head = f"POST / HTTP/1.1\r\nHost: {server.target.authority}\r\nContent-Length: 0\r\n\r\n".encode()
    return (await http.request(server.target, head, b"", most, None)).body


async def listen(http: HttpPool, server: Server, until: bytes) -> bytes:
    received = bytearray()

    def came(chunk: bytes) -> bool:
        received.extend(chunk)
        return received.endswith(until)

    await http.request(server.target, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"", 1000, came)
    return bytes(received)


async def test_a_connection_is_kept_and_reused(http: HttpPool) -> None:
    async with serving(OK, OK, OK) as server:
        for _ in range(3):
            assert await ask(http, server) == b"ok"
        assert (server.connections, http.idle) == (1, 1)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end",
    ],
    ids=["connection: close", "no content length"],
)
async def test_a_connection_that_ends_with_its_reply_is_not_reused(reply: bytes, http: HttpPool) -> None:
    async with serving(reply, OK) as server:
        assert await ask(http, server) in (b"ok", b"until the end")
        assert http.idle == 0
        assert await ask(http, server) == b"ok"
        assert server.connections == 2


async def test_an_informational_reply_is_skipped(http: HttpPool) -> None:
    async with serving(b"HTTP/1.1 100 Continue\r\n\r\n" + OK) as server:
        assert await ask(http, server) == b"ok"


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (None, "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\nConnection: close\r\n\r\nhalf", "in the middle of its reply"),
        (b"<html>Bad gateway</html>\r\n\r\n", "not HTTP"),
    ],
    ids=["no reply", "half a reply", "not HTTP"],
)
async def test_an_incomplete_reply_is_a_failure(reply: bytes | None, says: str, http: HttpPool) -> None:
    async with serving(reply, OK) as server:
        with pytest.raises(HttpFailure, match=says):
            await ask(http, server)
        assert http.idle == 0
        assert await ask(http, server) == b"ok"


async def test_a_refused_connection_is_a_failure(http: HttpPool) -> None:
    async with serving() as server:
        target = server.target
    with pytest.raises(HttpFailure, match=r"refused|Connect"):
        await http.request(target, b"GET / HTTP/1.1\r\n\r\n", b"", 10, None)


async def test_tls_to_a_plain_server_is_a_failure(http: HttpPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "CONNECT_S", 0.2)
    async with serving(OK) as server:
        target = Target("127.0.0.1", server.target.port, True, "")
        with pytest.raises(HttpFailure):
            await http.request(target, b"GET / HTTP/1.1\r\n\r\n", b"", 10, None)


async def test_a_reply_beyond_the_limit_is_not_read(http: HttpPool) -> None:
    async with serving(OK) as server:
        with pytest.raises(TooLarge):
            await ask(http, server, most=1)
        await server.closed.wait()


async def test_a_reader_that_is_done_does_not_wait_for_the_end(http: HttpPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(STREAM + b"4\r\ndone\r\n") as server:
        assert await listen(http, server, b"done") == b"done"
        assert http.idle == 0  # the stream has not ended
        monkeypatch.setattr(http_module, "DRAIN_S", 0.01)
    async with serving(STREAM + b"4\r\ndone\r\n") as server:
        assert await listen(http, server, b"done") == b"done"
        await server.closed.wait()  # the end is not waited for


async def test_the_connection_of_a_complete_stream_is_reused(http: HttpPool) -> None:
    async with serving(STREAM + b"4\r\ndone\r\n4\r\nmore\r\n0\r\n\r\n", OK) as server:
        assert await listen(http, server, b"done") == b"done"
        assert await ask(http, server) == b"ok"
        assert server.connections == 1


async def test_an_exception_of_the_reader_ends_the_exchange(http: HttpPool) -> None:
    def wrong(_: bytes) -> bool:
        raise KeyError("no such event")

    async with serving(STREAM + b"4\r\ndone\r\n") as server:
        with pytest.raises(KeyError, match="no such event"):
            await http.request(server.target, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"", 10, wrong)
        await server.closed.wait()


async def test_a_cancelled_exchange_closes_its_connection(http: HttpPool) -> None:
    async with serving(STREAM) as server:
        asking = asyncio.create_task(listen(http, server, b"never"))
        while not server.connections:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await server.closed.wait()


async def test_an_idle_connection_is_closed_by_the_client(http: HttpPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "KEEPALIVE_S", 0.01)
    async with serving(OK) as server:
        await ask(http, server)
        await server.closed.wait()
        assert http.idle == 0


async def test_closing_the_pool_closes_all_connections() -> None:
    async with serving(OK) as server:
        async with HttpPool() as http:
            await ask(http, server)
        await server.closed.wait()


@pytest.mark.parametrize(
    ("url", "authority", "prefix"),
    [
        ("http://gpu1:8000", "gpu1:8000", ""),
        ("https://gpu1/engines/a/", "gpu1", "/engines/a"),
        ("http://[::1]:80", "[::1]", ""),
    ],
)
def test_a_url_is_parsed_into_its_target(url: str, authority: str, prefix: str) -> None:
    target = Target.of(url)
    assert (target.authority, target.prefix) == (authority, prefix)
