"""The host's end of a pseudo-terminal: its settings, signals to the foreground group, and whether it waits for input.

No signal is sent to a pid number: TIOCSIG addresses the terminal's foreground group, and KILL uses a pidfd.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import signal
import struct
import termios
from pathlib import Path

TIOCSIG = 0x40045436
PIDFD_SIGNAL_PROCESS_GROUP = 4  # Linux 6.9
ROWS, COLUMNS = 50, 120

_READ, _SELECT, _POLL = {
    "x86_64": ({0}, {23, 270}, {7, 271}),
    "aarch64": ({63}, {72}, {73}),
    "riscv64": ({63}, {72}, {73}),
}.get(platform.machine(), (set[int](), set[int](), set[int]()))


class Terminal:
    """A pseudo-terminal. `slave` is for the child and closed by `started()`; `master` stays open until `close()`."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        self._settings = termios.tcgetattr(self.slave)
        self._settings[1] &= ~termios.OPOST
        self._settings[3] &= ~(termios.ECHO | termios.ECHONL)
        termios.tcsetattr(self.slave, termios.TCSANOW, self._settings)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.set_blocking(self.master, False)

    def started(self) -> None:
        if self.slave >= 0:
            os.close(self.slave)
            self.slave = -1

    def close(self) -> None:
        self.started()
        if self.master >= 0:
            os.close(self.master)
            self.master = -1

    def restore(self) -> None:
        """Restores the original settings, and discards input that was not read."""
        termios.tcsetattr(self.master, termios.TCSANOW, self._settings)
        termios.tcflush(self.master, termios.TCOFLUSH)  # the master's output is the programs' input

    def interrupt(self, signum: signal.Signals) -> None:
        """Sends SIGINT or SIGQUIT to the foreground group; works in raw mode and across namespaces."""
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.master, TIOCSIG, int(signum))

    def foreground(self) -> int:
        """Returns the foreground group's number in the host's pid namespace; 0 if there is none."""
        with contextlib.suppress(OSError):
            return struct.unpack("i", fcntl.ioctl(self.master, termios.TIOCGPGRP, bytes(4)))[0]
        return 0

    def kill_foreground(self, spare: int) -> None:
        """Sends SIGKILL to the foreground group, unless that is `spare` (the shell, which is killed elsewhere)."""
        group = self.foreground()
        if group in (0, spare):
            return
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(group)
            try:
                if self.foreground() != group:  # the number may be in use again
                    return
                try:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL, None, PIDFD_SIGNAL_PROCESS_GROUP)
                except OSError:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)

    def reader(self, shell: int) -> int | None:
        """Returns the pid of a foreground process that is blocked reading the terminal, if there is one."""
        group = self.foreground()
        for pid in _tree(shell):
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{pid}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[2]) != group:
                        continue
                if _reads_tty(pid):
                    return pid
        return None


def stdin_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/fd/0").readlink())
    return ""


def _reads_tty(pid: int) -> bool:
    with open(f"/proc/{pid}/syscall") as file:
        words = file.read().split()
    number, first = int(words[0]), int(words[1], 16)
    if number in _SELECT and first == 1:  # select on descriptor 0 alone, as readline does
        first = 0
    elif number in _POLL and int(words[2], 16) == 1 and _has_no_timeout(number, words[3]):
        first = _polled(pid, first)  # one descriptor alone, as busybox's `read` and `vi` do
    elif number not in _READ:
        return False
    return str(Path(f"/proc/{pid}/fd/{first}").readlink()).startswith(("/dev/pts/", "/dev/tty"))


def _has_no_timeout(number: int, timeout: str) -> bool:
    """Whether the call has no timeout: −1 for poll, a null pointer for ppoll."""
    return int(timeout, 16) & 0xFFFFFFFF == 0xFFFFFFFF if number == 7 else int(timeout, 16) == 0


def _polled(pid: int, address: int) -> int:
    """Returns the descriptor of the first `struct pollfd` at that address."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return struct.unpack("i", memory.read(4))[0]


def _tree(root: int, limit: int = 256) -> list[int]:
    """Returns the process and its descendants, breadth first."""
    pids = [root]
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
            pids += [int(child) for child in file.read().split()]
        if len(pids) > limit:
            break
    return pids
