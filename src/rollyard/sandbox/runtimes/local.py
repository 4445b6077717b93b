"""Sandboxes without isolation: commands run on this machine as this user, each sandbox in its own folder.

It is for trusted tasks and for machines without namespaces, and only where the operator allows it. Clean-up is best
effort: the init process is a subreaper, so every descendant stays below it, and it kills them all when its lifeline
closes. If a process kills the init process itself, the launcher cleans up. No limits are enforced except `open_files`.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from rollyard.core.failure import SandboxStartFailed
from rollyard.sandbox.base import WORKDIR, SandboxSpec
from rollyard.sandbox.doorway import BACKLOG
from rollyard.sandbox.launched_sandbox import LaunchedSandbox, SandboxPaths
from rollyard.sandbox.launcher.message_socket import Message
from rollyard.sandbox.runtimes.launched import PATH, LaunchedRuntime


class LocalRuntime(LaunchedRuntime):
    """Runs commands on the host. `cwd` and file calls map WORKDIR and CONTROL_DIR to host folders; commands do not.

    A command finds its folder in `$PWD` and `$HOME`.
    """

    name: ClassVar[str] = "local"
    is_isolated: ClassVar[bool] = False
    is_killed_by_signal: ClassVar[bool] = False
    can_reach_out: ClassVar[bool] = False  # commands have the host's network

    def _prepare(self, sandbox_id: str, spec: SandboxSpec) -> tuple[SandboxPaths, Message]:
        if spec.image is not None:
            raise SandboxStartFailed("the local runtime has no images; use bubblewrap")
        if spec.egress is not None:
            raise SandboxStartFailed("the local runtime cannot restrict a command to a list of hosts; use bubblewrap")
        if spec.binds:
            raise SandboxStartFailed("the local runtime cannot bind host paths; use bubblewrap")
        folder, control = self._root / sandbox_id, self._control / sandbox_id
        upper = folder / "upper"
        work, tmp = upper / WORKDIR.strip("/"), upper / "tmp"
        env = {"PATH": PATH, "HOME": str(work), "TMPDIR": str(tmp), "USER": "agent", "LANG": "C.UTF-8", **spec.env}
        limits = {"RLIMIT_CORE": 0}
        in_force = {"memory": "none", "processes": "none", "disk": "none", "files": "none", "open_files": "none"}
        if spec.limits.open_files is not None:
            limits["RLIMIT_NOFILE"] = spec.limits.open_files
            in_force["open_files"] = "rlimit"
        place = SandboxPaths(folder, upper, control, env, limits, in_force, is_mapped=False)
        folders = [control] if spec.layers else [folder, control, upper, work, tmp]
        return place, {"folders": [(str(path), 0o700) for path in folders]}

    async def _ready_to_start(self, place: SandboxPaths, spec: SandboxSpec) -> None:
        """Copies the layers, since they cannot be mounted."""
        if spec.layers:
            await asyncio.to_thread(place.folder.mkdir, mode=0o700)
        for layer in reversed(spec.layers):
            copying = asyncio.get_running_loop().run_in_executor(None, copy_tree, layer / "upper", place.upper)
            try:
                await asyncio.shield(copying)
            finally:  # cancelling does not stop the thread, which would write into files that are being deleted
                await asyncio.wait([copying])

    def _on_started(self, sandbox: LaunchedSandbox, place: SandboxPaths) -> None:
        """Opens the doorway on the host's loopback, where every user of this machine can reach it."""
        if sandbox.spec.has_doorway:
            self._init_clients[sandbox.id].doorway = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)

    async def probe(self) -> Mapping[str, str]:
        results: dict[str, str] = {}
        await self._probe_start(results, "start", SandboxSpec(owner="probe"))
        return results


def copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
