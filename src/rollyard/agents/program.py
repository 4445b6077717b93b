"""Runs a program in a sandbox from its start to its end, and keeps its output.

Invariants. The head and the tail of its output (standard output and error, interleaved) are kept, and the rest is
counted; a flood of output slows down the program, not the service. After `end` the program is dead, and so is its
process group if `end` killed it. Processes that it left behind, or started outside that group, can no longer reach a
model and are killed with the sandbox, right after RUN.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from rollyard.core.failure import SandboxLost
from rollyard.sandbox.base import Process, Sandbox
from rollyard.tools._output import Output

OUTPUT_BYTES = 64 << 10
CHUNK_BYTES = 64 << 10
FULL_PAUSE_S = 0.02
"""The pause after a full read: it limits a flood to 3 MB a second, so that it cannot occupy the event loop."""

DRAIN_CHUNKS = 4
"""The most that is read after the program has ended: a pipe holds one chunk, and a process that it left behind may keep
writing."""

SANDBOX_END_S = 2.0
"""The time to wait for the sandbox's end after the program was killed: both may have been killed together, and a busy
machine reports the end of the sandbox later."""

END_S = 10.0
"""The time from SIGKILL to the program's end. After that it hangs in the kernel, and the sandbox's end reports it."""


class Program:
    """One program in a sandbox. Call `start`, then optionally `wait`, and always `end`."""

    def __init__(self, sandbox: Sandbox, beat: Callable[[], None]) -> None:
        self._sandbox = sandbox
        self._beat = beat
        self._output = Output(OUTPUT_BYTES)
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._out = -1
        self._started_at = time.monotonic()
        self.status: int | None = None  # None: it was killed, or has not started

    @property
    def duration_s(self) -> float:
        return time.monotonic() - self._started_at

    def output(self) -> tuple[str, int]:
        """Returns its output, and the number of bytes that are missing in the middle."""
        return self._output.text()

    def last_lines(self, most_bytes: int = 2000) -> str:
        return self.output()[0].strip()[-most_bytes:]

    async def start(self, argv: Sequence[str], *, cwd: str, env: Mapping[str, str], stdin: bytes) -> None:
        self._started_at = time.monotonic()
        self._out, inside = os.pipe2(os.O_CLOEXEC)
        source = -1
        try:
            os.set_blocking(self._out, False)
            source = _source(stdin)
            self._process = await self._sandbox.spawn(argv, fds={0: source, 1: inside, 2: inside}, cwd=cwd, env=env)
        finally:
            os.close(inside)
            if source >= 0:
                os.close(source)
        self._reading = asyncio.create_task(self._read(), name="an agent program's output")

    async def wait(self) -> int:
        """Waits for its end and returns its exit status. If the sandbox ended, raises what ended it."""
        assert self._process is not None
        self.status = await self._process.wait()
        if self.status == -signal.SIGKILL and self._sandbox.end is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SANDBOX_END_S):
                    await self._sandbox.ended()
        if self._sandbox.end is not None:
            self.status = None
            await self._sandbox.exec(["true"], timeout_s=END_S)  # raises what ended the sandbox
            raise SandboxLost("the sandbox ended while its program ran")
        return self.status

    async def end(self) -> None:
        """Kills the program if it still runs, and reads the rest of its output."""
        try:
            if self._process is not None:
                self._process.kill()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(END_S):
                        await self._process.wait()
            if self._reading is not None:
                self._reading.cancel()
                await asyncio.wait([self._reading])
            for _ in range(DRAIN_CHUNKS):
                if self._out < 0 or not self._take():
                    break
        finally:
            self._close()

    def _close(self) -> None:
        """Releases the pipe, even if a second cancellation interrupts `end`."""
        if self._reading is not None:
            self._reading.cancel()
        if self._out >= 0:
            asyncio.get_running_loop().remove_reader(self._out)
            os.close(self._out)
            self._out = -1

    async def _read(self) -> None:
        loop, out = asyncio.get_running_loop(), self._out
        while True:
            ready = loop.create_future()
            loop.add_reader(out, lambda ready=ready: ready.done() or ready.set_result(None))
            try:
                await ready
            finally:
                if self._out == out:  # else it is closed, and its number may be in use again
                    loop.remove_reader(out)
            took = self._take()
            if took == 0:
                return
            self._beat()
            if took == CHUNK_BYTES:
                await asyncio.sleep(FULL_PAUSE_S)

    def _take(self) -> int:
        """Reads available output. Returns the number of bytes; 0 at the end or if there is none."""
        try:
            data = os.read(self._out, CHUNK_BYTES)
        except BlockingIOError:
            return 0
        self._output.feed(data)
        return len(data)


def _source(stdin: bytes) -> int:
    """Returns a descriptor from which these bytes can be read."""
    if not stdin:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        view = memoryview(stdin)
        while view:
            view = view[os.write(fd, view) :]
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # at offset 0, and read-only
    finally:
        os.close(fd)
