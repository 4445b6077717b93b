"""The files of an image store: names, one record per image, and locks.

    index.json                 name → digest; replaced atomically, under index.lock
    sha256-HEX/image.json      one image; the image exists if and only if this file does
    sha256-HEX/folder          its root folder       sha256-HEX/image.sif   its SIF file
    sha256-HEX/.partial        a running pull, or the remains of one after a crash
    locks/HEX.build            held while making or removing it      locks/HEX.use   shared while using it

Invariants. The forms listed in `image.json` are complete: they were renamed into place first. Lock files are never
deleted: otherwise two processes could hold the same lock. Readers take no lock: files are replaced, not changed.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from rollyard.core.files import replacing
from rollyard.core.locks import FileLock, locked
from rollyard.sandbox.images.errors import ImageError

RETRY_S = 0.2  # between two tries for a lock: flock has no event to wait for

BUILDING = ".building-"
"""Prefix of the folders in which builds run, each locked by its process."""

Stamp = tuple[int, int, int]


class ImageIndex:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._cache: dict[Path, tuple[Stamp, Mapping[str, Any]]] = {}

    def folder(self, digest: str) -> Path:
        return self.root / digest.replace(":", "-")

    def digests(self) -> list[str]:
        """The digests of images that have a record."""
        return sorted(file.parent.name.replace("-", ":", 1) for file in self.root.glob("sha256-*/image.json"))

    def names(self) -> Mapping[str, str]:
        return self._read(self.root / "index.json") or {}

    def record(self, digest: str) -> Mapping[str, Any] | None:
        return self._read(self.folder(digest) / "image.json")

    def put_record(self, digest: str, record: Mapping[str, Any]) -> None:
        self._write(self.folder(digest) / "image.json", record)

    def change_names(self, change: Callable[[Mapping[str, str]], Mapping[str, str]]) -> None:
        """Changes the names, with a lock against other processes. Blocks briefly."""
        self.root.mkdir(parents=True, exist_ok=True)
        with locked(self.root / "index.lock"):
            self._write(self.root / "index.json", change(self.names()))

    # --- locks ---

    @asynccontextmanager
    async def building(self, digest: str, waiting: Callable[[str], None]) -> AsyncGenerator[int, None]:
        """Holds the image's build lock, exclusive among all processes. If it has to wait, calls `waiting` once with
        the lock's holder."""
        with self._open_lock(digest, "build") as lock:
            if not lock.try_acquire():
                waiting(lock.holder())
                while not lock.try_acquire():
                    await asyncio.sleep(RETRY_S)
            lock.write_holder()
            yield lock.fd

    @contextmanager
    def claimed(self, digest: str, *, may_be_used: bool = False) -> Generator[bool, None, None]:
        """Yields whether the image is neither being made nor in use; if so, it stays that way until the block ends."""
        with self._open_lock(digest, "build") as build:
            if may_be_used:
                yield build.try_acquire()
            else:
                with self._open_lock(digest, "use") as use:
                    yield build.try_acquire() and use.try_acquire()

    def share(self, digest: str) -> FileLock | None:
        """Returns a lock that protects the image, or None if it is being removed or is gone. Updates its time of
        use."""
        lock = self._open_lock(digest, "use")
        if not lock.try_acquire(shared=True) or self.record(digest) is None:
            lock.close()
            return None
        os.utime(lock.fd)
        return lock

    def mark_used(self, digest: str) -> None:
        with self._open_lock(digest, "use") as lock:
            os.utime(lock.fd)

    def used_at(self, digest: str) -> float | None:
        try:
            return self._lock_path(digest, "use").stat().st_mtime
        except FileNotFoundError:
            return None

    def _lock_path(self, digest: str, use: str) -> Path:
        return self.root / "locks" / f"{digest.removeprefix('sha256:')}.{use}"

    def _open_lock(self, digest: str, use: str) -> FileLock:
        path = self._lock_path(digest, use)
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(path)

    # --- files ---

    def _read(self, path: Path) -> Mapping[str, Any] | None:
        """Returns a JSON object, cached until the file changes."""
        try:
            file_stat = path.stat()
        except FileNotFoundError:
            self._cache.pop(path, None)
            return None
        stamp = (file_stat.st_mtime_ns, file_stat.st_ino, file_stat.st_size)
        cached = self._cache.get(path)
        if cached is not None and cached[0] == stamp:
            return cached[1]
        try:
            body = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ImageError(f"{path} cannot be read: {error}", "remove it and pull its images again") from error
        if not isinstance(body, dict):
            raise ImageError(f"{path} is not a JSON object", "remove it and pull its images again")
        self._cache[path] = (stamp, body)
        return body

    @staticmethod
    def _write(path: Path, body: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, is_durable=True) as file:
            file.write(json.dumps(body, indent=1, sort_keys=True).encode())


@contextmanager
def building_folder(root: Path) -> Generator[tuple[Path, int], None, None]:
    """Yields a temporary folder to build in, and the descriptor that holds its lock."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=BUILDING, dir=root) as name, FileLock(Path(name), is_folder=True) as lock:
        lock.acquire()
        yield Path(name), lock.fd


def sync(folder: Path) -> None:
    """Writes the file system's data to disk. Blocking. (Python has no syncfs; os.sync covers all disks.)"""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        ctypes.CDLL(None).syncfs(fd)
    finally:
        os.close(fd)
