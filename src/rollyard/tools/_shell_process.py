"""One shell process on a pseudo-terminal: writes command lines to it and reads its status.

An answer is a record on a separate pipe: number, status, directory. It is complete when the record of the awaited
number has arrived *and* the terminal has been drained: the kernel delivers what was written before. bash also sends a
record of the number alone when it has read its line: on a starved machine that may take a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass

from rollyard.sandbox.base import Process
from rollyard.tools._output import Output
from rollyard.tools._terminal import Terminal

FLOOD_BYTES = 8 << 20
FLOOD_PAUSE_S = 0.005
"""A command that has written more than FLOOD_BYTES is read with pauses, so that it does not slow down others."""

DRAIN_READS, DRAIN_BYTES = 64, 128 << 10
"""A terminal holds 64 kB, read at least 4 kB at a time: what comes after twice that was not written before the status.
Without a bound, a program that writes as fast as the host reads occupies the event loop (measured: 43 MB, 0.18 s)."""

STATUS_BYTES = 64 << 10
"""The most that is accepted on the status pipe between two commands. A regular record is a path and two numbers."""

MAX_CWD = 4096  # PATH_MAX; $PWD can be set to anything


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one kind of shell is started, and how it reports its status."""

    argv: tuple[str, ...]
    status_fd: int
    line: str
    go_fd: int | None = None  # where it waits, after its record, until the terminal has been restored

    def typed(self, number: int, path: str) -> bytes:
        return self.line.format(n=number, path=path).encode() + b"\n"


BASH = Dialect(
    ("bash", "--noprofile", "--norc", "--noediting", "-i"),
    60,
    """PROMPT_COMMAND='builtin printf "%s %s %s\\0" {n} "$?" "$PWD" >&60; PS1= PS2='; builtin printf "%s\\0" {n} >&60"""
    """; builtin eval "$(<'{path}')" 60>&- </dev/tty >/dev/tty 2>&1""",
)

# dash and busybox have no PROMPT_COMMAND, but expand their prompt; their descriptors end at 9. The prompt is set twice:
# before, for a command that is interrupted or cannot be parsed, since the rest of its line is then not run; and after,
# with the status in it, for one that changed the prompt (a virtual environment's `deactivate` does). The shell waits
# for a line from the host, since busybox edits, and echoes, the line that it reads if a command left the terminal raw.
_PROMPT = """PS1='$(command printf "%s %s %s\\0" {{n}} {status} "$PWD" >&9; command read -r go <&8)' PS2="""
SH = Dialect(
    ("sh", "-i"),
    9,
    _PROMPT.format(status='"$?"')
    + """; eval "$(PATH=/usr/bin:/bin command cat '{path}')" 8<&- 9>&- </dev/tty >/dev/tty 2>&1; """
    + _PROMPT.format(status="'$?'"),
    go_fd=8,
)


class ShellProcess:
    """One shell process with its terminal and its status pipe."""

    def __init__(self, output: Output, dialect: Dialect = BASH) -> None:
        self._loop = asyncio.get_running_loop()
        self._output = output
        self._dialect = dialect
        self._status = self.status_writer = self._go = self._go_reader = -1
        self.terminal = Terminal()
        try:
            self._status, self.status_writer = os.pipe2(os.O_CLOEXEC)
            if dialect.go_fd is not None:
                self._go_reader, self._go = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(self._go, False)
        except OSError:
            self._close_pipes()
            self.terminal.close()
            raise
        os.set_blocking(self._status, False)
        self._records = bytearray()
        self._status_bytes = 0
        self._awaited = -1
        self.has_read_line = False  # the shell has read the last line
        self._answer: asyncio.Future[tuple[int, str] | None] | None = None
        self.process: Process | None = None
        self.is_dead = False
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._status, self.read_status)
        self._loop.add_reader(self.terminal.master, self._read_output)

    @property
    def fds(self) -> dict[int, int]:
        """The shell's descriptors, for `Sandbox.spawn`."""
        slave, go_fd = self.terminal.slave, self._dialect.go_fd
        fds = {0: slave, 1: slave, 2: slave, self._dialect.status_fd: self.status_writer}
        return fds if go_fd is None else {**fds, go_fd: self._go_reader}

    def started(self, process: Process) -> None:
        self.process = process
        self.terminal.started()
        os.close(self.status_writer)
        self.status_writer = -1
        if self._go_reader >= 0:
            os.close(self._go_reader)
            self._go_reader = -1

    def ask(self, number: int, line: bytes) -> asyncio.Future[tuple[int, str] | None]:
        """Writes the line. The future is the numbered answer (status, cwd), or None if the shell dies."""
        self._awaited = number
        self.has_read_line = False
        self._status_bytes = 0
        self._answer = self._loop.create_future()
        if self.is_dead:
            self._answer.set_result(None)
            return self._answer
        with contextlib.suppress(OSError):  # it just died: the status pipe reports it
            self.terminal.restore()
            os.write(self.terminal.master, line)
        return self._answer

    def read_status(self) -> None:
        try:
            data = os.read(self._status, 65536)
        except BlockingIOError:
            return
        self._status_bytes += len(data)
        if not data or self._status_bytes > STATUS_BYTES:  # its end, or a flood: the shell is lost
            self._loop.remove_reader(self._status)
            self.is_dead = True
            self._settle(None)
            return
        self._records += data
        if 0 not in data:
            return
        *records, self._records = self._records.split(b"\0")
        answers = [record for record in records if b" " in record]
        if answers and self._go >= 0:
            with contextlib.suppress(OSError):  # full: a program forged many records
                self.terminal.restore()
                os.write(self._go, b"\n" * len(answers))
        awaited = str(self._awaited).encode()
        self.has_read_line = self.has_read_line or awaited in records
        for record in answers:
            number, _, remainder = bytes(record).partition(b" ")
            if number == awaited:  # any other is stale or forged
                status, _, cwd = remainder.partition(b" ")
                if status.isdigit() and len(status) <= 3:
                    self._settle((int(status), cwd[:MAX_CWD].decode("utf-8", "replace")))

    def _settle(self, answer: tuple[int, str] | None) -> None:
        if self._answer is not None and not self._answer.done():
            enough = self._output.total_bytes + DRAIN_BYTES
            for _ in range(DRAIN_READS):  # what was written before the status is in the terminal by now
                if not self._read_some() or self._output.total_bytes >= enough:
                    break
            self._answer.set_result(answer)

    def _read_some(self) -> bool:
        try:
            data = os.read(self.terminal.master, 65536)
        except BlockingIOError:
            return False
        except OSError:  # EIO: no process has the other side open
            data = b""
        if not data:
            self._loop.remove_reader(self.terminal.master)
            return False
        self._output.feed(data)
        return True

    def _read_output(self) -> None:
        for _ in range(16):  # a terminal returns at most 4 kB at a time
            if not self._read_some():
                return
        if self._output.total_bytes > FLOOD_BYTES:
            self._loop.remove_reader(self.terminal.master)
            self._pause = self._loop.call_later(FLOOD_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if self.terminal.master >= 0:
            self._loop.add_reader(self.terminal.master, self._read_output)

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        if self.process is not None:
            self.process.kill()
        if self._status >= 0:
            self._loop.remove_reader(self._status)
        if self.terminal.master >= 0:
            self._loop.remove_reader(self.terminal.master)
        self.terminal.close()
        self._close_pipes()
        self.is_dead = True

    def _close_pipes(self) -> None:
        for fd in (self._status, self.status_writer, self._go, self._go_reader):
            if fd >= 0:
                os.close(fd)
        self._status = self.status_writer = self._go = self._go_reader = -1
