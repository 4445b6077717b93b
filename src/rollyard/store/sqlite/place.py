"""Where a SQLite store may be, and the lock that allows only one process to open it.

SQLite's locks and its shared memory do not work on network file systems (sqlite.org/wal.html), so those are refused.
The lock is a `flock` on a file beside the store: the kernel releases it with the process, however that ends. The lock
file is never deleted: after an unlink, two processes could hold "the" lock.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from rollyard.core.locks import FileLock
from rollyard.store.base import StoreLocked, StoreUnusable

_log = logging.getLogger("rollyard.store")

NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "9p", "davfs"),
        *("lustre", "gpfs", "beegfs", "ceph", "glusterfs", "orangefs", "pvfs2", "panfs", "wekafs", "ocfs2", "gfs2"),
        *("fuse.sshfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.beegfs", "fuse.juicefs", "fuse.davfs"),
        *("fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.mountpoint-s3", "fuse.cvmfs", "fuse.wekafs"),
    }
)
"""File system types, as named in mountinfo, that other machines may write to."""


@dataclass(frozen=True, slots=True)
class Mount:
    point: str
    kind: str
    source: str


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """Returns the mount of an absolute, resolved path, from the text of /proc/self/mountinfo.

    A line is `36 35 98:0 /folder /mount/point options [tags…] - type source options`; blanks are octal escapes.
    Of several mounts on one point, the last hides the others.
    """
    mount: Mount | None = None
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if not separator or len(fields) < 5 or len(kinds) < 2:
            continue
        point = _unescape(fields[4])
        is_above = point == "/" or path == point or path.startswith(point + "/")
        if is_above and (mount is None or len(point) >= len(mount.point)):
            mount = Mount(point, kinds[0], _unescape(kinds[1]))
    return mount


def refuse_network(folder: Path, mountinfo: str | None = None) -> None:
    """Raises `StoreUnusable` if the folder is on a network file system."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError as error:
            _log.warning("unknown whether the store is on a network file system", extra={"reason": str(error)})
            return
    mount = mount_of(str(folder.resolve()), mountinfo)
    if mount is not None and mount.kind in NETWORK:
        raise StoreUnusable(
            f"{folder} is on a network file system ({mount.kind}, mounted at {mount.point}), where SQLite loses "
            "data; put the store on a local disk"
        )


class Lock:
    """An exclusive lock on a store. Raises `StoreLocked` with the holder."""

    def __init__(self, store: Path) -> None:
        self.path = store.with_name(store.name + ".lock")
        self._lock = FileLock(self.path)
        try:
            is_free, holder = self._lock.try_acquire(), self._lock.holder()
        except OSError as error:
            self._lock.close()
            raise StoreUnusable(f"{self.path} cannot be locked: {error.strerror}") from error
        if not is_free:
            self._lock.close()
            raise StoreLocked(f"{store} is already open, in {holder}; stop that process first")
        self._lock.write_holder()

    def release(self) -> None:
        """Idempotent."""
        self._lock.close()


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
