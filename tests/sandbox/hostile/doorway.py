"""Attacks on the doorway: on its port before it is there, on its address, on the server behind it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from rollyard.sandbox.base import Runtime, Sandbox, SandboxSpec
from rollyard.sandbox.doorway import AsgiApp
from tests.sandbox.hostile.cases import LONG_S, hostile, script_output, started

SPEC = SandboxSpec(has_doorway=True, owner="hostile")


def app_answering(word: str) -> AsgiApp:
    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": word.encode()})

    return app


@asynccontextmanager
async def open_door(runtime: Runtime, word: str) -> AsyncGenerator[Sandbox, None]:
    async with started(runtime, SPEC) as sandbox:
        assert sandbox.doorway is not None
        await sandbox.doorway.serve(app_answering(word))
        yield sandbox


_ASK = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=15).read().decode(), end="")
"""


async def answers_as(sandbox: Sandbox, word: str) -> None:
    assert sandbox.doorway is not None
    assert await script_output(sandbox, _ASK, sandbox.doorway.url, timeout_s=LONG_S) == word


_SQUAT = """
import socket, sys
port, kept = int(sys.argv[1]), []
for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    for option in (None, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        try:
            sock = socket.socket(family)
            if option:
                sock.setsockopt(socket.SOL_SOCKET, option, 1)
            sock.bind((address, port))
            sock.listen()
            kept.append(sock)
            print("took", address, option)
        except OSError:
            sock.close()
"""


@hostile
async def the_doorways_port_taken_first(runtime: Runtime) -> None:
    """It listens before anything inside runs, and does not share its port: no other socket can take its place."""
    async with started(runtime, SPEC) as sandbox:
        assert sandbox.doorway is not None
        assert await script_output(sandbox, _SQUAT, str(sandbox.doorway.port)) == ""
        await sandbox.doorway.serve(app_answering("mine"))
        assert await script_output(sandbox, _SQUAT, str(sandbox.doorway.port)) == ""
        await answers_as(sandbox, "mine")


_LO_DOWN = """
import fcntl, socket, struct
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for flags in (0, 0x40):
    try:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH14s", b"lo", flags, b""))
        print("down")
    except OSError:
        pass
try:
    fcntl.ioctl(sock, 0x8916, struct.pack("16sHH4s8s", b"lo", socket.AF_INET, 0, bytes([10, 0, 0, 1]), b""))
    print("moved")
except OSError:
    pass
"""


@hostile
async def the_doorways_interface_taken_down(runtime: Runtime) -> None:
    """No process inside owns the network namespace: `lo` stays up, with its address."""
    async with open_door(runtime, "mine") as sandbox:
        assert await script_output(sandbox, _LO_DOWN) == ""
        await sandbox.exec(
            "ip link set lo down; ip addr flush dev lo; ip route add blackhole 127.0.0.0/8", timeout_s=10
        )
        await answers_as(sandbox, "mine")


_CROWD = """
import os, socket, sys, time
held = []
for n in range(240):
    try:
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", int(sys.argv[1])))
        held.append(sock)
    except OSError:
        break
for n in range(30):
    for sock in held[n % 2 :: 2]:
        try:
            sock.send((b"POST / HTTP/1.1\\r\\nx-slow: " if n < 2 else b"y"))
        except OSError:
            pass
    os.write(1, b".")
    time.sleep(1)
"""


@hostile
async def a_crowd_at_the_doorway(runtime: Runtime) -> None:
    """Connections are bounded per doorway, and so is the time a request may take to arrive: who holds all of its own
    costs the server a few descriptors, and the neighbours nothing."""
    async with open_door(runtime, "mine") as sandbox, open_door(runtime, "theirs") as neighbour:
        assert sandbox.doorway is not None
        (reader, writer), null = os.pipe(), os.open(os.devnull, os.O_RDWR)
        try:
            before = _open_descriptors()
            argv = ["python3", "-c", _CROWD, str(sandbox.doorway.port)]
            process = await sandbox.spawn(argv, fds={0: null, 1: writer, 2: null})
            async with asyncio.timeout(LONG_S):
                for _ in range(3):
                    assert await asyncio.to_thread(os.read, reader, 1) == b"."
            await answers_as(neighbour, "theirs")
            assert _open_descriptors() - before <= 40, "one sandbox's connections fill the server"
            process.kill()
            await process.wait()
            await _answers_again(sandbox, "mine")
        finally:
            for fd in (reader, writer, null):
                os.close(fd)


async def _answers_again(sandbox: Sandbox, owner: str) -> None:
    """Connections that the crowd left in the kernel's queue still count until the server has seen their end."""
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                return await answers_as(sandbox, owner)
            except AssertionError:
                await asyncio.sleep(0.05)


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


_ENDLESS = """
import select, socket, sys
head = {
    "body": b"POST / HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: 1000000000000\\r\\n\\r\\n",
    "chunks": b"POST / HTTP/1.1\\r\\nhost: x\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n",
    "header": b"GET / HTTP/1.1\\r\\nhost: x\\r\\nx-long: ",
    "headers": b"GET / HTTP/1.1\\r\\nhost: x\\r\\n",
}
piece = {"body": b"x" * 65536, "chunks": b"10000\\r\\n" + b"x" * 65536 + b"\\r\\n", "header": b"x" * 65536,
         "headers": b"".join(b"x-%d: y\\r\\n" % n for n in range(5000))}
for kind in head:
    sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20)
    sent = 0
    try:
        sock.sendall(head[kind])
        while sent < 256 << 20 and not select.select([sock], [], [], 0)[0]:
            sock.sendall(piece[kind])
            sent += len(piece[kind])
        if not sock.recv(12).startswith(b"HTTP/1.1 4"):
            print("it took", sent, "bytes of", kind)
    except ConnectionError:
        pass
    sock.close()
"""


@hostile
async def requests_that_never_end(runtime: Runtime) -> None:
    """Bodies and headers are bounded while they come, whatever length they claim: none is ever held whole."""
    async with open_door(runtime, "mine") as sandbox, open_door(runtime, "theirs") as neighbour:
        assert sandbox.doorway is not None
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        endless = asyncio.ensure_future(script_output(sandbox, _ENDLESS, str(sandbox.doorway.port), timeout_s=LONG_S))
        try:
            await answers_as(neighbour, "theirs")
            taken = await endless
            assert taken == "", taken
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # in KiB
        finally:
            endless.cancel()
            with contextlib.suppress(asyncio.CancelledError, AssertionError):
                await endless
        await answers_as(sandbox, "mine")
