"""The service's end of a message socket, and pipes, on the event loop (asyncio or uvloop).

Nothing here blocks, polls or uses a thread. Descriptors are plain numbers, which these objects own from their creation
to `close()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollyard.sandbox.launcher.kernel import receive, send

Message = dict[str, Any]

MAX_WAITING = 4096
"""Messages that may wait for a full socket; beyond it, the launcher does not respond, and the call fails."""

_READ_BYTES = 256 << 10


class MessageSocket:
    """Sends messages in order, and passes each received one to `on_message`, which then owns its descriptors.

    `on_message(None, [])` is called once, when the other end has closed.
    """

    def __init__(self, sock: socket.socket, on_message: Callable[[Message | None, list[int]], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._waiting: deque[tuple[Mapping[str, Any], list[int]]] = deque()
        self._is_open = True
        self._loop.add_reader(sock.fileno(), self.drain)

    def post(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Sends a message without blocking. The caller may close its descriptors at once. Does nothing if the other end
        has closed."""
        if not self._is_open:
            return
        if not self._waiting:
            try:
                send(self._sock, message, fds)
                return
            except (BrokenPipeError, ConnectionResetError):
                return  # the reader reports it
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._flush)
        if len(self._waiting) >= MAX_WAITING:
            raise OSError(f"{MAX_WAITING} messages wait for the launcher")
        self._waiting.append((message, [os.dup(fd) for fd in fds]))

    def _flush(self) -> None:
        while self._waiting:
            message, fds = self._waiting[0]
            try:
                send(self._sock, message, fds)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                pass
            self._waiting.popleft()
            close_all(fds)
        self._loop.remove_writer(self._sock.fileno())

    def drain(self) -> None:
        """Passes all received messages to `on_message`."""
        while self._is_open:
            try:
                message, fds = receive(self._sock)
            except BlockingIOError:
                return
            except ConnectionResetError:
                message, fds = None, []
            if message is None:
                self.close()
            self._on_message(message, fds)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fds in self._waiting:
            close_all(fds)
        self._waiting.clear()


class PipeReader:
    """Reads a pipe to its end, keeps the first `limit_bytes`, and counts and discards the rest unread."""

    def __init__(self, limit_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = limit_bytes
        self.data = bytearray()
        self.dropped_bytes = 0
        self._fd, self.writer = os.pipe2(os.O_CLOEXEC)  # `writer` is for the other side; `started()` closes it
        os.set_blocking(self._fd, False)
        self._null = -1
        self._at_end: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._fd, self._read)

    def started(self) -> None:
        """Closes `writer`: the other side has its own copy."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def _read(self) -> bool:
        """Reads once. Returns False if there is no data now, or at the end."""
        room = self._limit - len(self.data)
        try:
            if room > 0:
                chunk = os.read(self._fd, min(room, _READ_BYTES))
                self.data += chunk
                count = len(chunk)
            else:
                if self._null < 0:
                    self._null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                count = os.splice(self._fd, self._null, 1 << 20, flags=os.SPLICE_F_NONBLOCK)  # discards without copying
                self.dropped_bytes += count
        except BlockingIOError:
            return False
        if count == 0:
            self._loop.remove_reader(self._fd)
            if not self._at_end.done():
                self._at_end.set_result(None)
        return count > 0

    async def end(self) -> None:
        await self._at_end

    def finish(self) -> None:
        """Reads only the data available now: a process left behind may hold the pipe open for ever."""
        if self._fd >= 0 and not self._at_end.done():
            for _ in range(64):  # a pipe holds 64 kB; more data is not from the command, which has ended
                if not self._read():
                    break
        self.close()

    def close(self) -> None:
        self.started()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._null >= 0:
            os.close(self._null)
            self._null = -1
        self._at_end.cancel()


class PipeWriter:
    """Writes bytes into a pipe and closes it; stops early if the reader closes its end."""

    def __init__(self, data: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self._unsent = memoryview(data)
        self.reader, self._fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
        self._write()
        if self._fd >= 0:
            self._loop.add_writer(self._fd, self._write)

    def started(self) -> None:
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1

    def _write(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._fd, self._unsent[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass
        self._stop()

    def _stop(self) -> None:
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        self.started()
        self._stop()


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


async def readable(fd: int) -> None:
    """Waits until `fd` (for example a pidfd) is readable. The caller sets a timeout."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(fd, ready)
    try:
        await future
    finally:
        loop.remove_reader(fd)


async def end_process(process: subprocess.Popen[bytes], bound_s: float) -> None:
    """Waits for a helper program, whose socket is closed, to end by itself; kills it after `bound_s`."""
    pidfd = os.pidfd_open(process.pid)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                await readable(pidfd)
        process.kill()
        process.wait()
    finally:
        os.close(pidfd)
