"""Locks between processes (flock). The kernel releases them when their process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self


class FileLock:
    """A lock on a file, which is created, or on an existing folder. `close` releases it.

    A lock file is never deleted: otherwise two processes could hold the same lock.
    """

    def __init__(self, path: Path, *, is_folder: bool = False) -> None:
        how = os.O_RDONLY | os.O_DIRECTORY if is_folder else os.O_RDWR | os.O_CREAT
        self.fd = os.open(path, how | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def acquire(self, *, shared: bool = False) -> None:
        """Blocks until no other process holds the lock."""
        fcntl.flock(self.fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    def try_acquire(self, *, shared: bool = False) -> bool:
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the latter from some network file systems
            return False
        return True

    def write_holder(self) -> None:
        """Writes this process into the lock file, for those that wait."""
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def holder(self) -> str:
        """The process that last called `write_holder`."""
        return os.pread(self.fd, 300, 0).decode(errors="replace").strip() or "an unknown process"

    def close(self) -> None:
        """Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def is_abandoned(folder: Path, *, older_than_s: float) -> bool:
    """Whether no process holds the folder's lock. A folder that changed since `older_than_s` ago does not count: a new
    one is not locked at once."""
    try:
        if time.time() - folder.stat().st_mtime < older_than_s:
            return False
        with FileLock(folder, is_folder=True) as lock:
            return lock.try_acquire()
    except OSError:
        return False


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Generator[None, None, None]:
    """Holds the exclusive lock on `path`. If it has to wait, it calls `on_wait` first. Blocking."""
    with FileLock(path) as lock:
        if not lock.try_acquire():
            on_wait()
            lock.acquire()
        yield
