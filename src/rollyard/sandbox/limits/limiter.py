"""Which limits a runtime's sandboxes have, and by what means: the kernel's where it can, a watch where it cannot.

    memory     a cgroup; else the warden ends a sandbox that is beyond it (and memfd, which it cannot see, is refused)
    processes  a cgroup; else RLIMIT_NPROC, which counts per sandbox because each has a user namespace of its own
    cpus       a cgroup; else none
    disk       the warden ends a sandbox that is beyond it
    files      likewise: files, folders and links that it has made
    open_files RLIMIT_NOFILE

A command that hits a limit fails by itself (no memory, no process, no room). A sandbox that stays beyond one is ended
with that as its reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path

from rollyard.sandbox.base import SandboxLimits
from rollyard.sandbox.limits.cgroups import Cgroups, Group
from rollyard.sandbox.limits.monitor import MonitorClient

log = logging.getLogger("rollyard.sandbox")

GIB = 1 << 30
DEFAULTS = SandboxLimits(memory_bytes=8 * GIB, processes=2048, disk_bytes=20 * GIB, open_files=4096, files=1_000_000)
"""For a task that names none: room for a large test suite, and none for a machine's death."""

MEMORY_RESERVE_BYTES = 256 << 20
DISK_RESERVE_BYTES = 512 << 20
DISK_RESERVE_FILES = 20_000
"""Inodes: the store, artifacts and folders of sandboxes that are at work need some hundreds."""

SHM = "/dev/shm"

UNWATCHED_S = 0.5
"""Most sandboxes that only judge are gone by then, and cost the warden nothing. A disk takes longer to fill."""

OnLimit = Callable[[str, str, str], None]


class Limiter:
    """One per runtime. `open` finds the means there are; `group`, `watch` and `forget` go along a sandbox's life."""

    def __init__(
        self,
        defaults: SandboxLimits = DEFAULTS,
        *,
        has_cgroups: bool = True,
        memory_reserve_bytes: int = MEMORY_RESERVE_BYTES,
        disk_reserve_bytes: int = DISK_RESERVE_BYTES,
        disk_reserve_files: int = DISK_RESERVE_FILES,
    ) -> None:
        """Below a reserve of the machine's memory, disk or inodes no sandbox is started until there is room again."""
        self._defaults = defaults
        self._memory_reserve_bytes, self._disk_reserve_bytes = memory_reserve_bytes, disk_reserve_bytes
        self._disk_reserve_files = disk_reserve_files
        self._has_cgroups = has_cgroups
        self._cgroups: Cgroups | None = None
        self._groups: dict[str, Group] = {}
        self._monitor: MonitorClient | None = None
        self._waiting: dict[str, asyncio.TimerHandle] = {}
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def open(self, root: Path, on_limit: OnLimit) -> None:
        if self._has_cgroups:
            self._cgroups = await asyncio.to_thread(Cgroups.find, mark_of(root))
            if self._cgroups is not None:
                await asyncio.to_thread(self._cgroups.sweep)
        self._monitor = MonitorClient(
            on_limit,
            self._on_oom,
            self._on_pressure,
            memory_reserve_bytes=self._memory_reserve_bytes,
            disk_reserve_bytes=self._disk_reserve_bytes,
            disk_reserve_files=self._disk_reserve_files,
            disk_path=root,
        )

    async def close(self) -> None:
        self._has_room.set()  # who still waits learns that all is closed
        if self._monitor is not None:
            await self._monitor.close()
        if self._cgroups is not None:
            await asyncio.to_thread(self._cgroups.close)

    # --- what is in force ---

    def _by_cgroup(self, what: str) -> bool:
        return self._cgroups is not None and what in self._cgroups.enforces

    @property
    def is_memory_watched(self) -> bool:
        return not self._by_cgroup("memory")

    def wanted(self, limits: SandboxLimits) -> SandboxLimits:
        """The task's own, else the defaults."""
        names = ("memory_bytes", "processes", "disk_bytes", "open_files", "cpus", "files")
        chosen = {name: getattr(limits, name) or getattr(self._defaults, name) for name in names}
        return SandboxLimits(**chosen)

    def rlimits(self, limits: SandboxLimits) -> tuple[dict[str, int], dict[str, str]]:
        """For each command, and the means of every limit."""
        wanted = self.wanted(limits)
        means = self._cgroups.means if self._cgroups is not None else ""
        found = {"RLIMIT_CORE": 0}
        names = ("memory", "processes", "cpus", "disk", "files", "open_files")
        in_force: dict[str, str] = dict.fromkeys(names, "none")
        if wanted.open_files is not None:
            found["RLIMIT_NOFILE"] = wanted.open_files
            in_force["open_files"] = "rlimit"
        if wanted.memory_bytes is not None:
            in_force["memory"] = means if self._by_cgroup("memory") else "watchdog"
        if wanted.processes is not None:
            found["RLIMIT_NPROC"] = wanted.processes
            in_force["processes"] = means if self._by_cgroup("processes") else "rlimit"
        if wanted.cpus is not None and self._by_cgroup("cpus"):
            in_force["cpus"] = means
        if wanted.disk_bytes is not None:
            in_force["disk"] = "watchdog"
        if wanted.files is not None:
            in_force["files"] = "watchdog"
        return found, in_force

    def describe(self) -> dict[str, str]:
        """For `doctor`: "ok" where the kernel enforces it, else what is done instead; and how to mend it."""
        mend = (
            "let the service have a cgroup of its own (systemd: Delegate=yes, or systemd-run --user --scope -p"
            " Delegate=yes rollyard serve)"
        )
        return {
            "memory limit": "ok" if self._by_cgroup("memory") else f"watched, not enforced by the kernel; {mend}",
            "cpu limit": "ok" if self._by_cgroup("cpus") else f"not enforced; {mend}",
        }

    # --- along a sandbox's life ---

    def group(self, name: str, limits: SandboxLimits) -> tuple[dict[str, object] | None, list[str]]:
        """The launcher's part of making its cgroup, and the folders that are to be removed when it has ended."""
        if self._cgroups is None:
            return None, []
        wanted = self.wanted(limits)
        group, work = self._cgroups.plan(name, wanted.memory_bytes, wanted.processes, wanted.cpus)
        self._groups[name] = group
        return {"is_v2": group.is_v2, "make": work}, group.unique_folders

    def watch(self, name: str, pid: int, upper: Path, limits: SandboxLimits) -> None:
        """What the kernel does not enforce, or enforces without telling; from the beginning only if that is memory."""
        if self.is_memory_watched:
            self._watch(name, pid, upper, limits)
        else:
            later = asyncio.get_running_loop().call_later(UNWATCHED_S, self._watch, name, pid, upper, limits)
            self._waiting[name] = later

    def _watch(self, name: str, pid: int, upper: Path, limits: SandboxLimits) -> None:
        assert self._monitor is not None
        self._waiting.pop(name, None)
        wanted, group = self.wanted(limits), self._groups.get(name)
        self._monitor.watch(
            name,
            pid=pid,
            memory_bytes=wanted.memory_bytes if self.is_memory_watched else None,
            processes=None if self._by_cgroup("processes") else wanted.processes,
            disk_bytes=wanted.disk_bytes,
            files=wanted.files,
            disk_folders=[upper],
            tmpfs_paths=[SHM] if self.is_memory_watched else [],
            event_files=group.event_files if group else [],
        )

    def watch_disk(self, name: str, pid: int, folder: Path, limits: SandboxLimits) -> None:
        """Only that: where somebody else, a container engine say, enforces the rest."""
        assert self._monitor is not None
        wanted = self.wanted(limits)
        self._monitor.watch(name, pid=pid, disk_bytes=wanted.disk_bytes, files=wanted.files, disk_folders=[folder])

    def oom_kills(self, name: str) -> int:
        """Processes that the kernel has killed at the memory limit so far."""
        group = self._groups.get(name)
        return group.events().oom_kills if group is not None else 0

    def host_kills(self, name: str) -> int:
        """Processes that the kernel has killed so far because the machine, not the sandbox, was short of memory."""
        group = self._groups.get(name)
        return group.events().host_kills if group is not None else 0

    def refused_forks(self, name: str) -> int:
        """Processes that the kernel has refused at the limit of processes so far."""
        group = self._groups.get(name)
        return group.events().processes_refused if group is not None else 0

    async def wait_for_room(self) -> None:
        await self._has_room.wait()

    def _on_oom(self, name: str, count: int) -> None:
        log.info("processes were killed at a sandbox's memory limit", extra={"sandbox": name, "count": count})

    def _on_pressure(self, is_low: bool, free: Mapping[str, int]) -> None:
        if is_low:
            log.warning("the machine is short of memory, disk or inodes: no sandbox is started", extra=free)
            self._has_room.clear()
        else:
            log.info("there is room for sandboxes again", extra=free)
            self._has_room.set()

    def forget(self, name: str) -> None:
        self._groups.pop(name, None)
        if (later := self._waiting.pop(name, None)) is not None:
            later.cancel()
        if self._monitor is not None:
            self._monitor.forget(name)


def mark_of(root: Path) -> str:
    """The same for every service on this root, and for no other: what an earlier one left is known by it."""
    return blake2b(os.fsencode(root), digest_size=8).hexdigest()
