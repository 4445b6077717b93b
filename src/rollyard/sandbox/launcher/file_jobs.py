"""File jobs, run inside a sandbox by a forked child of its init process: read, write, upload, download, unpack.

Standard library only, as in `kernel.py`. Nothing may be imported late: the files inside are not trusted. Paths are
paths inside the sandbox. Anything but a regular file or folder is refused without waiting for it; sizes are limited.
"""

# Descriptors and raw paths: pathlib would only be one more import.
# ruff: noqa: PTH101, PTH103, PTH104, PTH106, PTH108, PTH112, PTH114, PTH115, PTH116, PTH118, PTH211

from __future__ import annotations

import errno
import os
import stat
import tarfile
import warnings  # noqa: F401  tarfile and os import it when first needed: too late inside
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

CHUNK = 1 << 20
LATEST = 1 << 33  # latest mtime in an archive: not every file system can store one after the year 2242


class Refused(Exception):
    """The file is not of the requested kind or size, or cannot be read; not a system error."""


class Unwritten(Exception):
    """A file of the host could not be written: an infrastructure failure, never caused by the sandbox."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Bounded:
    """A file of the host that refuses more than `limit` bytes."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd, self.limit, self.count = fd, limit, 0

    def write(self, data: bytes) -> int:
        self.count += len(data)
        if self.count > self.limit:
            raise Refused(f"more than {self.limit} bytes")
        try:
            write_all(self.fd, data)
        except OSError as error:
            raise Unwritten(error) from None
        return len(data)


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """Opens a regular file. Raises OSError if it is missing or a folder. Any other obstacle is caused by the sandbox
    and raises Refused."""
    try:
        fd = open_allowed(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    file_stat = os.fstat(fd)
    if stat.S_ISREG(file_stat.st_mode):
        return fd, file_stat
    os.close(fd)
    if stat.S_ISDIR(file_stat.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise Refused(f"{path} is not a regular file")


def open_allowed(path: str, flags: int) -> int:
    """Opens a file even if its mode denies its owner, the current user, access. The mode is restored."""
    try:
        return os.open(path, flags)
    except PermissionError:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        os.chmod(path, mode | 0o400)
        try:
            return os.open(path, flags)
        finally:
            os.chmod(path, mode)


def copy(source: int, write: Callable[[bytes], object]) -> None:
    while data := os.read(source, CHUNK):
        write(data)


def create(path: str, mode: int, source: int) -> None:
    """Creates a file atomically. A link or FIFO at `path` is replaced, never followed or waited for."""
    if os.path.isdir(path) and not os.path.islink(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    folder, name = os.path.split(path)
    os.makedirs(folder or ".", exist_ok=True)
    partial = os.path.join(folder, f".{name[:200]}.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        copy(source, lambda data: write_all(fd, data))
        os.fchmod(fd, mode)
        os.rename(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    finally:
        os.close(fd)


def copy_folder(source: int, path: str) -> None:
    """Copies a host folder, given by a descriptor, to `path`: folders, files and links, and nothing else."""
    os.makedirs(path, exist_ok=True)
    for name in os.listdir(source):
        file_stat = os.stat(name, dir_fd=source, follow_symlinks=False)
        inner = os.path.join(path, name)
        if stat.S_ISLNK(file_stat.st_mode):
            if os.path.lexists(inner):
                os.unlink(inner)
            os.symlink(os.readlink(name, dir_fd=source), inner)
        elif stat.S_ISDIR(file_stat.st_mode) or stat.S_ISREG(file_stat.st_mode):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
            try:
                if stat.S_ISDIR(file_stat.st_mode):
                    copy_folder(fd, inner)
                else:
                    create(inner, stat.S_IMODE(file_stat.st_mode) & 0o777, fd)
            finally:
                os.close(fd)
    os.chmod(path, stat.S_IMODE(os.fstat(source).st_mode) & 0o777 | 0o700)


def listed(folder: str) -> list[os.DirEntry[str]]:
    """Returns the entries of a folder in reverse order. If its mode denies the owner something, the mode is changed, so
    that the resource monitor, which opens folders as well, does not close it again."""
    mode = stat.S_IMODE(os.stat(folder).st_mode)
    if mode & 0o700 != 0o700:
        try:
            os.chmod(folder, mode | 0o700)
        except OSError:  # another user's, or on a read-only mount
            if mode & 0o500 != 0o500:
                raise
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name, reverse=True)


def pack_folder(folder: str, archive: tarfile.TarFile) -> None:
    """Adds the contents of `folder`, without looking up owner names in the sandbox's name service.

    Processes of the sandbox may change it meanwhile: files that vanish are left out, unreadable ones raise Refused.
    """
    pending = [("", entry) for entry in listed(folder)]  # a stack: folders can be nested deeper than calls
    while pending:
        above, entry = pending.pop()
        name = f"{above}{entry.name}"
        try:
            is_folder = pack(entry, name, archive)
            if is_folder:
                pending += [(f"{name}/", inner) for inner in listed(entry.path)]
        except FileNotFoundError:
            continue


def pack(entry: os.DirEntry[str], name: str, archive: tarfile.TarFile) -> bool:
    """Adds one entry. Returns whether it is a folder, whose contents are packed next."""
    info = tarfile.TarInfo(name)
    file_stat = entry.stat(follow_symlinks=False)
    info.mode = stat.S_IMODE(file_stat.st_mode)
    info.mtime = max(0, min(int(file_stat.st_mtime), LATEST))
    if entry.is_symlink():
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(entry.path)
        archive.addfile(info)
    elif entry.is_dir(follow_symlinks=False):
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
        return True
    elif entry.is_file(follow_symlinks=False):
        fd, file_stat = open_regular(entry.path)
        info.size = file_stat.st_size
        with open(fd, "rb") as file:
            try:
                archive.addfile(info, file)
            except OSError as error:
                raise Refused(f"{entry.path} changed while it was read") from error
    return False


def do_read(request: Message, fds: list[int]) -> Message:
    source, file_stat = open_regular(request["path"])
    if file_stat.st_size > request["limit"]:  # refuses a sparse terabyte before reading it
        raise Refused(f"{request['path']} has {file_stat.st_size} bytes, more than {request['limit']}")
    copy(source, Bounded(fds[0], request["limit"]).write)
    return {}


def do_write(request: Message, fds: list[int]) -> Message:
    create(request["path"], request["mode"], fds[0])
    return {}


def do_upload(request: Message, fds: list[int]) -> Message:
    file_stat = os.fstat(fds[0])
    if stat.S_ISDIR(file_stat.st_mode):
        copy_folder(fds[0], request["path"])
    else:
        create(request["path"], stat.S_IMODE(file_stat.st_mode) & 0o777, fds[0])
    return {}


def do_download(request: Message, fds: list[int]) -> Message:
    bounded = Bounded(fds[0], request["limit"])
    try:
        source, file_stat = open_regular(request["path"])
    except IsADirectoryError:
        with tarfile.open(fileobj=bounded, mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
            try:
                pack_folder(request["path"], archive)
            except OSError as error:
                raise Refused(f"{request['path']}: {error.strerror}") from None
        return {"kind": "tar"}
    if file_stat.st_size > request["limit"]:
        raise Refused(f"{request['path']} has {file_stat.st_size} bytes, more than {request['limit']}")
    copy(source, bounded.write)
    return {"kind": "file"}


def empty(folder: str, binds: list[str]) -> None:
    """Deletes what is in a folder, which an image may have: what the agent deleted must not come back. Paths of the
    host that are mounted below it stay."""
    mounts, tops = {os.path.realpath(path) for path in binds}, list[str]()
    for top, folders, files in os.walk(os.path.realpath(folder)):
        with suppress(OSError):  # another user's, or on a read-only mount
            os.chmod(top, stat.S_IMODE(os.stat(top).st_mode) | 0o700)
        folders[:] = [name for name in folders if os.path.join(top, name) not in mounts]  # not walked
        tops += (os.path.join(top, name) for name in folders if not os.path.islink(os.path.join(top, name)))
        for name in [*files, *(name for name in folders if os.path.islink(os.path.join(top, name)))]:
            with suppress(OSError):  # a mounted file
                os.unlink(os.path.join(top, name))
    for top in reversed(tops):  # the deepest first
        with suppress(OSError):  # something is mounted below it
            os.rmdir(top)


def do_unpack(request: Message, fds: list[int]) -> Message:
    """Unpacks an archive of `pack_folder`; with `is_replaced`, what the folder has before is deleted. Members are below
    the folder by construction: their names came from scandir."""
    folder = request["path"]
    os.makedirs(folder, exist_ok=True)
    if request.get("is_replaced") and os.path.realpath(folder) != "/":
        empty(folder, request["binds"])
    with open(fds[0], "rb", closefd=False) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        for info in archive:
            path = os.path.join(folder, info.name)
            if info.isdir():
                os.makedirs(path, exist_ok=True)
                os.chmod(path, info.mode & 0o777 | 0o700)
            elif info.issym():
                if os.path.lexists(path):
                    os.unlink(path)
                os.symlink(info.linkname, path)
            elif (content := archive.extractfile(info)) is not None:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    while data := content.read(CHUNK):
                        write_all(fd, data)
                    os.fchmod(fd, info.mode & 0o777)
                    os.utime(fd, (info.mtime, info.mtime))
                finally:
                    os.close(fd)
    return {}


FILE_JOBS = {
    "read": do_read,
    "write": do_write,
    "upload": do_upload,
    "download": do_download,
    "unpack": do_unpack,
}
