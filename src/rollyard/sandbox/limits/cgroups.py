"""Limits that the kernel enforces: one control group per sandbox, by the best mechanism that this machine has.

    delegated cgroup v2 ── a v2 scope from systemd ── cgroup v1 as root ── None: only rlimits and the resource monitor

All groups of a runtime are below one folder named after its `mark`, inside the current group of this process, so that
limits of the service apply to its sandboxes too. Only if that group cannot be divided, the next one above is used. In
v2 a group with processes cannot give controllers to groups below it: this process then first moves itself (and its
children) into a leaf `rollyard-service`.

Invariants. `find` tests what it returns: it makes a group, sets every limit and removes it. `sweep` ends and removes
only groups with this runtime's mark. Groups contain no processes of the host: the sandbox's first process enters a
group, and no process leaves it.

Entering. In v1 the single-threaded process itself writes "0" to each descriptor of `open_procs`. These are the `tasks`
files, not `cgroup.procs`: only then does the kernel move the process without the lock that stops all forks, which waits
for an RCU grace period (measured on an idle 6.18 kernel: 0.09 ms for three hierarchies, against 11 to 16 ms). In v2 a
write to `cgroup.procs` always takes that lock, but clone3 avoids it: CLONE_INTO_CGROUP with `open_folder`.
"""

# Kernel files by raw path: pathlib would add more time than the calls take.
# ruff: noqa: PTH102, PTH118, PTH119, PTH120

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rollyard.sandbox.limits import cgroup_files as files

Means = Literal["cgroup v2", "systemd", "cgroup v1"]

LEAF = "rollyard-service"
BUS_S = 5.0

_V1_USAGE = "memory.usage_in_bytes"
_BATCH_BYTES = 8 << 20  # more than the kernel charges at once, with pages of 64 KiB as well
_CONTROLLERS = {"memory": "memory", "processes": "pids", "cpus": "cpu"}


@dataclass(frozen=True, slots=True)
class GroupEvents:
    oom_kills: int  # processes killed at this group's own memory limit
    host_kills: int  # processes killed because a group above it, or the whole machine, was short of memory
    processes_refused: int
    memory_bytes: int  # now, page cache included
    processes: int  # now, threads included


class Group:
    """The control group of one sandbox. `folders` has one per controller that limits it; in v2 all are the same."""

    def __init__(self, folders: Mapping[str, str], is_v2: bool) -> None:
        self.folders, self.is_v2 = folders, is_v2
        self._unique = list(dict.fromkeys(folders.values()))

    @property
    def unique_folders(self) -> list[str]:
        return self._unique

    @property
    def procs_files(self) -> list[str]:
        """The files to which an entering process writes "0", as the module's docstring explains."""
        return [os.path.join(folder, "cgroup.procs" if self.is_v2 else "tasks") for folder in self._unique]

    def open_procs(self) -> list[int]:
        """Opens them. The kernel checks the permissions of the opener, so an unprivileged process can then enter."""
        return files.open_all(self.procs_files, os.O_WRONLY)

    def open_folder(self) -> int | None:
        """Opens the folder for clone3 with CLONE_INTO_CGROUP. None in v1, which does not support it, and without
        limits."""
        if not self.is_v2 or not self._unique:
            return None
        return os.open(self._unique[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def event_files(self) -> list[str]:
        """The files that the resource monitor reads."""
        names = {"memory": "memory.events" if self.is_v2 else "memory.oom_control", "pids": "pids.events"}
        return [os.path.join(folder, names[key]) for key, folder in self.folders.items() if key in names]

    def events(self) -> GroupEvents:
        """Reads the counters; zero for what is not limited, or if the group is gone."""
        memory, pids = self.folders.get("memory", ""), self.folders.get("pids", "")
        kills, used = ("memory.events", "memory.current") if self.is_v2 else ("memory.oom_control", _V1_USAGE)
        # The kernel counts a kill in the group of the process, whichever group's limit caused it.
        killed = files.field(os.path.join(memory, kills), "oom_kill")
        is_own = killed and self._was_full(memory)
        return GroupEvents(
            oom_kills=killed if is_own else 0,
            host_kills=0 if is_own else killed,
            processes_refused=files.field(os.path.join(pids, "pids.events"), "max"),
            memory_bytes=files.number(os.path.join(memory, used)),
            processes=files.number(os.path.join(pids, "pids.current")),
        )

    def _was_full(self, memory: str) -> bool:
        """Whether its own limit was ever reached. v1 does not count refusals (Linux 6.18), so there the highest use is
        compared with the limit, less one batch of pages. Page cache counts as use: in v1, a sandbox that once filled
        its limit with it is blamed for a later kill by the machine."""
        if self.is_v2:
            return files.field(os.path.join(memory, "memory.events"), "oom") > 0
        limit = files.number(os.path.join(memory, "memory.limit_in_bytes"))
        return files.number(os.path.join(memory, "memory.max_usage_in_bytes")) >= limit - max(limit >> 5, _BATCH_BYTES)

    def kill(self) -> None:
        """Kills all its processes: by cgroup.kill, which no fork can evade, or one by one until there are no more."""
        for folder in self._unique:
            try:
                files.write(os.path.join(folder, "cgroup.kill"), "1")
            except OSError:  # v1, or Linux before 5.14
                files.kill_members(folder)

    def remove(self, bound_s: float = 1.0) -> bool:
        """Removes the group. Returns False if it still has processes after `bound_s`. Kills nothing."""
        remaining = [folder for folder in self._unique if not files.rmdir(folder, bound_s)]  # tries each
        return not remaining


class Cgroups:
    """The control groups of one runtime. Calls block, well below a millisecond except `find`, `sweep` and `close`."""

    def __init__(self, means: Means, mark: str, roots: Mapping[str, str], mounts: list[str]) -> None:
        self.means: Means = means
        self._name, self._roots, self._mounts = f"rollyard-{mark}", roots, mounts

    @property
    def enforces(self) -> frozenset[str]:
        return frozenset(limit for limit, controller in _CONTROLLERS.items() if controller in self._roots)

    @classmethod
    def find(cls, mark: str) -> Cgroups | None:
        """Returns the best mechanism that works here for memory and processes; else the first that limits anything."""
        partial: Cgroups | None = None
        steps: list[Callable[[str], Cgroups | None]] = [find_v2, _find_by_systemd, _find_v1]
        for step in steps:
            with contextlib.suppress(OSError):
                if (cgroups := step(mark)) is None:
                    continue
                if {"memory", "processes"} <= cgroups.enforces:
                    if partial:
                        partial.close()
                    return cgroups
                partial = partial or cgroups
        return partial

    def plan(
        self, name: str, memory_bytes: int | None, processes: int | None, cpus: float | None
    ) -> tuple[Group, list[tuple[str, list[tuple[str, str, bool]]]]]:
        """Returns a group that is still to be made: each folder, with (file, value, is optional) to write in it.

        None is no limit. A limit that is not in `enforces` is left out: the caller reports it.
        """
        limits = {"memory": memory_bytes, "pids": processes, "cpu": cpus}
        folders = {
            controller: os.path.join(root, name)
            for controller, root in self._roots.items()
            if limits[controller] is not None
        }
        group = Group(folders, is_v2=self.means != "cgroup v1")
        work: dict[str, list[tuple[str, str, bool]]] = {folder: [] for folder in folders.values()}
        for controller, folder in folders.items():
            settings = files.settings(controller, limits[controller] or 0, group.is_v2)
            work[folder] += [(file, value, file in files.SWAP) for file, value in settings]
        return group, list(work.items())

    def make(self, name: str, memory_bytes: int | None, processes: int | None, cpus: float | None) -> Group:
        """Makes a new, empty group. Raises OSError, and leaves nothing, if the kernel refuses one of its limits."""
        group, work = self.plan(name, memory_bytes, processes, cpus)
        created: list[str] = []
        try:
            for folder, settings in work:
                os.mkdir(folder)
                created.append(folder)
                for file, value, is_optional in settings:
                    files.write(os.path.join(folder, file), value, is_optional=is_optional)
        except OSError:
            for folder in created:
                files.rmdir(folder, 0.0)
            raise
        return group

    def probe(self) -> None:
        """Makes and removes a group with every kind of limit."""
        group = self.make(f"probe-{os.getpid()}", 1 << 26, 16, 1.0)
        try:
            for fd in group.open_procs():
                os.close(fd)
        finally:
            group.remove()

    def sweep(self) -> int:
        """Ends and removes the groups that an earlier process with this mark left. Call it before the first `make`."""
        roots = dict.fromkeys(self._roots.values())  # the current roots first: no tree is too large to include them
        roots |= dict.fromkeys(root for mount in self._mounts for root in files.folders_named(mount, self._name))
        leftovers = [os.path.join(root, entry) for root in roots for entry in files.folders_in(root)]
        for folder in leftovers:
            group = Group({"any": folder}, is_v2=self.means != "cgroup v1")
            group.kill()
            group.remove()
        for root in roots:
            if root not in self._roots.values():
                files.rmdir(root, 0.0)
        return len(leftovers)

    def close(self) -> None:
        """Removes the folder of all groups, if it is empty."""
        for root in dict.fromkeys(self._roots.values()):
            files.rmdir(root, 0.0)


def group_of(pid: int) -> Group:
    """Returns the group into which another program, such as a container engine, put a process; without folders if it is
    this process's own group."""
    own_groups, process_groups = files.own_folders("/proc"), files.own_folders("/proc", str(pid))
    is_v2 = "memory" not in process_groups
    folders = {key: process_groups.get("" if is_v2 else key) for key in ("memory", "pids")}
    shared = {own_groups.get(key) for key in own_groups}
    return Group({key: at[0] for key, at in folders.items() if at is not None and at not in shared}, is_v2)


# --- the mechanisms -----------------------------------------------------------------------------------


def find_v2(mark: str, *, means: Means = "cgroup v2", proc: str = "/proc") -> Cgroups | None:
    """Finds a part of the v2 tree that this process may divide. Tests set `proc` to describe their own tree."""
    at = files.own_folders(proc).get("")
    if at is None:
        return None
    base, mount = at
    if os.path.basename(base) == LEAF:  # another runtime of this process has moved it already
        base = os.path.dirname(base)
    available = set(_CONTROLLERS.values()) & set(files.read(os.path.join(base, "cgroup.controllers")).split())
    if not available or not os.access(os.path.join(base, "cgroup.procs"), os.W_OK):
        return None
    delegated = _delegate(base, available)
    if delegated != available:
        delegated = _move_to_leaf_and_delegate(base, available)
    if not {"memory", "pids"} <= delegated and (above := _above(base, mount)) is not None:
        base, delegated = above
    if not delegated:
        return None
    root = os.path.join(base, f"rollyard-{mark}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(root)
    controllers = _delegate(root, delegated)
    return _probed(Cgroups(means, mark, {name: root for name in _CONTROLLERS.values() if name in controllers}, [mount]))


def _above(base: str, mount: str) -> tuple[str, set[str]] | None:
    """Returns the nearest group above that already gives memory and pids down and is writable, usually only for root.

    Nothing is changed there. The limits of this process's own group then do not apply to the sandboxes.
    """
    while base != mount and len(base) > len(mount):
        base = os.path.dirname(base)
        delegated = set(_CONTROLLERS.values()) & set(files.read(os.path.join(base, "cgroup.subtree_control")).split())
        if {"memory", "pids"} <= delegated and os.access(os.path.join(base, "cgroup.procs"), os.W_OK):
            return base, delegated
    return None


def _delegate(folder: str, controllers: set[str]) -> set[str]:
    """Enables these controllers for groups below `folder`. Returns those that are then enabled."""
    path = os.path.join(folder, "cgroup.subtree_control")
    for controller in controllers - set(files.read(path).split()):
        with contextlib.suppress(OSError):
            files.write(path, f"+{controller}")
    return controllers & set(files.read(path).split())


def _move_to_leaf_and_delegate(base: str, controllers: set[str]) -> set[str]:
    """Moves this process and its descendants into a leaf, since a v2 group with processes cannot give controllers. If
    no controller can be given, because other processes remain, moves them back."""
    leaf, moved = os.path.join(base, LEAF), list[int]()
    with contextlib.suppress(FileExistsError):
        os.mkdir(leaf)
    for pid in files.members(base):
        if files.is_own_process(pid):
            with contextlib.suppress(ProcessLookupError):
                files.write(os.path.join(leaf, "cgroup.procs"), str(pid))
                moved.append(pid)
    delegated = _delegate(base, controllers)
    if not delegated:
        for pid in moved:
            with contextlib.suppress(OSError):
                files.write(os.path.join(base, "cgroup.procs"), str(pid))
        files.rmdir(leaf, 0.1)
    return delegated


def _find_by_systemd(mark: str) -> Cgroups | None:
    """Requests a delegated scope for this process from systemd (the user's, unless run as root), then uses v2.

    `systemd-run --scope` makes the same call for a new command.
    """
    at = files.own_folders("/proc").get("")
    if at is None or "memory" not in files.read(os.path.join(at[1], "cgroup.controllers")).split():
        return None  # the v2 tree has no controllers: a scope in it would limit nothing
    unit = f"rollyard-{mark}-{os.getpid()}.scope"
    bus = ["busctl", "--system" if os.geteuid() == 0 else "--user", f"--timeout={BUS_S}", "call"]
    service = ["org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager"]
    properties = ["2", "PIDs", "au", "1", str(os.getpid()), "Delegate", "b", "true"]
    call = [*bus, *service, "StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "fail", *properties, "0"]
    try:
        subprocess.run(call, check=True, capture_output=True, timeout=2 * BUS_S, stdin=subprocess.DEVNULL)
    except (subprocess.SubprocessError, OSError):
        return None
    give_up = time.monotonic() + BUS_S
    while unit not in files.read("/proc/self/cgroup"):  # the answer only means that the job is queued
        if time.monotonic() > give_up:
            return None
        time.sleep(0.01)
    return find_v2(mark, means="systemd")


def _find_v1(mark: str) -> Cgroups | None:
    """Finds the v1 hierarchies, one per controller, that this process may write to."""
    own, roots, mounts = files.own_folders("/proc"), dict[str, str](), list[str]()
    for controller in _CONTROLLERS.values():
        if controller not in own:
            continue
        base, mount = own[controller]
        root = os.path.join(base, f"rollyard-{mark}")
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                os.mkdir(root)
            with contextlib.suppress(OSError):  # for Linux before 5.11; later it is always on
                files.write(os.path.join(root, "memory.use_hierarchy"), "1")
            if _probed(Cgroups("cgroup v1", mark, {controller: root}, [mount])):
                roots[controller] = root
                mounts.append(mount)
    return Cgroups("cgroup v1", mark, roots, mounts) if roots else None


def _probed(cgroups: Cgroups) -> Cgroups | None:
    try:
        cgroups.probe()
    except OSError:
        cgroups.close()
        return None
    return cgroups if cgroups.enforces else None
