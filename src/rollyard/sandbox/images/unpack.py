"""Unpacks the layers of an image into a folder, as an ordinary user and safely for any contents.

Each name is resolved from the folder's descriptor, one component at a time, by `openat` with O_NOFOLLOW. A link on the
way is read and resolved as if the folder were `/` (so `lib -> usr/lib` works, and `evil -> /etc` resolves to the
image's own /etc); a `..` in a link goes up a list of names that ends at the folder. So no system call receives a path
that the kernel could resolve to the outside.

Invariants. All files belong to the user that unpacks. Setuid and setgid bits, devices and extended attributes are
dropped; the owner can always write folders and read files. Whiteouts hide entries of lower layers, never entries of the
same layer. Bytes, entries and depth are limited; beyond a limit, `HostileImage` is raised.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import stat
import tarfile
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from rollyard.sandbox.images.errors import HostileImage, ImageError
from rollyard.sandbox.images.members import MOST_DEPTH, LayerMember, lstat, mode_of, parts_of, text_of
from rollyard.sandbox.images.streams import open_layer

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
MOST_LINKS = 40  # as in the kernel
CHUNK = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class UnpackBounds:
    """Limits of one unpacked image."""

    total_bytes: int = 128 << 30
    entries: int = 5_000_000


class Unpacker:
    """Applies layers to the folder, in order, lowest first. Blocking; `stop` ends it early."""

    def __init__(self, folder: Path, bounds: UnpackBounds | None = None) -> None:
        self.bounds = bounds or UnpackBounds()
        self._root = os.open(folder, _FOLDER)
        self._fresh: set[tuple[str, ...]] = set()  # entries of the current layer so far
        self._last: tuple[tuple[str, ...], tuple[str, ...], int] | None = None  # folder: requested path, real path, fd
        self.written_bytes = 0
        self.entries = 0
        self.skipped = 0  # devices and FIFOs
        self.stop = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._forget()
        os.close(self._root)

    def layer(self, path: Path) -> None:
        """Applies a layer from a file: tar, plain or compressed by gzip or zstd."""
        with open_layer(path) as stream:
            self.stream(stream, path.name)

    def stream(self, stream: IO[bytes], what: str) -> None:
        """Applies a layer from a tar stream."""
        self._fresh = set()
        try:
            with tarfile.open(fileobj=stream, mode="r|", encoding="utf-8", tarinfo=LayerMember) as tar:
                for member in tar:
                    self._member(tar, member)
                    tar.members = []  # type: ignore[attr-defined]  # else it keeps all: gigabytes for a hostile layer
        # RecursionError: `tarfile` reads consecutive headers recursively.
        except (
            tarfile.TarError,
            EOFError,
            gzip.BadGzipFile,
            zlib.error,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ImageError(f"layer {what} is not a complete tar archive: {error}") from error
        except OSError as error:
            raise ImageError(f"layer {what} cannot be unpacked: {error}") from error
        finally:
            self._forget()

    def _member(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self._check_stop()
        self.entries += 1
        if self.entries > self.bounds.entries:
            raise HostileImage(f"it has more than {self.bounds.entries:,} entries")
        parts = parts_of(member.name)
        if not parts:
            if member.isdir():
                os.fchmod(self._root, mode_of(member, 0o700))
            return
        *above, name = parts
        real, folder = self._enter(tuple(above))
        if name.startswith(WHITEOUT):
            self._whiteout(real, folder, name)
            return
        path = (*real, name)
        if member.isdir():
            self._folder(folder, name, member)
        elif member.isreg():
            self._file(tar, folder, name, member)
        elif member.issym():
            self._remove_entry(folder, name)
            os.symlink(text_of(member.linkname), name, dir_fd=folder)
        elif member.islnk():
            self._link(folder, path, member)
        else:
            self.skipped += 1
            return
        for depth in range(len(path), 0, -1):  # a folder with entries of this layer must not be hidden as a whole
            if path[:depth] in self._fresh:
                break
            self._fresh.add(path[:depth])

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise ImageError("unpacking was stopped")

    # --- the kinds of entries ---

    def _folder(self, folder: int, name: str, member: tarfile.TarInfo) -> None:
        file_stat = lstat(folder, name)
        if file_stat is None or not stat.S_ISDIR(file_stat.st_mode):
            self._remove_entry(folder, name)
            os.mkdir(name, 0o700, dir_fd=folder)
        fd = os.open(name, _FOLDER, dir_fd=folder)
        try:
            os.fchmod(fd, mode_of(member, 0o700))
        finally:
            os.close(fd)

    def _file(self, tar: tarfile.TarFile, folder: int, name: str, member: tarfile.TarInfo) -> None:
        self._remove_entry(folder, name)
        source = tar.extractfile(member)
        if source is None:
            raise ImageError(f"{member.name!r} has no content")
        fd = os.open(name, _NEW, 0o600, dir_fd=folder)
        with open(fd, "wb", buffering=0) as target:
            remaining = member.size
            while remaining > 0:
                self._check_stop()
                data = source.read(min(CHUNK, remaining))
                if not data:
                    raise EOFError(f"{member.name!r} ends early")
                self.written_bytes += len(data)
                if self.written_bytes > self.bounds.total_bytes:
                    raise HostileImage(f"it is larger than {self.bounds.total_bytes:,} bytes unpacked")
                target.write(data)
                remaining -= len(data)
            os.fchmod(fd, mode_of(member, 0o400) & 0o777)
            moment = max(0, min(int(member.mtime), 1 << 33))  # a .pyc is valid only with its source's mtime
            os.utime(fd, (moment, moment))

    def _link(self, folder: int, path: tuple[str, ...], member: tarfile.TarInfo) -> None:
        target = parts_of(member.linkname)
        if not target:
            raise HostileImage(f"{member.name!r} is a hard link to nothing")
        # Duplicate the descriptor: resolving the target's folder may close the cached one.
        here = os.dup(folder)
        try:
            real, there = self._enter(tuple(target[:-1]), may_make=False)
            if (*real, target[-1]) == path:
                return
            file_stat = lstat(there, target[-1])
            if file_stat is None or stat.S_ISDIR(file_stat.st_mode):
                raise HostileImage(f"{member.name!r} is a hard link to {member.linkname!r}, which is not a file")
            self._remove_entry(here, path[-1])
            os.link(target[-1], path[-1], src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
        finally:
            os.close(here)
            self._forget()  # the cached folder may have been removed

    def _whiteout(self, real: tuple[str, ...], folder: int, name: str) -> None:
        if name == OPAQUE:
            self._remove_hidden(folder, real)
            return
        hidden = name.removeprefix(WHITEOUT)
        if hidden.startswith(WHITEOUT):
            return  # another marker of aufs
        if hidden in ("", ".", ".."):
            raise HostileImage(f"it has a whiteout of {hidden!r}")
        file_stat = lstat(folder, hidden)
        if file_stat is None:
            return
        if (*real, hidden) not in self._fresh:
            self._remove_entry(folder, hidden)
        elif stat.S_ISDIR(file_stat.st_mode):
            fd = os.open(hidden, _FOLDER, dir_fd=folder)
            try:
                self._remove_hidden(fd, (*real, hidden))
            finally:
                os.close(fd)

    def _remove_hidden(self, folder: int, path: tuple[str, ...]) -> None:
        """Removes the folder's contents, except for entries of this layer."""
        for name in os.listdir(folder):
            below = (*path, name)
            if below not in self._fresh:
                self._remove_entry(folder, name)
            elif stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                fd = os.open(name, _FOLDER, dir_fd=folder)
                try:
                    self._remove_hidden(fd, below)
                finally:
                    os.close(fd)

    @staticmethod
    def _remove_entry(folder: int, name: str) -> None:
        file_stat = lstat(folder, name)
        if file_stat is None:
            return
        if stat.S_ISDIR(file_stat.st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)

    # --- finding folders ---

    def _enter(self, parts: tuple[str, ...], *, may_make: bool = True) -> tuple[tuple[str, ...], int]:
        """Resolves a folder. Returns its real path and an open descriptor, which stays open until the next call."""
        if self._last is not None and self._last[0] == parts:
            return self._last[1:]
        self._forget()
        walked: list[str] = []
        fds = [os.dup(self._root)]
        todo = list(reversed(parts))
        links = 0
        try:
            while todo:
                part = todo.pop()
                if part == "..":  # from a link only
                    if walked:
                        walked.pop()
                        os.close(fds.pop())
                    continue
                try:
                    fds.append(os.open(part, _FOLDER, dir_fd=fds[-1]))
                except FileNotFoundError:
                    if not may_make:
                        raise
                    os.mkdir(part, 0o755, dir_fd=fds[-1])
                    fds.append(os.open(part, _FOLDER, dir_fd=fds[-1]))
                except OSError as error:
                    if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                        raise
                    target = self._target(fds[-1], part, may_make=may_make)
                    if target is None:
                        todo.append(part)  # a file was in the folder's place and has been removed
                        continue
                    links += 1
                    if links > MOST_LINKS:
                        raise HostileImage(f"too many links in {'/'.join(parts)!r}") from None
                    if target.startswith("/"):
                        while walked:
                            walked.pop()
                            os.close(fds.pop())
                    todo += [piece for piece in reversed(target.split("/")) if piece not in ("", ".")]
                    continue
                walked.append(part)
                if len(walked) > MOST_DEPTH:
                    raise HostileImage(f"it has folders nested more than {MOST_DEPTH} deep")
            folder_fd = fds.pop()
        finally:
            for fd in fds:
                os.close(fd)
        self._last = (parts, tuple(walked), folder_fd)
        return self._last[1:]

    def _target(self, folder: int, name: str, *, may_make: bool) -> str | None:
        try:
            return os.readlink(name, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.EINVAL or not may_make:
                raise
        os.unlink(name, dir_fd=folder)
        return None

    def _forget(self) -> None:
        if self._last is not None:
            os.close(self._last[2])
            self._last = None
