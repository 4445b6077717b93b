"""The host's side of one Python process in a sandbox: sends requests to it, and reads its output and replies.

There are three pipes: requests, output (descriptors 1 and 2) and replies. An answer is complete when the reply of the
awaited number has arrived *and* the output has been drained. Everything from the process is untrusted: code in it can
write any reply. So replies are numbered, short and counted; one that is not awaited is dropped. A flood of replies, the
end of the pipe or the end of the process means that the process is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping

from rollyard.sandbox.base import Process
from rollyard.tools._output import Output
from rollyard.tools._shell_process import DRAIN_BYTES, DRAIN_READS, FLOOD_BYTES, FLOOD_PAUSE_S

REQUESTS, REPLIES = 60, 61
"""The descriptors that it starts with; it moves them to high numbers."""

REPLY_BYTES = 64 << 10
"""The most that is accepted on the reply pipe between two cells. A regular reply has some twenty bytes."""

WORD_BYTES = 100
READ_BYTES = 64 << 10


class PythonProcess:
    def __init__(self, output: Output) -> None:
        self._loop = asyncio.get_running_loop()
        self._output = output
        self._own_fds: dict[str, int] = {}
        self._child_fds: dict[int, int] = {}
        try:
            self._child_fds[0] = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            self._child_fds[REQUESTS], self._own_fds["requests"] = os.pipe2(os.O_CLOEXEC)
            self._own_fds["replies"], self._child_fds[REPLIES] = os.pipe2(os.O_CLOEXEC)
            self._own_fds["output"], self._child_fds[1] = os.pipe2(os.O_CLOEXEC)
            for fd in self._own_fds.values():
                os.set_blocking(fd, False)
        except OSError:
            self._close_pipes()
            raise
        self._replied = bytearray()
        self._reply_bytes = 0
        self._awaited = -1
        self._answer: asyncio.Future[str | None] | None = None
        self._process: Process | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._pause: asyncio.TimerHandle | None = None
        self.status: int | None = None  # set when it has ended
        self.is_lost = False
        self._loop.add_reader(self._own_fds["replies"], self._read_replies)
        self._loop.add_reader(self._own_fds["output"], self._read_output)

    @property
    def fds(self) -> Mapping[int, int]:
        """The process's descriptors, for `Sandbox.spawn`."""
        return {**self._child_fds, 2: self._child_fds[1]}

    def started(self, process: Process) -> None:
        self._process = process
        self._close_child_fds()
        self._waiting = self._loop.create_task(self._wait(process))

    def expect(self, number: int) -> asyncio.Future[str | None]:
        """Returns a future of the reply of that number, or of None if the process is lost."""
        self._awaited, self._reply_bytes = number, 0
        self._answer = self._loop.create_future()
        if self.is_lost:
            self._answer.set_result(None)
        return self._answer

    def ask(self, number: int, size_bytes: int) -> asyncio.Future[str | None]:
        answer = self.expect(number)
        if not self.is_lost:
            try:
                os.write(self._own_fds["requests"], b"%d %d\n" % (number, size_bytes))
            except OSError:  # it has closed its side, or has not read for thousands of cells
                self._lose()
        return answer

    def interrupt(self) -> None:
        if self._process is not None:
            self._process.kill(signal.SIGINT)

    # --- its output ---

    def _read_replies(self) -> None:
        try:
            data = os.read(self._own_fds["replies"], READ_BYTES)
        except BlockingIOError:
            return
        self._reply_bytes += len(data)
        if not data or self._reply_bytes > REPLY_BYTES:
            self._lose()
            return
        self._replied += data
        *lines, self._replied = self._replied.split(b"\n")
        for line in lines:
            number, _, word = bytes(line).partition(b" ")
            if number == b"%d" % self._awaited:  # any other is stale or forged
                self._settle(word[:WORD_BYTES].decode("utf-8", "replace"))

    async def _wait(self, process: Process) -> None:
        """Waits for the process itself: a child of it may keep the pipe open."""
        self.status = await process.wait()
        self._lose()

    def _lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            if "replies" in self._own_fds:
                self._loop.remove_reader(self._own_fds["replies"])
        self._settle(None)

    def _settle(self, answer: str | None) -> None:
        if self._answer is not None and not self._answer.done():
            enough = self._output.total_bytes + DRAIN_BYTES
            for _ in range(DRAIN_READS):  # what was written before the reply is in the pipe by now
                if not self._read_some() or self._output.total_bytes >= enough:
                    break
            self._answer.set_result(answer)

    def _read_some(self) -> bool:
        if "output" not in self._own_fds:
            return False
        try:
            data = os.read(self._own_fds["output"], READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._own_fds["output"])
            return False
        self._output.feed(data)
        return True

    def _read_output(self) -> None:
        self._read_some()
        if self._output.total_bytes > FLOOD_BYTES:
            self._loop.remove_reader(self._own_fds["output"])
            self._pause = self._loop.call_later(FLOOD_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if "output" in self._own_fds:
            self._loop.add_reader(self._own_fds["output"], self._read_output)

    # --- its end ---

    async def ended(self, within_s: float) -> int | None:
        """Returns its exit status, or None if it does not end within that time."""
        if self._waiting is not None:
            await asyncio.wait([self._waiting], timeout=within_s)
        return self.status

    async def close(self) -> None:
        """Kills it, if it still runs. Its output so far is kept."""
        self.is_lost = True
        if self._pause is not None:
            self._pause.cancel()
        for name in ("replies", "output"):
            if name in self._own_fds:
                self._loop.remove_reader(self._own_fds[name])
        self._close_pipes()
        if self._process is not None:
            self._process.kill()
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.wait([self._waiting])
        self._settle(None)

    def _close_child_fds(self) -> None:
        while self._child_fds:
            os.close(self._child_fds.popitem()[1])

    def _close_pipes(self) -> None:
        self._close_child_fds()
        while self._own_fds:
            with contextlib.suppress(OSError):
                os.close(self._own_fds.popitem()[1])
