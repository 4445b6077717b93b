"""Sandboxes of bubblewrap: no root, no daemon, no network, about 10 ms each.

A sandbox has its own user, mount, PID, IPC, UTS and network namespaces; all capabilities are dropped, nested user
namespaces refused, system calls filtered, and the environment is clean. The root is the host's /usr read-only with a
private /workspace, /tmp and home, or an image (a folder or a SIF file) under a private overlay. The user inside is
1000.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from rollyard.core.failure import SandboxStartFailed
from rollyard.sandbox.base import CONTROL_DIR, WORKDIR, SandboxSpec
from rollyard.sandbox.launcher.program import AS_IT_IS
from rollyard.sandbox.runtimes.host_root import HOME, SYSTEM, UID, make_etc
from rollyard.sandbox.runtimes.launched import PATH
from rollyard.sandbox.runtimes.namespaced import NamespacedRuntime, StagedParts, Tree
from rollyard.sandbox.runtimes.user_namespaces import explained

INSTALL = "install it: apt-get install bubblewrap (0.8 or newer)"


class BubblewrapRuntime(NamespacedRuntime):
    name: ClassVar[str] = "bubblewrap"

    def _host_trees(self) -> list[Tree]:
        return [("etc", self._root / "etc", AS_IT_IS)]

    def _make_host_files(self) -> None:
        make_etc(self._root / "etc")

    def _lowers(self) -> tuple[str, ...]:
        return ()

    def _user_env(self) -> dict[str, str]:
        return {"PATH": PATH, "USER": "agent"}

    def _command(self, spec: SandboxSpec, parts: StagedParts) -> tuple[str, list[str], dict[str, str]]:
        program = self._find("bwrap", remedy=INSTALL)
        argv = ["--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        argv += ["--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox", "--cap-drop", "ALL"]
        if parts.has_image:
            argv += ["--bind", parts.root, "/"]
        else:
            argv += _host_root(parts.at)
        argv += ["--proc", "/proc", "--dev", "/dev", "--size", str(self._shm_bytes), "--tmpfs", "/dev/shm"]
        if not parts.has_image:
            for path in (WORKDIR, "/tmp", HOME):
                argv += ["--bind", parts.root + path, path]
        argv += ["--ro-bind", f"{parts.at}/control", CONTROL_DIR]
        for name, inside, is_read_only in parts.binds:
            argv += ["--ro-bind" if is_read_only else "--bind", f"{parts.at}/{name}", inside]
        # /proc too: bwrap makes /proc/sys read-only only if that *folder* is writable, which it never is. The kernel
        # lets host root write the files in it, and the sandbox's user is host root if root runs the service.
        # /proc/keys lists the keys of the user that runs the service: keys belong to users, not to namespaces.
        for path in ("/proc/keys", "/proc/key-users"):
            if Path(path).exists():
                argv += ["--ro-bind", "/dev/null", path]
        argv += ["--remount-ro", "/proc", "--remount-ro", "/dev"]
        argv += [*([] if parts.has_image else ["--remount-ro", "/"]), "--chdir", WORKDIR]
        return program, argv, {"PATH": PATH}

    def _explain(self, error: SandboxStartFailed) -> SandboxStartFailed:
        step, detail = error.data.get("step"), error.detail
        if step in ("namespaces", "mounts", "loopback", "proc") or (step == "bubblewrap" and "namespace" in detail):
            detail = f"{explained()} ({detail})"
        elif step == "overlay":
            detail = (
                f"{detail}; images and layers need overlayfs in user namespaces (Linux 5.11 or newer), must not be on"
                " an overlay themselves, and must belong to the user who runs the service"
            )
        elif step == "bubblewrap" and "Unknown option" in detail:
            detail = f"{detail}; {INSTALL}"
        return error.with_detail(detail)

    async def probe(self) -> Mapping[str, str]:
        results: dict[str, str] = {}
        try:
            program = self._find("bwrap", remedy=INSTALL)
        except SandboxStartFailed as error:
            return {"bubblewrap": error.detail}
        version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=5, check=False)  # noqa: ASYNC221
        results["bubblewrap"] = "ok" if version.returncode == 0 else version.stderr.strip()
        if await self._probe_start(results, "start", SandboxSpec(owner="probe")):
            await self._probe_features(results)
        return results


def _host_root(at: str) -> Iterator[str]:
    """Yields arguments that mount the host's programs without the host's other files."""
    yield from ("--ro-bind", "/usr", "/usr")
    for name in SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    yield from ("--ro-bind", f"{at}/etc", "/etc")
    yield from ("--dir", "/run", "--dir", "/var", "--symlink", "/tmp", "/var/tmp")
