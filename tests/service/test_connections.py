"""What clients without a token can do to the service's port: each limit, over real sockets."""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from rollyard.client import AsyncClient
from tests.service.site import Site, open_site, task

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture
async def site(tmp_path: Path) -> AsyncGenerator[Site, None]:
    async with open_site(tmp_path) as opened:
        yield opened


class Raw:
    """A raw connection to the service."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body of one response."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(lines[0].split()[1]), headers, json.loads(body)

    async def refusal(self) -> tuple[int, str]:
        status, headers, body = await self.answer()
        assert headers["content-type"] == "application/problem+json"
        assert (body["status"], headers["connection"]) == (status, "close")
        assert body["detail"] and body["remedy"]
        return status, body["code"]

    async def is_closed(self) -> bool:
        """Waits until it is closed; data that still arrives is discarded."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass
        return True


@contextlib.asynccontextmanager
async def raw(site: Site, source: str = "127.0.0.1") -> AsyncGenerator[Raw, None]:
    port = int(site.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


def head(site: Site, line: str = "GET /healthz", **headers: str) -> bytes:
    lines = [f"{line} HTTP/1.1", f"Host: {site.url.removeprefix('http://')}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def refusals(site: Site) -> dict[str, float]:
    text = (await site.get("/metrics")).body.decode()
    counts = re.findall(r'^rollyard_http_refusals_total\{reason="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {reason: float(count) for reason, count in counts}


# --- headers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [b"x-a: " + b"a" * 60 + b"\r\n", b"a"], ids=["many", "one"])
async def test_100_mib_of_headers_are_refused_at_once_and_use_no_memory(site: Site, piece: bytes) -> None:
    before = resident_bytes()
    chunk = piece * (MIB // len(piece))
    async with raw(site) as client:
        client.write(head(site)[:-2] + b"x: ")
        refused = asyncio.create_task(client.refusal())  # now: a client that keeps sending is reset soon
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                client.write(chunk)
                await client.writer.drain()
        assert await refused == (431, "headers_too_large")
    assert resident_bytes() - before < 20 * MIB
    assert sum((await refusals(site)).values()) == 1


async def test_10000_headers_are_refused(site: Site) -> None:
    async with raw(site) as client:
        client.write(head(site)[:-2] + b"".join(b"x%d: y\r\n" % number for number in range(10_000)) + b"\r\n")
        assert await client.refusal() == (431, "headers_too_large")
    assert await refusals(site) == {"too_many_headers": 1}


async def test_headers_that_arrive_too_slowly_are_refused(tmp_path: Path) -> None:
    async with open_site(tmp_path, http_header_s=0.5) as site, raw(site) as client:

        async def drip() -> None:
            for byte in head(site, x="y" * 10_000):
                client.write(bytes([byte]))
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        assert await client.refusal() == (408, "request_timed_out")
        dripping.cancel()
        assert await refusals(site) == {"headers_too_slow": 1}


async def test_300_incomplete_requests_do_not_block_other_clients(tmp_path: Path) -> None:
    async with open_site(tmp_path, http_header_s=3) as site, contextlib.AsyncExitStack() as stack:
        await site.get("/healthz")
        before = resident_bytes()
        half = [await stack.enter_async_context(raw(site)) for _ in range(300)]
        for client in half:
            client.write(head(site)[:-2] + b"x: " + b"y" * 10_000)
        for _ in range(20):
            assert (await site.get("/healthz")).status == 200
        await site.submit("r1")
        assert [await client.refusal() for client in half] == [(408, "request_timed_out")] * 300
        assert resident_bytes() - before < 30 * MIB
        assert await refusals(site) == {"headers_too_slow": 300}


# --- connections ----------------------------------------------------------------------------------------


async def test_idle_connections_are_closed_whether_used_or_not(tmp_path: Path) -> None:
    async with open_site(tmp_path, http_idle_s=0.5) as site, raw(site) as unused, raw(site) as used:
        used.write(head(site))
        assert (await used.answer())[0] == 200
        assert await used.is_closed()
        assert await unused.is_closed()


async def test_one_address_cannot_take_all_connections(tmp_path: Path) -> None:
    async with open_site(tmp_path, max_connections_per_address=5) as site, contextlib.AsyncExitStack() as stack:
        open_connections = [await stack.enter_async_context(raw(site)) for _ in range(5)]
        for client in open_connections:
            client.write(head(site))
            assert (await client.answer())[0] == 200
        async with raw(site) as one_more:
            status, headers, body = await one_more.answer()
            assert (status, body["code"]) == (503, "too_many_connections")
            assert int(headers["retry-after"]) > 0
            assert "127.0.0.1" in body["detail"]
        async with raw(site, source="127.0.0.2") as other:
            other.write(head(site))
            assert (await other.answer())[0] == 200
        open_connections[0].writer.close()
        await open_connections[0].is_closed()
        open_connections[1].write(head(site))
        assert (await open_connections[1].answer())[0] == 200
        async with raw(site) as next_one:
            next_one.write(head(site))
            assert (await next_one.answer())[0] == 200
    assert site.served.app_state.pipeline.metrics.render()[0].count(b'"too_many_connections_from_address"} 1.0') == 1


async def test_beyond_max_connections_some_get_503_and_the_rest_are_closed(tmp_path: Path) -> None:
    async with open_site(tmp_path, max_connections=3) as site, contextlib.AsyncExitStack() as stack:
        open_connections = [await stack.enter_async_context(raw(site)) for _ in range(3)]
        beyond = [await stack.enter_async_context(raw(site)) for _ in range(100)]
        refused = 0
        for client in beyond:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                assert await client.refusal() == (503, "too_many_connections")
                refused += 1
        assert 0 < refused <= 100
        assert site.served.http.connections == 3
        for client in open_connections:
            client.write(head(site))
            assert (await client.answer())[0] == 200


async def test_the_client_waits_for_a_connection(tmp_path: Path) -> None:
    async with (
        open_site(tmp_path, max_connections=1) as site,
        raw(site) as connection,
        AsyncClient(site.url, site.token, retry_s=90) as client,
    ):
        connection.write(head(site))
        assert (await connection.answer())[0] == 200
        asking = asyncio.create_task(client.list_runs())
        while b'"too_many_connections"}' not in site.served.app_state.pipeline.metrics.render()[0]:
            await asyncio.sleep(0.01)
        assert not asking.done()
        connection.writer.close()
        assert await asking == []


async def test_pipelined_requests_are_not_queued(site: Site) -> None:
    async with raw(site) as client:
        client.write(head(site) * 1000)
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await client.is_closed()
    assert site.served.app_state.pipeline.metrics.render()[0].count(b'route="/healthz",status="200"} 1.0') == 1


# --- bodies ---------------------------------------------------------------------------------------------


async def test_a_stalled_body_is_refused_and_nothing_of_it_is_stored(tmp_path: Path) -> None:
    async with open_site(tmp_path, http_body_s=0.5) as site, raw(site) as client:
        body = json.dumps({"id": "r1", "task": task()}).encode()
        options = {"authorization": f"Bearer {site.token}", "content-length": str(len(body))}
        client.write(head(site, "POST /v1/rollouts", **options) + body[:-1])
        assert await client.refusal() == (408, "request_timed_out")
        assert (await site.get("/v1/rollouts/r1")).status == 404
        assert await refusals(site) == {"body_too_slow": 1}


async def test_clients_that_disconnect_during_a_request_are_not_logged(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    paths = (await site.get("/openapi.json")).body["paths"]
    calls = [(method.upper(), re.sub(r"\{\w+\}", "x", path)) for path, methods in paths.items() for method in methods]
    assert len(calls) > 50
    caplog.clear()
    for method, path in calls:
        for framing in ({"content_length": "500"}, {"transfer_encoding": "chunked"}):
            async with raw(site) as client:
                bearer = f"Bearer {site.token}"
                client.write(head(site, f"{method} {path}", authorization=bearer, **framing) + b'5\r\n{"a":')
                await client.writer.drain()
                await asyncio.sleep(0)
    assert (await site.get("/healthz")).status == 200
    while site.served.http.connections > 1:
        await asyncio.sleep(0.01)
    assert [record.getMessage() for record in caplog.records] == []


# --- logs and metrics -----------------------------------------------------------------------------------


async def test_invalid_requests_are_counted_and_logged_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for nonsense in [b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"hello\r\n\r\n"] * 10:
        async with raw(site) as client:
            client.write(nonsense)
            assert await client.refusal() == (400, "malformed_request")
    assert await refusals(site) == {"malformed": 30}
    (record,) = (record for record in caplog.records if record.name == "rollyard.http")
    assert (record.reason, record.last_from) == ("malformed", "127.0.0.1")  # type: ignore[attr-defined]
    assert record.exc_info is None
