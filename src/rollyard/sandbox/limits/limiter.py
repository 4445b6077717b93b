"""The limits of a runtime's sandboxes and their mechanisms: the kernel's if possible, else the resource monitor.

    memory     a cgroup; else the monitor ends a sandbox above it (memfd, which it cannot measure, is refused)
    processes  a cgroup; else RLIMIT_NPROC, which counts per sandbox because each has its own user namespace
    cpus       a cgroup; else none
    disk       the monitor ends a sandbox above it
    files      the same: files, folders and links that the sandbox has created
    open_files RLIMIT_NOFILE

A command that reaches a limit fails by itself (no memory, no process, no space). A sandbox that stays above a limit is
ended with that limit as the reason.
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
"""For a task that sets none: enough for a large test suite, too little to bring down a machine."""

MEMORY_RESERVE_BYTES = 256 << 20
DISK_RESERVE_BYTES = 512 << 20
DISK_RESERVE_FILES = 20_000
"""Inodes: the store, artifacts and folders of running sandboxes need some hundreds."""

SHM = "/dev/shm"

UNWATCHED_S = 0.5
"""Delay before a sandbox is monitored. Most EVAL sandboxes have ended by then and cost the monitor nothing. Filling a
disk takes longer."""

OnLimit = Callable[[str, str, str], None]


class Limiter:
    """Applies the limits of one runtime. `open` finds the available mechanisms; `group`, `watch` and `forget` are
    called for each sandbox."""

    def __init__(
        self,
        defaults: SandboxLimits = DEFAULTS,
        *,
        has_cgroups: bool = True,
        memory_reserve_bytes: int = MEMORY_RESERVE_BYTES,
        disk_reserve_bytes: int = DISK_RESERVE_BYTES,
        disk_reserve_files: int = DISK_RESERVE_FILES,
    ) -> None:
        """If the machine's free memory, disk or inodes fall below a reserve, no sandbox starts until they recover."""
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
        self._has_room.set()  # waiting callers then find the runtime closed
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

    def effective_limits(self, limits: SandboxLimits) -> SandboxLimits:
        """Returns the task's limits, with defaults for those that it does not set."""
        names = ("memory_bytes", "processes", "disk_bytes", "open_files", "cpus", "files")
        chosen = {name: getattr(limits, name) or getattr(self._defaults, name) for name in names}
        return SandboxLimits(**chosen)

    def rlimits(self, limits: SandboxLimits) -> tuple[dict[str, int], dict[str, str]]:
        """Returns the rlimits of each command, and the mechanism of every limit."""
        effective = self.effective_limits(limits)
        means = self._cgroups.means if self._cgroups is not None else ""
        rlimits = {"RLIMIT_CORE": 0}
        names = ("memory", "processes", "cpus", "disk", "files", "open_files")
        in_force: dict[str, str] = dict.fromkeys(names, "none")
        if effective.open_files is not None:
            rlimits["RLIMIT_NOFILE"] = effective.open_files
            in_force["open_files"] = "rlimit"
        if effective.memory_bytes is not None:
            in_force["memory"] = means if self._by_cgroup("memory") else "watchdog"
        if effective.processes is not None:
            rlimits["RLIMIT_NPROC"] = effective.processes
            in_force["processes"] = means if self._by_cgroup("processes") else "rlimit"
        if effective.cpus is not None and self._by_cgroup("cpus"):
            in_force["cpus"] = means
        if effective.disk_bytes is not None:
            in_force["disk"] = "watchdog"
        if effective.files is not None:
            in_force["files"] = "watchdog"
        return rlimits, in_force

    def describe(self) -> dict[str, str]:
        """For `doctor`: "ok" if the kernel enforces the limit, else what happens instead and how to fix it."""
        remedy = (
            "give the service its own cgroup (systemd: Delegate=yes, or systemd-run --user --scope -p"
            " Delegate=yes rollyard serve)"
        )
        return {
            "memory limit": "ok" if self._by_cgroup("memory") else f"watched, not enforced by the kernel; {remedy}",
            "cpu limit": "ok" if self._by_cgroup("cpus") else f"not enforced; {remedy}",
        }

    # --- for each sandbox ---

    def group(self, name: str, limits: SandboxLimits) -> tuple[dict[str, object] | None, list[str]]:
        """Returns the launcher's instructions to make its cgroup, and the folders to remove when it has ended."""
        if self._cgroups is None:
            return None, []
        effective = self.effective_limits(limits)
        group, work = self._cgroups.plan(name, effective.memory_bytes, effective.processes, effective.cpus)
        self._groups[name] = group
        return {"is_v2": group.is_v2, "make": work}, group.unique_folders

    def watch(self, name: str, pid: int, upper: Path, limits: SandboxLimits) -> None:
        """Monitors what the kernel does not enforce or report; from the start only if that includes memory."""
        if self.is_memory_watched:
            self._watch(name, pid, upper, limits)
        else:
            later = asyncio.get_running_loop().call_later(UNWATCHED_S, self._watch, name, pid, upper, limits)
            self._waiting[name] = later

    def _watch(self, name: str, pid: int, upper: Path, limits: SandboxLimits) -> None:
        assert self._monitor is not None
        self._waiting.pop(name, None)
        effective, group = self.effective_limits(limits), self._groups.get(name)
        self._monitor.watch(
            name,
            pid=pid,
            memory_bytes=effective.memory_bytes if self.is_memory_watched else None,
            processes=None if self._by_cgroup("processes") else effective.processes,
            disk_bytes=effective.disk_bytes,
            files=effective.files,
            disk_folders=[upper],
            tmpfs_paths=[SHM] if self.is_memory_watched else [],
            event_files=group.event_files if group else [],
        )

    def watch_disk(self, name: str, pid: int, folder: Path, limits: SandboxLimits) -> None:
        """Monitors only disk and files, where another program, such as a container engine, enforces the rest."""
        assert self._monitor is not None
        effective = self.effective_limits(limits)
        self._monitor.watch(
            name, pid=pid, disk_bytes=effective.disk_bytes, files=effective.files, disk_folders=[folder]
        )

    def oom_kills(self, name: str) -> int:
        """How many processes the kernel has killed at the memory limit so far."""
        group = self._groups.get(name)
        return group.events().oom_kills if group is not None else 0

    def host_kills(self, name: str) -> int:
        """How many processes the kernel has killed because the machine, not the sandbox, was short of memory."""
        group = self._groups.get(name)
        return group.events().host_kills if group is not None else 0

    def refused_forks(self, name: str) -> int:
        """How many processes the kernel has refused at the limit of processes so far."""
        group = self._groups.get(name)
        return group.events().processes_refused if group is not None else 0

    async def wait_for_room(self) -> None:
        await self._has_room.wait()

    def _on_oom(self, name: str, count: int) -> None:
        log.info("processes were killed at a sandbox's memory limit", extra={"sandbox": name, "count": count})

    def _on_pressure(self, is_low: bool, free: Mapping[str, int]) -> None:
        if is_low:
            log.warning("the machine is short of memory, disk or inodes; no sandbox is started", extra=free)
            self._has_room.clear()
        else:
            log.info("the machine has recovered; sandboxes are started again", extra=free)
            self._has_room.set()

    def forget(self, name: str) -> None:
        self._groups.pop(name, None)
        if (later := self._waiting.pop(name, None)) is not None:
            later.cancel()
        if self._monitor is not None:
            self._monitor.forget(name)


def mark_of(root: Path) -> str:
    """Returns a name that is unique to this root, so that groups left by an earlier service on it can be identified."""
    return blake2b(os.fsencode(root), digest_size=8).hexdigest()
