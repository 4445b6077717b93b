"""What trees of processes use, as /proc shows it: their number and their memory. Part of the warden.

Memory is what would be free again if the tree were gone: private pages, what of them was swapped out, the tmpfs that
the sandbox alone has, and shared anonymous memory, which is in no process's private pages. The cheap upper bound comes
first, one read of `stat` a process; only a tree that is beyond its limit by that is looked at closely, so that a shared
library, a database's buffers or the pages that fifty forked workers have from their parent count once and end nobody.

Invariants. A process belongs to the tree of the keeper that is its ancestor, and to no other. A keeper is known by pid
and start time: a number that went to a stranger is not it. What vanishes while being read counts nothing.

Not seen: memory in memfds and SysV segments that nobody maps (refused by seccomp where memory is only watched), and the
kernel's own, such as pipe buffers.
"""

# ruff: noqa: PTH208

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable
from typing import NamedTuple

PAGE = os.sysconf("SC_PAGE_SIZE")


class Process(NamedTuple):
    parent: int
    threads: int
    start_time: int
    resident_bytes: int  # shared pages included: an upper bound of its own


def processes() -> dict[int, Process]:
    """Every process in sight that is not a zombie: one pass over /proc."""
    found: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        if name[0] in "123456789":
            fields = read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if len(fields) > 21 and fields[0] not in b"ZX":
                found[int(name)] = Process(int(fields[1]), int(fields[17]), int(fields[19]), int(fields[21]) * PAGE)
    return found


def trees(init_clients: Iterable[int], seen: dict[int, Process]) -> dict[int, list[int]]:
    """keeper → what lives below it."""
    found: dict[int, list[int]] = {init_client: [] for init_client in init_clients}
    owner: dict[int, int] = {0: 0, 1: 0, **{init_client: init_client for init_client in found}}
    for pid in seen:
        path: dict[int, None] = {}
        while pid not in owner:
            path[pid] = None
            process = seen.get(pid)
            # A parent that ended between two reads: the orphan shows up in its place at the next look. Its number may
            # even have gone to a child of the orphan, since read: then the chain is a ring.
            pid = process.parent if process and process.parent not in path else 0
        for passed in path:
            owner[passed] = owner[pid]
            if owner[pid]:
                found[owner[pid]].append(passed)
    return found


class Memory:
    """Weighs trees. Holds what is the same for all of them."""

    def __init__(self) -> None:
        with mmap.mmap(-1, PAGE) as page:  # a shared anonymous mapping of our own shows the device of all such
            page[0] = 1
            devices = {line.split()[3] for line in read("/proc/self/maps").splitlines() if b"/dev/zero" in line}
        self._shared_device = devices.pop() if devices else b"none"

    def of(self, tree: list[int], seen: dict[int, Process], tmpfs_bytes: int, limit: int, has_swap: bool) -> int:
        """Its bytes: exact when beyond `limit`, else an upper bound of them that is not."""
        upper = tmpfs_bytes + sum(seen[pid].resident_bytes for pid in tree)
        if has_swap:
            upper += sum(_status(pid, b"VmSwap:") for pid in tree)
        if upper <= limit:
            return upper
        exact, shared = tmpfs_bytes, {}
        for pid in tree:
            own, shared[pid] = _share(pid)
            exact += own
        if exact > limit or exact + sum(shared.values()) <= limit:
            return exact
        return exact + sum(self._shared_anonymous(pid) for pid, size in shared.items() if size)

    def _shared_anonymous(self, pid: int) -> int:
        """Its proportional share. Files on a tmpfs are counted by that tmpfs, however they are mapped."""
        total, is_counted = 0, False
        for line in read(f"/proc/{pid}/smaps").splitlines():
            key, _, rest = line.partition(b" ")
            if not key.endswith(b":"):  # the head of a mapping: range, rights, offset, device, inode, name
                is_counted = rest.split()[2] == self._shared_device
            elif is_counted and key == b"Pss:":
                total += int(rest.split()[0]) * 1024
        return total

    @staticmethod
    def find_tmpfs(tree: list[int], paths: list[str]) -> tuple[int, list[str]]:
        """A process inside (0: none yet) and those of `paths` that are tmpfs mounts of its own, never the host's."""
        hosts = {fields[2] for fields, _ in mounts("self")}
        for pid in tree[:16]:
            seen = mounts(str(pid))
            own = {os.fsdecode(fields[4]) for fields, kind in seen if kind == b"tmpfs" and fields[2] not in hosts}
            if here := [path for path in paths if path in own]:
                return pid, here
        return 0, []


def tmpfs_devices(pid: int) -> set[int]:
    """As `st_dev` has them; the one of memfds and shared anonymous memory included."""
    shared = os.memfd_create("device", os.MFD_CLOEXEC)
    try:
        found = {os.fstat(shared).st_dev}
    finally:
        os.close(shared)
    for fields, kind in mounts(str(pid)):
        if kind == b"tmpfs":
            major, minor = fields[2].split(b":")
            found.add(os.makedev(int(major), int(minor)))
    return found


def tmpfs_bytes(pid: int, paths: list[str]) -> int:
    """What is on these mounts, seen by that process. OSError: it is gone."""
    total = 0
    for path in paths:
        found = os.statvfs(f"/proc/{pid}/root{path}")
        total += (found.f_blocks - found.f_bfree) * found.f_frsize
    return total


def mounts(pid: str) -> list[tuple[list[bytes], bytes]]:
    """(fields, file system) of each mount that it sees."""
    found = []
    for line in read(f"/proc/{pid}/mountinfo").splitlines():
        before, _, after = line.partition(b" - ")
        found.append((before.split(), after.partition(b" ")[0]))
    return found


def machine() -> tuple[int, bool]:
    """(bytes that can still be had, whether anything is swapped out)."""
    fields = dict(line.split(b":") for line in read("/proc/meminfo").splitlines())
    numbers = {key: int(value.split()[0]) * 1024 for key, value in fields.items()}
    return numbers.get(b"MemAvailable", 0), numbers.get(b"SwapFree", 0) < numbers.get(b"SwapTotal", 0)


def _share(pid: int) -> tuple[int, int]:
    """Its part of private memory (pages that a fork still shares are divided), and of memory that is shared by name."""
    fields = {}
    for line in read(f"/proc/{pid}/smaps_rollup").splitlines()[1:]:
        key, _, value = line.partition(b":")
        fields[key] = int(value.split()[0]) * 1024
    if b"Pss_Anon" in fields:
        return fields[b"Pss_Anon"] + fields.get(b"SwapPss", 0), fields[b"Pss_Shmem"]
    words = read(f"/proc/{pid}/statm").split()  # it hides from us, or Linux is older than 5.4: no pages are divided
    return ((int(words[1]) - int(words[2])) * PAGE if len(words) > 2 else 0), 0


def _status(pid: int, name: bytes) -> int:
    for line in read(f"/proc/{pid}/status").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def read(path: str) -> bytes:
    """A kernel file, whole; nothing if it is gone or not ours to read."""
    data = b""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while part := os.read(fd, 1 << 16):
                data += part
        finally:
            os.close(fd)
    return data
