"""The base class of bubblewrap and Apptainer: the parts from which a sandbox is assembled, and its limits.

The init process (see `sandbox/launcher/program.py`) gets a *stage*: host trees under short names in one folder. `own`
is the sandbox's folder (`upper` and `work` of its overlay), `image` or `sif` its image, `l0`… its layers, `b0`… its
binds, `control` the folder of commands. From these it mounts `root`, on which bwrap or Apptainer runs.

A service run as root gives each sandbox its own unprivileged uid. On disk all files belong to root; idmapped mounts
(Linux 5.19 for overlays) show them as the sandbox's, so that a layer made by one uid can be used by another.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import tempfile
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from rollyard.core.failure import SandboxStartFailed
from rollyard.sandbox.base import CONTROL_DIR, WORKDIR, Bind, ImageKind, SandboxEnd, SandboxSpec
from rollyard.sandbox.doorway import DOORWAY_PORT
from rollyard.sandbox.egress.base import EGRESS_PORT
from rollyard.sandbox.launched_sandbox import LaunchedSandbox, SandboxPaths
from rollyard.sandbox.launcher import seccomp
from rollyard.sandbox.launcher.message_socket import Message
from rollyard.sandbox.launcher.program import AS_IT_IS, MAY_MAP, MUST_MAP
from rollyard.sandbox.limits.limiter import Limiter
from rollyard.sandbox.runtimes.launched import LaunchedRuntime
from rollyard.sandbox.runtimes.sif import squashfs_offset

HOME = "/home/agent"

UIDS = range(200_000, 265_536)
"""Uids on the host for the sandboxes of a service run as root. They have no accounts."""

Tree = tuple[str, Path, int]
"""A name in the stage, the path mounted there, and whether the sandbox's user must own it."""

_STAGES = ("/media", "/srv", "/mnt", "/boot", "/home")
"""Standard Linux folders that neither bwrap nor Apptainer needs. The stage hides one of them, only from these."""

_BAD = frozenset(":,\\")


@dataclass(frozen=True, slots=True)
class StagedParts:
    """The parts in the stage from which a runtime builds its command line."""

    at: str  # the stage
    has_image: bool
    root: str  # the sandbox's own files: the overlay, or the upper folder itself
    binds: tuple[tuple[str, str, bool], ...]  # (name in the stage, inside, is read-only)


class NamespacedRuntime(LaunchedRuntime):
    is_isolated: ClassVar[bool] = True
    image_kinds: ClassVar[tuple[ImageKind, ...]] = ("folder", "sif")
    namespaces: ClassVar[int | None] = None  # limit of user namespaces inside the init process's; None: unlimited

    def __init__(
        self,
        *,
        root: Path,
        control_root: Path | None = None,
        program: str | None = None,
        uids: range | None = UIDS,
        limiter: Limiter | None = None,
        shm_bytes: int = 256 << 20,
        start_s: float = 60.0,
        kill_s: float = 10.0,
        max_starting: int | None = None,
    ) -> None:
        """`program` is the runtime's path if not in PATH; `uids` are for a service run as root (None: stay root)."""
        super().__init__(
            root=root, control_root=control_root, start_s=start_s, kill_s=kill_s, max_starting=max_starting
        )
        self._program = program
        self._program_path: str | None = None
        self._shm_bytes = shm_bytes
        self._uids = list(reversed(uids)) if uids is not None and os.geteuid() == 0 else []
        self._has_uids = bool(self._uids)
        self._limiter = limiter or Limiter()
        self._refused = ""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            await self._limiter.open(self._root, self._over_limit)
            self._refused = base64.b64encode(seccomp.program(refuse_memfd=self._limiter.is_memory_watched)).decode()
            await asyncio.to_thread(self._make_host_files)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        await super().close()
        await self._limiter.close()

    # --- hooks of a runtime ---

    @abstractmethod
    def _command(self, spec: SandboxSpec, parts: StagedParts) -> tuple[str, list[str], dict[str, str]]:
        """Returns program, arguments and environment that create the inner namespaces with an idle process in them."""

    @abstractmethod
    def _host_trees(self) -> list[Tree]:
        """Returns the trees that form a root of the host's programs in the stage, for a sandbox without an image."""

    @abstractmethod
    def _make_host_files(self) -> None:
        """Creates the files of these trees that are not the host's own; called whenever the runtime is opened."""

    @abstractmethod
    def _lowers(self) -> tuple[str, ...]:
        """Returns those trees that are the lowest layer of the overlay; if empty, only layers need an overlay."""

    def _user_env(self) -> dict[str, str]:
        return {}

    def _find(self, *names: str, remedy: str) -> str:
        if self._program_path is None:
            candidates = (self._program,) if self._program else names
            self._program_path = next((path for name in candidates if (path := shutil.which(name))), None)
        if self._program_path is None:
            raise SandboxStartFailed(f"{self._program or names[0]} was not found; {remedy}", step="program")
        return self._program_path

    # --- a start ---

    def _prepare(self, sandbox_id: str, spec: SandboxSpec) -> tuple[SandboxPaths, Message]:
        folder, control = self._root / sandbox_id, self._control / sandbox_id
        upper = folder / "own" / "upper"
        trees: list[Tree] = [("own", folder / "own", MUST_MAP), ("control", control, AS_IT_IS)]
        lowers = [f"l{number}" for number in range(len(spec.layers))]
        for name, layer in zip(lowers, spec.layers, strict=True):
            trees.append((name, layer / "upper", MUST_MAP))
        root: Message = {}
        if spec.image is None:
            trees += self._host_trees()
            lowers += self._lowers()
        else:
            trees.append(self._image(Path(spec.image), root))
            lowers.append("image")
        binds = tuple((f"b{number}", bind.inside, bind.is_read_only) for number, bind in enumerate(spec.binds))
        for (name, _, _), bind in zip(binds, spec.binds, strict=True):
            if not bind.host.exists():
                raise SandboxStartFailed(f"the host path of a bind does not exist: {bind.host}", step="bind")
            trees.append((name, bind.host.absolute(), MAY_MAP))
        at = self._stage()
        places = [(WORKDIR, 0o755), ("/tmp", 0o1777), (HOME, 0o700)]
        folders = [
            (folder, 0o700),
            (control, 0o755),
            (folder / "own", 0o700),
            (upper, 0o755),
            (folder / "own/work", 0o700),
        ]
        if lowers:
            mountpoints = [*places, ("/dev", 0o755), ("/proc", 0o755), (CONTROL_DIR, 0o755)]
            mountpoints += [(b.inside, 0o755 if b.host.is_dir() else 0) for b in spec.binds]
            root |= {"lowers": lowers, "make": mountpoints}
        else:
            folders += [(upper / "home", 0o755), *((upper / path.strip("/"), mode) for path, mode in places)]
        base = f"{at}/root" if lowers else f"{at}/own/upper"
        program, argv, env = self._command(spec, StagedParts(at, spec.image is not None, base, binds))
        uid = self._take_uid()
        limits, in_force = self._limiter.rlimits(spec.limits)
        in_force = {**in_force, "calls": "seccomp", "user": "own" if uid is not None else "the service's"}
        cgroup, groups = self._limiter.group(sandbox_id, spec.limits)
        config: Message = {
            "user": uid,
            "folders": [(str(path), mode) for path, mode in folders],
            "doorway": DOORWAY_PORT if spec.has_doorway else 0,
            "egress": EGRESS_PORT if spec.egress is not None else 0,
            "stage": {"at": at, "trees": [(name, str(path), mode) for name, path, mode in trees]},
            "root": root if lowers else None,
            "namespaces": self.namespaces,
            "cgroup": cgroup,
            "shm_bytes": self._shm_bytes,
            "seccomp": self._refused,
            "program": program,
            "argv": argv,
            "env": env,
        }
        user_env = {"HOME": HOME, "LANG": "C.UTF-8", **self._user_env(), **spec.env}
        return SandboxPaths(folder, upper, control, user_env, limits, in_force, uid=uid, groups=groups), config

    def _image(self, image: Path, root: Message) -> Tree:
        if set(str(image)) & _BAD:
            raise SandboxStartFailed(f"{image}: an image's path must not contain ':', ',' or '\\'", step="image")
        if image.is_dir():
            return ("image", image.absolute(), MUST_MAP)
        if not image.is_file():
            raise SandboxStartFailed(f"image {image} does not exist", step="image")
        try:
            offset = squashfs_offset(image)
        except ValueError as error:
            raise SandboxStartFailed(f"image {image}: {error}", step="image") from error
        program = shutil.which("squashfuse_ll") or shutil.which("squashfuse") or _libexec("squashfuse_ll")
        if program is None:
            raise SandboxStartFailed("squashfuse was not found; install it: apt-get install squashfuse", step="image")
        root["sif"] = {"program": program, "offset": offset}
        return ("sif", image.absolute(), MAY_MAP)

    def _stage(self) -> str:
        program = os.path.realpath(self._program_path or "/")
        for folder in _STAGES:
            if Path(folder).is_dir() and not program.startswith(f"{folder}/"):
                return folder
        raise SandboxStartFailed(f"a sandbox needs one of the folders {', '.join(_STAGES)}; none exists", step="stage")

    def _take_uid(self) -> int | None:
        if not self._has_uids:
            return None
        if not self._uids:
            raise SandboxStartFailed("all uids for sandboxes are in use; set a wider range", step="user")
        return self._uids.pop()

    async def _wait_for_room(self) -> None:
        await self._limiter.wait_for_room()

    def _on_started(self, sandbox: LaunchedSandbox, place: SandboxPaths) -> None:
        self._limiter.watch(sandbox.id, sandbox.pid, place.upper, sandbox.spec.limits)
        sandbox.count_oom_kills = lambda: self._limiter.oom_kills(sandbox.id)
        sandbox.count_host_kills = lambda: self._limiter.host_kills(sandbox.id)
        init_client = self._init_clients[sandbox.id]
        init_client.count_oom_kills = sandbox.count_oom_kills
        init_client.count_refused_forks = lambda: self._limiter.refused_forks(sandbox.id)

    async def _on_ended(self, sandbox_id: str, place: SandboxPaths) -> None:
        if place.uid is not None:
            self._uids.append(place.uid)
        self._limiter.forget(sandbox_id)

    def _over_limit(self, sandbox_id: str, limit: str, detail: str) -> None:
        sandbox = self._live.get(sandbox_id)
        if sandbox is not None and (limit == "memory" or limit == "processes" or limit == "disk" or limit == "files"):
            self._end(sandbox, SandboxEnd(limit, detail))

    # --- probe ---

    async def _probe_features(self, results: dict[str, str]) -> None:
        """Tests the features that every sandbox of a namespaced runtime uses."""
        results |= self._limiter.describe()
        with tempfile.TemporaryDirectory(dir=self._root, prefix="probe-") as folder:
            image = probe_image(Path(folder) / "image")
            if image is not None:
                await self._probe_start(results, "overlay", image)
        if results.get("overlay", "ok") == "ok" and os.geteuid() == 0:
            results["uids"] = (
                "ok" if self._has_uids else "sandboxes run as root, without capabilities; set sandbox_uids"
            )


def _libexec(name: str) -> str | None:
    places = [f"/usr/libexec/apptainer/bin/{name}", f"/usr/libexec/singularity/bin/{name}"]
    return next((path for path in places if os.access(path, os.X_OK)), None)


def probe_image(image: Path) -> SandboxSpec | None:
    """Makes the smallest image that can start: links into the host's /usr. None if /usr is not merged."""
    if not Path("/bin").is_symlink():
        return None
    (image / "usr").mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink() and not (image / name).is_symlink():
            (image / name).symlink_to(f"usr/{name}")
    return SandboxSpec(image=str(image), binds=(Bind(Path("/usr"), "/usr"),), owner="probe")
