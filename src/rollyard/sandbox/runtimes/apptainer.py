"""Sandboxes of Apptainer (or Singularity, which has the same command line), for HPC clusters and their SIF images.

The init process creates the namespaces for network, PIDs and users, and assembles the root (a folder, or a SIF mounted
by squashfuse; layers; an overlay on disk, not Apptainer's 64 MB in memory). Apptainer runs on that root with only the
requested host paths mounted, and sets the image's environment. Its helper processes are in the init process's PID
namespace and end with it. It needs neither setuid programs nor its own network.

The user inside is root of a user namespace, without any capability; on the host it is the user that runs the service,
or an unprivileged uid. Without an image the root is the host's /usr, as with bubblewrap.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from rollyard.core.failure import SandboxStartFailed
from rollyard.sandbox.base import CONTROL_DIR, ImageKind, SandboxSpec
from rollyard.sandbox.launcher.program import MUST_MAP
from rollyard.sandbox.runtimes.host_root import SYSTEM, make_skeleton
from rollyard.sandbox.runtimes.launched import PATH
from rollyard.sandbox.runtimes.namespaced import NamespacedRuntime, StagedParts, Tree
from rollyard.sandbox.runtimes.user_namespaces import explained

INSTALL = "install Apptainer 1.1 or newer (https://apptainer.org), or load its module, and put it in PATH"

AT_ONCE = 4
"""Concurrent starts from one image: more of them compete for the same SIF and the same locks, and all get slower."""


class ApptainerRuntime(NamespacedRuntime):
    name: ClassVar[str] = "apptainer"
    image_kinds: ClassVar[tuple[ImageKind, ...]] = ("sif", "folder")
    namespaces: ClassVar[int | None] = 1  # Apptainer's own; commands inside cannot create any
    # A batch system sends these to every process of a job that it ends, and Apptainer's process forwards them. An agent
    # that sends them to itself cannot be distinguished, and is retried: the end of a job must not produce a reward.
    outside_statuses: ClassVar[frozenset[int]] = frozenset(
        128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGCONT, signal.SIGTERM)
    )

    async def __aenter__(self) -> Self:
        self._gates: dict[str | None, asyncio.Semaphore] = {}
        return await super().__aenter__()

    def _start_semaphore(self, spec: SandboxSpec) -> asyncio.Semaphore:
        return self._gates.setdefault(spec.image, asyncio.Semaphore(AT_ONCE))

    def _host_trees(self) -> list[Tree]:
        return [("skeleton", self._root / "skeleton", MUST_MAP)]

    def _make_host_files(self) -> None:
        make_skeleton(self._root / "skeleton")

    def _lowers(self) -> tuple[str, ...]:
        return ("skeleton",)

    def _command(self, spec: SandboxSpec, parts: StagedParts) -> tuple[str, list[str], dict[str, str]]:
        program = self._find("apptainer", "singularity", remedy=INSTALL)
        argv = [Path(program).name, "--silent", "exec", "--userns", "--containall", "--uts", "--cleanenv"]
        argv += [
            "--no-privs",
            "--no-mount",
            "sys,tmp,home,cwd,bind-paths,hostfs",
            "--no-home",
            "--writable",
            "--pwd",
            "/",
        ]
        binds = [(f"{parts.at}/control", CONTROL_DIR, True)]
        if not parts.has_image:
            binds.append(("/usr", "/usr", True))
            binds += [(f"/{name}", f"/{name}", True) for name in SYSTEM if _is_folder(Path("/", name))]
        binds += [(f"{parts.at}/{name}", inside, is_read_only) for name, inside, is_read_only in parts.binds]
        for host, inside, is_read_only in binds:
            argv += ["--bind", f"{host}:{inside}{':ro' if is_read_only else ''}"]
        return program, [*argv, parts.root, "cat"], _env(f"{parts.at}/own")

    def _explain(self, error: SandboxStartFailed) -> SandboxStartFailed:
        step, detail = error.data.get("step"), error.detail
        if step in ("namespaces", "mounts", "loopback", "proc"):
            detail = f"{explained()} ({detail})"
        elif step == "overlay" and "squashfuse" in detail:
            detail = f"{detail}; a SIF image needs /dev/fuse (chmod 666 /dev/fuse, or modprobe fuse)"
        elif step == "overlay":
            detail = (
                f"{detail}; it needs overlayfs in user namespaces (Linux 5.11 or newer), a data_dir that is not"
                " on an overlay or a network file system, and an image that belongs to the user who runs the service"
            )
        return error.with_detail(detail)

    async def probe(self) -> Mapping[str, str]:
        results: dict[str, str] = {}
        try:
            program = self._find("apptainer", "singularity", remedy=INSTALL)
        except SandboxStartFailed as error:
            return {"apptainer": error.detail}
        version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)  # noqa: ASYNC221
        results["apptainer"] = "ok" if version.returncode == 0 else version.stderr.strip()
        if await self._probe_start(results, "start", SandboxSpec(owner="probe")):
            await self._probe_features(results)
        return results


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _env(own: str) -> dict[str, str]:
    """Returns Apptainer's environment, without the service's: a leaked SLURM_* or PMI* variable could end its job."""
    return {"PATH": PATH, "HOME": own, "TMPDIR": own, "APPTAINER_CONFIGDIR": own, "APPTAINER_CACHEDIR": own}
