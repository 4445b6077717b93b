"""Measures the processes and memory of process trees from /proc. Part of the resource monitor.

Memory is what would be free if the tree ended: private pages, their swapped-out part, tmpfs mounts that only the
sandbox has, and shared anonymous memory, which is not in any process's private pages. A cheap upper bound comes first,
one read of `stat` per process. Only a tree above its limit by that bound is measured exactly, so that a shared library,
a database's buffers, or the pages that fifty forked workers share with their parent count once and end no sandbox.

Invariants. A process belongs to the tree of the init process that is its ancestor, and to no other. An init process is
identified by PID and start time, so a reused PID is not mistaken for it. Processes that end while being read do not
count.

Not measured: memory in unmapped memfds and SysV segments (seccomp refuses them where the monitor enforces memory), and
kernel memory such as pipe buffers.
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
    resident_bytes: int  # including shared pages: an upper bound of its own memory


def processes() -> dict[int, Process]:
    """Returns every visible process that is not a zombie, in one pass over /proc."""
    by_pid: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        if name[0] in "123456789":
            fields = read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if len(fields) > 21 and fields[0] not in b"ZX":
                by_pid[int(name)] = Process(int(fields[1]), int(fields[17]), int(fields[19]), int(fields[21]) * PAGE)
    return by_pid


def trees(init_clients: Iterable[int], process_table: dict[int, Process]) -> dict[int, list[int]]:
    """Returns init process → its descendants."""
    descendants: dict[int, list[int]] = {init_client: [] for init_client in init_clients}
    owner: dict[int, int] = {0: 0, 1: 0, **{init_client: init_client for init_client in descendants}}
    for pid in process_table:
        path: dict[int, None] = {}
        while pid not in owner:
            path[pid] = None
            process = process_table.get(pid)
            # If a parent ended between two reads, the orphan is assigned correctly at the next tick. The parent's PID
            # may even have been reused for a child of the orphan: then the chain is a cycle.
            pid = process.parent if process and process.parent not in path else 0
        for passed in path:
            owner[passed] = owner[pid]
            if owner[pid]:
                descendants[owner[pid]].append(passed)
    return descendants


class Memory:
    """Measures the memory of trees. Holds what is the same for all of them."""

    def __init__(self) -> None:
        with mmap.mmap(-1, PAGE) as page:  # all shared anonymous mappings have the same device
            page[0] = 1
            devices = {line.split()[3] for line in read("/proc/self/maps").splitlines() if b"/dev/zero" in line}
        self._shared_device = devices.pop() if devices else b"none"

    def of(
        self, tree: list[int], process_table: dict[int, Process], tmpfs_bytes: int, limit: int, has_swap: bool
    ) -> int:
        """Returns its bytes: exact if above `limit`, else an upper bound that is not."""
        upper = tmpfs_bytes + sum(process_table[pid].resident_bytes for pid in tree)
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
        """Returns its proportional share. Files on a tmpfs are counted with the tmpfs, even if they are mapped."""
        total, is_counted = 0, False
        for line in read(f"/proc/{pid}/smaps").splitlines():
            key, _, values = line.partition(b" ")
            if not key.endswith(b":"):  # the head of a mapping: range, rights, offset, device, inode, name
                is_counted = values.split()[2] == self._shared_device
            elif is_counted and key == b"Pss:":
                total += int(values.split()[0]) * 1024
        return total

    @staticmethod
    def find_tmpfs(tree: list[int], paths: list[str]) -> tuple[int, list[str]]:
        """Returns a process inside (0: none yet) and those of `paths` that are its own tmpfs mounts, not the host's."""
        hosts = {fields[2] for fields, _ in mounts("self")}
        for pid in tree[:16]:
            visible = mounts(str(pid))
            own = {os.fsdecode(fields[4]) for fields, kind in visible if kind == b"tmpfs" and fields[2] not in hosts}
            if here := [path for path in paths if path in own]:
                return pid, here
        return 0, []


def tmpfs_devices(pid: int) -> set[int]:
    """Returns tmpfs devices as in `st_dev`, including the one of memfds and shared anonymous memory."""
    shared = os.memfd_create("device", os.MFD_CLOEXEC)
    try:
        devices = {os.fstat(shared).st_dev}
    finally:
        os.close(shared)
    for fields, kind in mounts(str(pid)):
        if kind == b"tmpfs":
            major, minor = fields[2].split(b":")
            devices.add(os.makedev(int(major), int(minor)))
    return devices


def tmpfs_bytes(pid: int, paths: list[str]) -> int:
    """Returns the use of these mounts of that process. Raises OSError if it has ended."""
    total = 0
    for path in paths:
        fs_stat = os.statvfs(f"/proc/{pid}/root{path}")
        total += (fs_stat.f_blocks - fs_stat.f_bfree) * fs_stat.f_frsize
    return total


def mounts(pid: str) -> list[tuple[list[bytes], bytes]]:
    """Returns (fields, file system) of each mount that is visible to the process."""
    entries = []
    for line in read(f"/proc/{pid}/mountinfo").splitlines():
        before, _, after = line.partition(b" - ")
        entries.append((before.split(), after.partition(b" ")[0]))
    return entries


def machine() -> tuple[int, bool]:
    """Returns (available bytes, whether anything is swapped out)."""
    fields = dict(line.split(b":") for line in read("/proc/meminfo").splitlines())
    numbers = {key: int(value.split()[0]) * 1024 for key, value in fields.items()}
    return numbers.get(b"MemAvailable", 0), numbers.get(b"SwapFree", 0) < numbers.get(b"SwapTotal", 0)


def _share(pid: int) -> tuple[int, int]:
    """Returns its share of private memory (pages still shared after a fork are divided) and of shared memory."""
    fields = {}
    for line in read(f"/proc/{pid}/smaps_rollup").splitlines()[1:]:
        key, _, value = line.partition(b":")
        fields[key] = int(value.split()[0]) * 1024
    if b"Pss_Anon" in fields:
        return fields[b"Pss_Anon"] + fields.get(b"SwapPss", 0), fields[b"Pss_Shmem"]
    words = read(f"/proc/{pid}/statm").split()  # unreadable, or Linux before 5.4: pages are not divided
    return ((int(words[1]) - int(words[2])) * PAGE if len(words) > 2 else 0), 0


def _status(pid: int, name: bytes) -> int:
    for line in read(f"/proc/{pid}/status").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def read(path: str) -> bytes:
    """Returns a whole kernel file; empty if it is gone or unreadable."""
    data = b""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while part := os.read(fd, 1 << 16):
                data += part
        finally:
            os.close(fd)
    return data
