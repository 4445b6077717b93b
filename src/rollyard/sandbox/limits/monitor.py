"""The service's client of the resource monitor: sends what to watch, calls back, and restarts the monitor if it ends.

Invariants. `on_limit` is called at most once per `watch`, and never after `forget`. If the monitor ends, monitoring
pauses until another has started, at most a second: the client keeps all watches and sends them again. Nothing here
blocks, and nothing here kills: the caller does that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollyard.sandbox.launcher.message_socket import Message, MessageSocket, end_process
from rollyard.sandbox.limits import monitor_program

log = logging.getLogger("rollyard.sandbox")

AGAIN_S = 1.0
"""Time between two starts: a monitor that ends at once (no memory, no process left) is not restarted in a loop."""

_ENV_PASSED = ("LD_LIBRARY_PATH",)  # some Pythons need it to start

OnLimit = Callable[[str, str, str], None]
OnOom = Callable[[str, int], None]
OnPressure = Callable[[bool, Mapping[str, int]], None]


class MonitorClient:
    def __init__(
        self,
        on_limit: OnLimit,
        on_oom: OnOom | None = None,
        on_pressure: OnPressure | None = None,
        *,
        memory_reserve_bytes: int = 0,
        disk_reserve_bytes: int = 0,
        disk_reserve_files: int = 0,
        disk_path: Path | None = None,
    ) -> None:
        """`on_limit(id, "memory" | "processes" | "disk" | "files", detail)`, `on_oom(id, kills so far)`,
        `on_pressure(is_low, free)` when the machine falls below a reserve and when it has recovered, with its
        `memory_available_bytes`, `disk_free_bytes` and `disk_free_files`. All run on the event loop, and must not
        raise.
        """
        self._on_limit, self._on_oom, self._on_pressure = on_limit, on_oom, on_pressure
        self._reserves: Message = {
            "op": "machine",
            "memory_reserve_bytes": memory_reserve_bytes,
            "disk_reserve_bytes": disk_reserve_bytes if disk_path else 0,
            "disk_reserve_files": disk_reserve_files if disk_path else 0,
            "disk_path": str(disk_path) if disk_path else "",
            "is_low": False,  # as last reported: a restarted monitor must report the recovery
        }
        self._watched: dict[str, Message] = {}
        self._oom_kills: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: MessageSocket | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._started_at = float("-inf")
        self._is_closed = False
        if memory_reserve_bytes or self._reserves["disk_reserve_bytes"] or self._reserves["disk_reserve_files"]:
            self._open()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def watch(
        self,
        sandbox_id: str,
        *,
        pid: int,
        memory_bytes: int | None = None,
        processes: int | None = None,
        disk_bytes: int | None = None,
        files: int | None = None,
        disk_folders: Sequence[Path] = (),
        tmpfs_paths: Sequence[str] = (),
        event_files: Sequence[str] = (),
    ) -> None:
        """Monitors the limits that are set; those that the kernel enforces are None. `pid` is the init process's PID
        on the host.

        `disk_folders` are paths on the host; `tmpfs_paths` are paths of tmpfs mounts inside, whose use is memory;
        `event_files` are those of its cgroup (`Group.event_files`). A full pids group is a `processes` limit too.
        """
        message: Message = {
            "op": "watch",
            "id": sandbox_id,
            "pid": pid,
            "memory_bytes": memory_bytes,
            "processes": processes,
            "disk_bytes": disk_bytes,
            "files": files,
            "disk_folders": [str(folder) for folder in disk_folders],
            "tmpfs_paths": list(tmpfs_paths),
            "event_files": list(event_files),
        }
        self._watched[sandbox_id] = message
        self._oom_kills[sandbox_id] = 0
        if self._wire is not None:
            self._wire.post(message)
        elif self._retry is None:
            self._open()

    def forget(self, sandbox_id: str) -> None:
        if self._watched.pop(sandbox_id, None) is None:
            return
        self._oom_kills.pop(sandbox_id, None)
        if self._wire is not None:
            self._wire.post({"op": "forget", "id": sandbox_id})

    def _open(self) -> None:
        self._retry = None
        if self._is_closed:
            return
        self._started_at = time.monotonic()
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            argv = [sys.executable, "-I", "-S", monitor_program.__file__, str(child_end.fileno())]
            try:
                self._process = subprocess.Popen(
                    argv,
                    pass_fds=(child_end.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={key: os.environ[key] for key in _ENV_PASSED if key in os.environ},
                    start_new_session=True,
                )
            except OSError as error:
                own_end.close()
                log.warning("the resource monitor cannot be started", extra={"detail": str(error)})
                self._open_later()
                return
        self._wire = MessageSocket(own_end, self._on_message)
        self._wire.post(self._reserves)
        for message in self._watched.values():
            self._wire.post(message)

    def _open_later(self) -> None:
        wait_s = max(0.0, self._started_at + AGAIN_S - time.monotonic())
        self._retry = asyncio.get_running_loop().call_later(wait_s, self._open)

    def _on_message(self, message: Message | None, fds: list[int]) -> None:
        if message is None:
            self._on_end()
        elif message.get("event") == "pressure":
            self._reserves["is_low"] = message["is_low"]
            if self._on_pressure:
                names = ("memory_available_bytes", "disk_free_bytes", "disk_free_files")
                self._on_pressure(message["is_low"], {name: message[name] for name in names})
        elif message["id"] not in self._watched:
            return  # forgotten before the message arrived
        elif "limit" in message:
            self._watched.pop(message["id"])
            self._on_limit(message["id"], message["limit"], message["detail"])
        elif message["count"] > self._oom_kills[message["id"]]:  # a restarted monitor reports it again
            self._oom_kills[message["id"]] = message["count"]
            if self._on_oom:
                self._on_oom(message["id"], message["count"])

    def _on_end(self) -> None:
        self._wire = None
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            status = process.wait()
            log.warning("the resource monitor ended", extra={"status": status, "watched": len(self._watched)})
        self._open_later()

    async def close(self, bound_s: float = 5.0) -> None:
        """Ends the monitor and drops all watches. Idempotent."""
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        self._watched.clear()
        process, self._process = self._process, None
        if process is not None:
            await end_process(process, bound_s)
