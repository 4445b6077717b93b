"""The resource monitor, which checks limits that the kernel does not enforce: `python -I -S monitor_program.py FD`.

    service ── watch, forget ──▶ monitor ──▶ /proc, once per tick for all sandboxes   memory, processes
            ◀── a limit, once ──        ├──▶ their folders, in slices of a walk       disk, files
                                        ├──▶ event files of their cgroups             OOM kills, refused forks
                                        └──▶ the machine's memory and disk            pressure

It is a separate process, so that sandboxes are monitored while the service is busy with ten thousand tokens, and so
that reading four thousand processes does not block the event loop. It only reports; the service kills.

Invariants. It uses at most `SHARE` of one core: a tick that cost more is followed by a longer pause. It reports a limit
once per `watch`. It reports the limit of processes only after `SUSTAINED_S` at the limit: a fork bomb, not a peak. A
walk of the disk starts when its file system has filled by a share of the limit, or after `WALK_S`. The monitor ends
when its socket closes. With nothing to watch it sleeps.
"""

# ruff: noqa: PTH100, PTH118, PTH120

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING or __package__:
    from rollyard.sandbox.launcher import kernel
    from rollyard.sandbox.limits import disk_walk as walk
    from rollyard.sandbox.limits import usage
else:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:0] = [here, os.path.join(os.path.dirname(here), "launcher")]
    import disk_walk as walk
    import kernel
    import usage

Message = dict[str, Any]

SHARE = 0.05  # of one core
TICK_S, TICK_MANY_S, MANY = 0.25, 1.0, 100  # a heap that grows by 1 GB/s reaches 1 GB in four ticks
SUSTAINED_S, SUSTAINED_TICKS = 3.0, 4
WALK_S = 30.0
FILLED = 1 / 16  # of its limit: growth of the file system, by any process, after which a sandbox is walked again
LEAST_SLICE_S = 0.002
RECOVERED = 1.1  # of a reserve: hysteresis, so that fluctuating pressure is reported once


class WatchedSandbox:
    """The limits and measurements of one sandbox."""

    def __init__(self, request: Message) -> None:
        self.id: str = request["id"]
        self.pid: int = request["pid"]
        self.memory_bytes: int | None = request["memory_bytes"]
        self.processes: int | None = request["processes"]
        self.disk_bytes: int | None = request["disk_bytes"]
        self.files: int | None = request.get("files")
        self.disk_folders: list[str] = request["disk_folders"]
        self.tmpfs_paths: list[str] = request["tmpfs_paths"]
        fields = usage.read(f"/proc/{self.pid}/stat").rpartition(b")")[2].split()
        self.start_time = int(fields[19]) if fields else -1
        self.inside, self.inside_paths, self.inside_at = 0, list[str](), float("-inf")
        self.walk: walk.DiskWalk | None = None
        self.walked_at, self.filled_at_walk = float("-inf"), (0, 0)
        self.full_since, self.full_ticks = 0.0, 0
        self.events = [file for path in request["event_files"] if (file := EventFile.opened(path))]
        if any(file.is_pids for file in self.events):
            self.processes = None  # the group's count is more precise

    def close(self) -> None:
        if self.walk:
            self.walk.stop()
        for file in self.events:
            file.close()

    def is_full_for_long(self, is_full: bool, now: float) -> bool:
        """Whether it was at the limit of processes in several consecutive ticks, over `SUSTAINED_S`."""
        if not is_full:
            self.full_ticks = 0
            return False
        if self.full_ticks == 0:
            self.full_since = now
        self.full_ticks += 1
        return self.full_ticks >= SUSTAINED_TICKS and now - self.full_since >= SUSTAINED_S


class EventFile:
    """An open file with a cgroup's counters: `oom_kill N` for memory, `max N` for pids."""

    def __init__(self, path: str, fd: int) -> None:
        self.fd, self.count = fd, 0
        self.is_pids = path.endswith("pids.events")
        self.current = path.removesuffix("events") + "current"
        self.most = usage.read(path.removesuffix("events") + "max").strip() if self.is_pids else b""
        self.name = b"max" if self.is_pids else b"oom_kill"

    @classmethod
    def opened(cls, path: str) -> EventFile | None:
        with contextlib.suppress(OSError):
            return cls(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return None

    def has_risen(self) -> bool:
        before = self.count
        with contextlib.suppress(OSError):  # the group is gone
            for line in os.pread(self.fd, 4096, 0).splitlines():
                key, _, value = line.partition(b" ")
                if key == self.name:
                    self.count = int(value)
        return self.count > before

    def is_full(self) -> bool:
        """Whether a pids group is at its limit, even if no more forks are tried."""
        return self.most.isdigit() and int(usage.read(self.current) or 0) >= int(self.most)

    def close(self) -> None:
        os.close(self.fd)


class ResourceMonitor:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.watched: dict[str, WatchedSandbox] = {}
        self.memory = usage.Memory()
        self.has_swap = False
        self.reserves: Message = {
            "memory_reserve_bytes": 0,
            "disk_reserve_bytes": 0,
            "disk_reserve_files": 0,
            "disk_path": "",
        }
        self.is_low = False
        self.machine_at = float("-inf")
        self.process_table: dict[int, usage.Process] | None = None

    def serve(self) -> NoReturn:
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        pause_s: float | None = None
        while True:
            wake_at = None if pause_s is None else time.monotonic() + pause_s
            while poller.poll(None if wake_at is None else max(0.0, wake_at - time.monotonic()) * 1000):
                message, _ = kernel.receive(self.sock)
                if message is None:
                    os._exit(0)
                self.handle(message)
                if wake_at is None:
                    break
            pause_s = self.tick()

    def handle(self, message: Message) -> None:
        if message["op"] == "machine":
            self.reserves, self.is_low = message, message["is_low"]
            return
        if previous := self.watched.pop(message["id"], None):
            previous.close()
        if message["op"] == "watch":
            self.watched[message["id"]] = WatchedSandbox(message)

    def tick(self) -> float | None:
        """Checks everything once. Returns the pause until the next tick; None: until the next message."""
        names = ("memory_reserve_bytes", "disk_reserve_bytes", "disk_reserve_files")
        has_reserves = any(self.reserves[name] for name in names)
        if not self.watched and not has_reserves:
            return None
        tick_s = TICK_S if len(self.watched) <= MANY else TICK_MANY_S
        started_at, used = time.monotonic(), time.process_time()
        self.process_table = None
        self.check_machine(started_at, bool(has_reserves))
        for watched in list(self.watched.values()):
            self.check_events(watched, started_at)
        self.check_processes(started_at)
        spent = time.process_time() - used
        self.check_disks(started_at, max(LEAST_SLICE_S, SHARE * tick_s - spent))
        spent = time.process_time() - used
        return max(tick_s - (time.monotonic() - started_at), spent / SHARE, 0.01)

    def report(self, watched: WatchedSandbox, limit: str, detail: str) -> None:
        kernel.send(self.sock, {"id": watched.id, "limit": limit, "detail": detail})
        self.watched.pop(watched.id).close()

    # --- checks ---

    def check_machine(self, now: float, has_reserves: bool) -> None:
        if now - self.machine_at < 1.0:
            return
        self.machine_at = now
        available, self.has_swap = usage.machine()
        if not has_reserves:
            return
        free, free_files = 0, 0
        with contextlib.suppress(OSError):
            fs_stat = os.statvfs(self.reserves["disk_path"] or "/")
            free = fs_stat.f_bavail * fs_stat.f_frsize
            free_files = fs_stat.f_favail if fs_stat.f_files else 1 << 62  # Btrfs does not limit inodes
        factor = RECOVERED if self.is_low else 1.0
        is_low = available < factor * self.reserves["memory_reserve_bytes"]
        is_low = is_low or free < factor * self.reserves["disk_reserve_bytes"]
        is_low = is_low or free_files < factor * self.reserves["disk_reserve_files"]
        if is_low != self.is_low:
            self.is_low = is_low
            numbers = {"memory_available_bytes": available, "disk_free_bytes": free, "disk_free_files": free_files}
            kernel.send(self.sock, {"event": "pressure", "is_low": is_low, **numbers})

    def check_events(self, watched: WatchedSandbox, now: float) -> None:
        for file in watched.events:
            has_risen = file.has_risen()
            if not file.is_pids:
                if has_risen:
                    kernel.send(self.sock, {"id": watched.id, "event": "oom_kill", "count": file.count})
            elif watched.is_full_for_long(has_risen or file.is_full(), now):
                self.report(watched, "processes", f"at the limit for {SUSTAINED_S:g} s; {file.count} more were refused")
                return

    def check_processes(self, now: float) -> None:
        """Reads /proc once, and only if a sandbox's memory or processes must be counted."""
        counted = [
            watched
            for watched in self.watched.values()
            if watched.memory_bytes is not None or watched.processes is not None
        ]
        for watched, tree in self.trees_of(counted):
            process_table = self.process_table or {}
            if watched.memory_bytes is not None:
                used = self.memory.of(
                    tree, process_table, self.tmpfs_bytes(watched, tree, now), watched.memory_bytes, self.has_swap
                )
                if used > watched.memory_bytes:
                    self.report(watched, "memory", f"{used} of {watched.memory_bytes} bytes")
                    continue
            if watched.processes is not None:
                count = sum(process_table[pid].threads for pid in tree)
                if watched.is_full_for_long(count >= watched.processes, now):
                    self.report(watched, "processes", f"{count} of {watched.processes} for {SUSTAINED_S:g} s")

    def trees_of(self, some: list[WatchedSandbox]) -> list[tuple[WatchedSandbox, list[int]]]:
        """Returns those whose init process is still the same process, with all its descendants."""
        if some and self.process_table is None:
            self.process_table = usage.processes()
        process_table = self.process_table or {}
        init_clients = {watched.pid: watched for watched in some if watched.pid in process_table}
        trees = usage.trees(init_clients, process_table)
        return [
            (init_clients[pid], trees[pid])
            for pid in init_clients
            if process_table[pid].start_time == init_clients[pid].start_time
        ]

    def tmpfs_bytes(self, watched: WatchedSandbox, tree: list[int], now: float) -> int:
        for _ in range(2 if watched.tmpfs_paths else 0):
            if not watched.inside and now - watched.inside_at >= 1.0:
                watched.inside, watched.inside_paths = self.memory.find_tmpfs(tree, watched.tmpfs_paths)
                watched.inside_at = now
            try:
                return usage.tmpfs_bytes(watched.inside, watched.inside_paths)
            except OSError:  # that process ended; another one has the same mounts
                watched.inside, watched.inside_paths, watched.inside_at = 0, [], float("-inf")
        return 0

    def check_disks(self, now: float, slice_s: float) -> None:
        """Walks the sandboxes that have waited longest first, until the time slice is used up."""
        until = time.monotonic() + slice_s
        filled: dict[str, tuple[int, int]] = {}
        on_disk = [
            watched for watched in self.watched.values() if watched.disk_bytes is not None or watched.files is not None
        ]
        for watched in sorted(on_disk, key=lambda watched: watched.walked_at):
            if watched.walk is None:
                is_due, level = self.is_walk_due(watched, now, filled)
                if not is_due:
                    continue
                watched.walk = self.new_walk(watched)
                watched.filled_at_walk = level
            watched.walk.continue_until(until)
            if watched.walk.is_done:
                walk, watched.walk, watched.walked_at = watched.walk, None, now
                if walk.over == "files":
                    self.report(watched, "files", f"at least {walk.used_files} of {watched.files} files")
                elif walk.over:
                    self.report(watched, "disk", f"at least {walk.used_bytes} of {watched.disk_bytes} bytes")
            if time.monotonic() >= until:
                return

    def is_walk_due(
        self, watched: WatchedSandbox, now: float, filled: dict[str, tuple[int, int]]
    ) -> tuple[bool, tuple[int, int]]:
        """Returns whether a walk is due, and the current use of its file systems in bytes and in files."""
        size, files = 0, 0
        for folder in watched.disk_folders:
            if folder not in filled:
                filled[folder] = 0, 0
                with contextlib.suppress(OSError):
                    fs_stat = os.statvfs(folder)
                    filled[folder] = (
                        (fs_stat.f_blocks - fs_stat.f_bfree) * fs_stat.f_frsize,
                        fs_stat.f_files - fs_stat.f_ffree,
                    )
            size, files = size + filled[folder][0], files + filled[folder][1]
        # Space that others freed meanwhile must not hide what this sandbox used.
        before = watched.filled_at_walk
        watched.filled_at_walk = then = min(before[0], size), min(before[1], files)
        has_filled = watched.disk_bytes is not None and size - then[0] > watched.disk_bytes * FILLED
        has_filled = has_filled or (watched.files is not None and files - then[1] > watched.files * FILLED)
        return has_filled or now - watched.walked_at >= WALK_S, (size, files)

    def new_walk(self, watched: WatchedSandbox) -> walk.DiskWalk:
        def tree() -> list[int]:
            return [pid for _, below in self.trees_of([watched]) for pid in below]

        most_bytes = math.inf if watched.disk_bytes is None else watched.disk_bytes
        most_files = math.inf if watched.files is None else watched.files
        return walk.DiskWalk(watched.disk_folders, most_bytes, tree, usage.tmpfs_devices, most_files)


def main() -> NoReturn:
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two event files per sandbox
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        ResourceMonitor(sock).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
