"""Measures a sandbox's disk use in bytes and files: everything below its folders, and deleted files that are still
open. Bytes are allocated blocks; every inode counts as a file, so folders and links are files too.

A walk is done in slices: `DiskWalk.continue_until` runs until a given time and continues from there at the next call,
so that a million files delay the resource monitor no more at once than ten. It ends early once a limit is exceeded.

Invariants. No link is followed and no name resolved twice: each step opens one name in an open folder, so that a
concurrent rename or replacement cannot redirect the walk. The upper folders stay open, so that a rename below cannot
lose them; deeper than `MAX_OPEN`, the walk returns by "..", checked by inode, so that depth costs no descriptors. A
file with several names counts once; holes and vanished files do not count. A folder whose mode denies its owner access
is walked all the same, and its mode is restored afterwards.

A deleted file that is held only by a mapping is not counted.
"""

# ruff: noqa: PTH101, PTH116, PTH208

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
from collections.abc import Callable, Generator, Sequence

BLOCK = 512  # the unit of st_blocks, whatever the file system's block size
MAX_REMEMBERED = 1_000_000
"""Folders still to visit, plus files with several names. Beyond it, the tree is an attack and counts as over its
limit."""

MAX_OPEN = 32
MAX_FORBIDDEN = 256  # on one path: these must stay open at any depth; more of them are an attack as well

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_Key = tuple[int, int]
Tree = Callable[[], list[int]]


class DiskWalk:
    """One walk. `used_bytes` and `used_files` are complete once `is_done`, unless `over` ended it early."""

    def __init__(
        self,
        folders: Sequence[str],
        most_bytes: float,
        tree: Tree,
        not_disk: Callable[[int], set[int]],
        most_files: float = math.inf,
    ) -> None:
        """`tree` returns the sandbox's processes, `not_disk(pid)` the devices visible to a process that are memory."""
        self._most_bytes, self._most_files = most_bytes, most_files
        self._tree, self._not_disk = tree, not_disk
        self.used_bytes = self.used_files = 0
        self.is_done = False
        self.over = ""  # the limit that is exceeded: "disk" or "files"
        self._remembered = self._forbidden_count = 0
        self._linked: set[_Key] = set()
        self._steps = self._all(folders)

    def continue_until(self, until: float) -> None:
        """Runs until that time of `time.monotonic`, or to the end."""
        while not self.is_done:
            for _ in range(64):  # entries between two reads of the clock
                is_attack = self._remembered > MAX_REMEMBERED or self._forbidden_count > MAX_FORBIDDEN
                if is_attack or self.used_bytes > self._most_bytes:
                    self.over, self.is_done = "disk", True
                elif self.used_files > self._most_files:
                    self.over, self.is_done = "files", True
                elif next(self._steps, True):
                    self.is_done = True
                if self.is_done:
                    self._steps.close()
                    return
            if time.monotonic() >= until:
                return

    def stop(self) -> None:
        self._steps.close()

    def _all(self, folders: Sequence[str]) -> Generator[None, None, None]:
        for folder in folders:
            yield from self._below(folder)
        yield from self._deleted()

    def _below(self, folder: str) -> Generator[None, None, None]:
        if (here := WalkedFolder.opened(folder, None)) is None:
            return
        above: list[WalkedFolder] = []
        try:
            yield from self._list(here)
            while True:
                if here.waiting:
                    inner = WalkedFolder.opened(here.waiting.pop(), here.fd)
                    self._remembered -= 1
                    if inner is not None:
                        if len(above) >= MAX_OPEN and here.forbidden is None:
                            here.close()
                        above.append(here)
                        self._forbidden_count += here.forbidden is not None
                        here = inner
                        yield from self._list(here)
                elif above:
                    outer = above.pop()
                    self._forbidden_count -= outer.forbidden is not None
                    if outer.fd < 0:
                        outer.reopen(here.fd)
                    here.close()
                    while outer.fd < 0:  # moved meanwhile: continue with the last one that is still open
                        self._remembered -= len(outer.waiting)
                        outer = above.pop()
                        self._forbidden_count -= outer.forbidden is not None
                    here = outer
                else:
                    return
                yield
        finally:
            for level in (here, *above):
                level.close()

    def _list(self, here: WalkedFolder) -> Generator[None, None, None]:
        """Counts `here` and its direct entries, and queues its folders."""
        try:
            self._count(os.fstat(here.fd))
            with os.scandir(here.fd) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        here.waiting.append(entry.name)
                        self._remembered += 1
                    else:
                        with contextlib.suppress(OSError):
                            self._count(entry.stat(follow_symlinks=False))
                    yield
        except OSError:
            return  # removed meanwhile

    def _count(self, file_stat: os.stat_result) -> None:
        if file_stat.st_nlink > 1 and not stat.S_ISDIR(file_stat.st_mode):
            if _key(file_stat) in self._linked:
                return
            self._linked.add(_key(file_stat))
            self._remembered += 1
        self.used_bytes += file_stat.st_blocks * BLOCK
        self.used_files += 1

    def _deleted(self) -> Generator[None, None, None]:
        """Counts deleted files that a process still holds open."""
        counted: set[_Key] = set()
        for pid in self._tree():
            try:
                names = os.listdir(f"/proc/{pid}/fd")
            except OSError:
                continue
            memory: set[int] | None = None
            for name in names:
                try:
                    file_stat = os.stat(f"/proc/{pid}/fd/{name}")
                except OSError:
                    continue
                if stat.S_ISREG(file_stat.st_mode) and file_stat.st_nlink == 0 and _key(file_stat) not in counted:
                    memory = self._not_disk(pid) if memory is None else memory
                    counted.add(_key(file_stat))
                    if file_stat.st_dev not in memory:
                        self.used_bytes += file_stat.st_blocks * BLOCK
                        self.used_files += 1
                yield


NEEDED = stat.S_IRUSR | stat.S_IXUSR  # to list a folder


class WalkedFolder:
    """A folder on the current path: its descriptor (-1: closed meanwhile), and its folders that are still to visit.

    `forbidden` is its original mode, if that denied the owner, the current user, access. `close` restores it,
    unless the mode was changed meanwhile.
    """

    def __init__(self, fd: int, file_stat: os.stat_result, forbidden: int | None) -> None:
        self.fd, self.key, self.forbidden = fd, _key(file_stat), forbidden
        self.waiting: list[str] = []

    @classmethod
    def opened(cls, name: str, above: int | None) -> WalkedFolder | None:
        """Opens a folder. Returns None if it is no longer a folder, or access is denied."""
        fd, forbidden = -1, None
        try:
            fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
            file_stat, path = os.fstat(fd), f"/proc/self/fd/{fd}"  # stays this folder, whatever is renamed
            if file_stat.st_mode & NEEDED != NEEDED and file_stat.st_uid == os.geteuid() != 0:
                forbidden = stat.S_IMODE(file_stat.st_mode)
                os.chmod(path, forbidden | NEEDED)
            return cls(os.open(path, _FOLDER), file_stat, forbidden)
        except OSError:
            return None
        finally:
            if fd >= 0:
                os.close(fd)

    def reopen(self, below: int) -> None:
        """Opens it again from a folder in it. Its descriptor stays -1 if that folder was moved elsewhere."""
        with contextlib.suppress(OSError):
            fd = os.open("..", _FOLDER, dir_fd=below)
            if _key(os.fstat(fd)) == self.key:
                self.fd = fd
            else:
                os.close(fd)

    def close(self) -> None:
        if self.fd < 0:
            return
        if self.forbidden is not None:
            with contextlib.suppress(OSError):
                # a file job that copies the folder opens it, too, and then needs it open
                if stat.S_IMODE(os.fstat(self.fd).st_mode) == self.forbidden | NEEDED:
                    os.fchmod(self.fd, self.forbidden)
        os.close(self.fd)
        self.fd = -1


def _key(file_stat: os.stat_result) -> _Key:
    return file_stat.st_dev, file_stat.st_ino
