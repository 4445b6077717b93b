"""Limits of one sandbox's egress: bytes, connections, time, invalid answers, and its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollyard.core.failure import SandboxLost
from rollyard.sandbox.egress import ProxyBounds
from rollyard.sandbox.runtimes.launched import LaunchedRuntime
from tests.sandbox.egress.site import ALLOWED, QUICK, open_site

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("runtime", ["bubblewrap"], indirect=True),
]


async def test_bytes_are_bounded_in_both_directions(runtime: LaunchedRuntime):
    async with open_site(runtime, bounds=QUICK) as site:
        down = await site.run(f"curl -sS http://{ALLOWED}:{site.allowed.port}/big | wc -c")
        assert int(down.stdout) <= QUICK.most_bytes and site.verdicts == {"allowed": 1, "bytes": 1}
        assert site.ledger.total_bytes <= QUICK.most_bytes
        site.ledger.add(None, sent=QUICK.most_bytes - site.ledger.total_bytes)
        output = await site.python("show(get(f'http://{ALLOWED}:{AP}/')); show(tls(f'{ALLOWED}:{AT}', ALLOWED))")
        assert output.count(" 403 ") == 2 and site.allowed.connections == 1 and site.allowed_tls.connections == 0


async def test_an_upload_is_bounded(runtime: LaunchedRuntime):
    async with open_site(runtime, bounds=QUICK) as site:
        result = await site.run(
            f"head -c 3000000 /dev/zero | curl -sS -o /dev/null --data-binary @- https://{ALLOWED}:{site.allowed_tls.port}/echo"
        )
        assert result.status != 0 and site.verdicts.get("bytes") == 1
        assert site.ledger.total_bytes <= QUICK.most_bytes


async def test_open_connections_are_bounded(runtime: LaunchedRuntime):
    async with open_site(runtime, bounds=QUICK) as site:
        script = """
held = [socket.create_connection(PROXY, 30) for _ in range(4)]
for sock in held: sock.sendall(b"GET ")
show(get(f"http://{ALLOWED}:{AP}/"))
many = [socket.create_connection(PROXY, 30) for _ in range(16)]
show(f"cut off: {sum(read_all(sock) == b'' for sock in many) > 0}")
for sock in held + many: sock.close()
while b"welcome" not in (answer := get(f"http://{ALLOWED}:{AP}/")): time.sleep(0.1)  # until the proxy has seen the ends
show(answer)
"""
        output = await site.python(script)
        assert " 503 " in output and "cut off: True" in output and output.count("welcome") == 1


async def test_an_idle_tunnel_times_out(runtime: LaunchedRuntime):
    async with open_site(runtime, bounds=QUICK) as site:
        script = """
sock, _ = connect(f"{ALLOWED}:{AT}", 60)
context = ssl.create_default_context(cafile="/workspace/ca.pem")
wrapped = context.wrap_socket(sock, server_hostname=ALLOWED)
began = time.monotonic()
show(read_all(wrapped))
show(f"ended: {time.monotonic() - began > 1}")
"""
        assert "ended: True" in await site.python(script) and site.verdicts == {"allowed": 1, "idle": 1}


async def test_a_host_that_never_answers_times_out(runtime: LaunchedRuntime):
    async with open_site(runtime, bounds=QUICK) as site:
        result = await site.run(
            f"curl -sS -o /dev/null -w '%{{http_code}}' http://{ALLOWED}:{site.allowed.port}/silent"
        )
        assert result.stdout == b"504" and site.verdicts == {"allowed": 1, "idle": 1}


SHORT = ProxyBounds(connect_s=0.5, idle_s=5.0)


async def test_failed_lookups_are_reported(runtime: LaunchedRuntime):
    async with open_site(runtime, bounds=SHORT) as site:
        site.names.answers["gone.sub.test"] = [["127.0.0.1"]]
        site.names.answers["many.sub.test"] = [["1.1.1.1"] * 65]
        site.names.silent.add("slow.sub.test")
        output = await site.python(
            "show(get(f'http://unknown.sub.test:{AP}/')); show(get(f'http://slow.sub.test:{AP}/'));"
            "show(get(f'http://many.sub.test:{AP}/'))"
        )
        assert "unknown.sub.test has no address" in output and "was not looked up in time" in output
        assert "has 65 addresses" in output
        assert site.verdicts == {"dns": 3} and site.ledger.failed_connections == 3


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"SSH-2.0-server\r\n\r\n", "is not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 500 + b"\r\n", "too many header lines"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"b" * 200_000, "is not HTTP/1.1"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n", "is not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "is not HTTP/1.1"),
        (b"", "is not HTTP/1.1"),
    ],
)
async def test_an_invalid_answer_is_not_forwarded(answer: bytes, text: str, runtime: LaunchedRuntime):
    async with open_site(runtime, bounds=SHORT) as site:
        site.allowed.raw = answer
        output = await site.python("show(get(f'http://{ALLOWED}:{AP}/'))")
        assert output.startswith(("HTTP/1.1 502", "HTTP/1.1 431")) and text in output, output


async def test_a_malformed_chunk_ends_the_answer(runtime: LaunchedRuntime):
    async with open_site(runtime, bounds=SHORT) as site:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        site.allowed.raw = head + b"5\r\nhello\r\nzz\r\n"
        await site.python("show(get(f'http://{ALLOWED}:{AP}/'))")
        assert site.verdicts == {"allowed": 1, "connect": 1}
        site.allowed.raw = head + b"5\r\nhello\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\nmore"
        assert " 502 " in await site.python("show(get(f'http://{ALLOWED}:{AP}/', version='1.0'))")


async def test_a_half_closed_tunnel_still_delivers_the_answer(runtime: LaunchedRuntime):
    """The client's EOF is forwarded; then the tunnel ends with the other side, or by the idle timeout."""
    async with open_site(runtime, bounds=QUICK) as site:
        script = """
sock, _ = connect(f"{ALLOWED}:{AP}", 30)
sock.sendall(hello(ALLOWED.encode()) + b"GET / HTTP/1.1\\r\\n\\r\\n")
sock.shutdown(socket.SHUT_WR)
show(read_all(sock))
"""
        assert "welcome" in await site.python(script) and site.verdicts == {"allowed": 1}


async def test_no_other_connection_is_possible(runtime: LaunchedRuntime):
    async with open_site(runtime) as site:
        script = """
for kind, address in ((socket.SOCK_DGRAM, ("1.1.1.1", 53)), (socket.SOCK_STREAM, ("1.1.1.1", 443)),
                      (socket.SOCK_STREAM, ("127.0.0.1", FP)), (socket.SOCK_DGRAM, ("8.8.8.8", 443))):
    try:
        with socket.socket(socket.AF_INET, kind) as sock:
            sock.settimeout(2); sock.connect(address); sock.send(b"x"); show("sent")
    except OSError as error:
        show("no way")
try:
    show(socket.getaddrinfo(ALLOWED, 80))
except OSError:
    show("no names")
"""
        output = await site.python(script)
        assert output.count("no way") == 4 and "no names" in output
        site.check_unreached()


async def test_the_ledger_is_bounded(runtime: LaunchedRuntime):
    async with open_site(runtime) as site:
        await site.python("for i in range(100): get(f'http://h{i}.test/')")
        summary: Any = site.ledger.summary()
        assert len(summary["hosts"]) == 32 and summary["unnamed"] == 68 and site.verdicts == {"host": 100}


async def test_the_end_of_a_sandbox_closes_its_tunnels(runtime: LaunchedRuntime):
    async with open_site(runtime) as site:
        script = """
sock, _ = connect(f"{ALLOWED}:{AT}", 60)
wrapped = ssl.create_default_context(cafile="/workspace/ca.pem").wrap_socket(sock, server_hostname=ALLOWED)
wrapped.sendall(f"GET /echo HTTP/1.1\\r\\nHost: {ALLOWED}\\r\\n\\r\\n".encode())
wrapped.recv(100)
print("open", flush=True)
read_all(wrapped)
"""
        running = asyncio.ensure_future(site.python(script))
        async with asyncio.timeout(60):
            while not site.allowed_tls.requests:
                await asyncio.sleep(0.01)
        await site.sandbox.kill()
        with pytest.raises(SandboxLost):
            await running
        async with asyncio.timeout(20):
            while site.allowed_tls.open:
                await asyncio.sleep(0.01)
