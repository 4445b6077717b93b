"""Connects the user's terminal to a shell in a sandbox.

The sandbox gets its own PTY, never the user's terminal. Bytes and the window size are copied between the two. The
user's terminal settings are always restored.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollyard.sandbox.base import Sandbox

CHUNK = 65_536
SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash -i; exec sh -i")
SCRIPT = ("sh", "-c", "command -v bash >/dev/null && exec bash -s; exec sh -s")


async def interact(sandbox: Sandbox) -> int:
    """Runs an interactive shell on this terminal; returns its exit status."""
    here = sys.stdin.fileno()
    master, slave = os.openpty()
    try:
        _copy_size(here, master)
        env = {"TERM": os.environ.get("TERM", "xterm")}
        try:
            process = await sandbox.spawn(SHELL, fds={0: slave, 1: slave, 2: slave}, tty=slave, env=env)
        finally:
            os.close(slave)
        with _raw(here), _Bridge(here, sys.stdout.fileno(), master) as bridge:
            status = await process.wait()
            bridge.drain()
        return status
    finally:
        os.close(master)


async def pipe(sandbox: Sandbox) -> int:
    """Runs the lines of stdin as commands of one shell; returns the status of the last."""
    sys.stdout.flush()
    process = await sandbox.spawn(SCRIPT, fds={0: sys.stdin.fileno(), 1: sys.stdout.fileno(), 2: sys.stderr.fileno()})
    return await process.wait()


class _Bridge:
    """Copies bytes in both directions while the context is open. Neither direction waits for the other."""

    def __init__(self, source: int, sink: int, master: int) -> None:
        self._source, self._sink, self._master = source, sink, master
        self._pending = bytearray()  # typed, but not yet written to the PTY
        self._is_source_open = True
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> _Bridge:
        os.set_blocking(self._master, False)
        self._loop.add_reader(self._source, self._copy_input)
        self._loop.add_reader(self._master, self._copy_output)
        self._loop.add_signal_handler(signal.SIGWINCH, _copy_size, self._source, self._master)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._source)
        self._loop.remove_reader(self._master)
        self._loop.remove_writer(self._master)
        self._loop.remove_signal_handler(signal.SIGWINCH)

    def drain(self) -> None:
        """Copies the output that the shell wrote before its end was noticed."""
        while self._copy_output():
            pass

    def _copy_input(self) -> None:
        data = os.read(self._source, CHUNK)
        if not data:  # the terminal was closed
            self._is_source_open = False
            self._loop.remove_reader(self._source)
            data = b"\x04"
        self._pending += data
        if len(self._pending) >= CHUNK:
            self._loop.remove_reader(self._source)
        self._send()

    def _send(self) -> None:
        try:
            while self._pending:
                del self._pending[: os.write(self._master, self._pending)]
        except BlockingIOError:
            self._loop.add_writer(self._master, self._send)
            return
        except OSError:  # the shell has ended; the input is discarded
            self._pending.clear()
        self._loop.remove_writer(self._master)
        if self._is_source_open:
            self._loop.add_reader(self._source, self._copy_input)

    def _copy_output(self) -> bool:
        try:
            data = os.read(self._master, CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # EIO: every process has closed its side
            data = b""
        if not data:
            self._loop.remove_reader(self._master)
            return False
        while data:
            data = data[os.write(self._sink, data) :]
        return True


@contextmanager
def _raw(terminal: int) -> Iterator[None]:
    before = termios.tcgetattr(terminal)
    tty.setraw(terminal, termios.TCSADRAIN)  # the default discards typed-ahead input
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _copy_size(source: int, target: int) -> None:
    with suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)
