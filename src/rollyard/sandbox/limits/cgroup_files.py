"""The folders and files of control groups, v1 and v2: reading, writing, removing, and killing a group's members.

Reading from a removed group returns an empty value, not an error, since other processes remove groups too. A failed
write raises.
"""

# Kernel files by raw path: pathlib would add more time than the calls take.
# ruff: noqa: PTH106, PTH118

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Iterator

log = logging.getLogger("rollyard.sandbox")

CPU_PERIOD_US = 100_000
SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")  # missing if the kernel is configured not to count swap
MAX_WALKED = 50_000  # groups that a sweep searches for those of an earlier process elsewhere: about 2 s


def own_folders(proc: str, pid: str = "self") -> dict[str, tuple[str, str]]:
    """Returns controller ("" for v2) → (that process's group, the tree's mount point), for visible groups."""
    mounted: dict[str, tuple[str, str]] = {}
    for line in read(f"{proc}/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        if kind == "cgroup2":
            mounted.setdefault("", (fields[4], fields[3]))
        elif kind == "cgroup":
            for option in options.split(","):
                mounted.setdefault(option, (fields[4], fields[3]))
    groups: dict[str, tuple[str, str]] = {}
    for line in read(f"{proc}/{pid}/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            if name not in mounted:
                continue
            at, root = mounted[name]
            inside = os.path.relpath(path, root)
            if not inside.startswith(".."):  # else it is outside this container's view
                groups[name] = (os.path.normpath(os.path.join(at, inside)), at)
    return groups


def settings(controller: str, value: float, is_v2: bool) -> Iterator[tuple[str, str]]:
    """Yields (file, value) to write. Swap is set to zero: otherwise the excess would only move to disk."""
    if controller == "memory":
        yield ("memory.max" if is_v2 else "memory.limit_in_bytes"), str(int(value))
        yield ("memory.swap.max", "0") if is_v2 else ("memory.memsw.limit_in_bytes", str(int(value)))
    elif controller == "pids":
        yield "pids.max", str(int(value))
    else:
        quota = max(1_000, int(value * CPU_PERIOD_US))  # the kernel's minimum is a millisecond
        if is_v2:
            yield "cpu.max", f"{quota} {CPU_PERIOD_US}"
        else:
            yield "cpu.cfs_period_us", str(CPU_PERIOD_US)
            yield "cpu.cfs_quota_us", str(quota)


def kill_members(folder: str) -> None:
    """Kills the members by pidfd, and only those that are still members once the pidfd is open: a PID may have been
    reused."""
    for _ in range(100):
        pidfds = {}
        for pid in members(folder):
            with contextlib.suppress(OSError):
                pidfds[pid] = os.pidfd_open(pid)
        if not pidfds:
            return
        still = set(members(folder))
        for pid, pidfd in pidfds.items():
            with contextlib.suppress(OSError):
                if pid in still:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        time.sleep(0.001)  # killed processes leave the group by themselves; a fork bomb needs another pass


def rmdir(folder: str, bound_s: float) -> bool:
    """Removes a group. Retries until `bound_s`, since the last member leaves it shortly after its parent reaped it."""
    give_up, pause_s = time.monotonic() + bound_s, 0.0005
    while True:
        try:
            os.rmdir(folder)
            return True
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= give_up:
                return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def is_own_process(pid: int) -> bool:
    """Whether it is this process or a descendant."""
    for _ in range(64):
        if pid == os.getpid():
            return True
        if pid <= 1:
            return False
        fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        pid = int(fields[1]) if fields else 0
    return False


def members(folder: str) -> list[int]:
    return [int(word) for word in read(os.path.join(folder, "cgroup.procs")).split() if word != "0"]


def folders_named(mount: str, name: str) -> list[str]:
    """Returns all groups of that name below `mount`, breadth first: in a tree that is too large, only deep ones are
    missed."""
    matches, ahead = list[str](), deque([mount])
    for _ in range(MAX_WALKED):
        if not ahead:
            return matches
        folder = ahead.popleft()
        for entry in folders_in(folder):
            (matches if entry == name else ahead).append(os.path.join(folder, entry))
    log.warning(
        "too many control groups to search all of them; groups of an earlier process may be left among the rest",
        extra={"mount": mount, "looked_at": MAX_WALKED, "group": name},
    )
    return matches


def folders_in(folder: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def open_all(paths: list[str], flags: int) -> list[int]:
    opened: list[int] = []
    try:
        for path in paths:
            opened.append(os.open(path, flags | os.O_CLOEXEC))
    except OSError:
        for fd in opened:
            os.close(fd)
        raise
    return opened


def write(path: str, value: str, is_optional: bool = False) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if is_optional:
            return
        raise
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def read(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read()
    return ""


def number(path: str) -> int:
    return int(read(path) or 0)


def field(path: str, name: str) -> int:
    for line in read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
