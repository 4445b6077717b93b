"""Sandboxes of a container engine: podman or docker, by their common command line. For laptops and existing engines.

The container's PID 1 is the launcher's init process (`sandbox/launcher/program.py`), run by the portable Python, which
is bound into the container, so that any image works. It receives its socket and its lifeline over a Unix socket in the
control folder. From then on it is like the init process of other runtimes: commands, files, the doorway and the proof
of its end work in the same way, without the engine. It ends when its lifeline closes, and the kernel ends the container
with it.

An image is a folder, which is imported into the engine once, or a name in the engine's store. A layer is an image that
the engine made of a container (`commit`). It cannot exclude paths, so this runtime does not support EVAL `same`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar, Self

from rollyard.core.failure import SandboxLost, SandboxStartFailed, TaskInvalid
from rollyard.sandbox import launcher
from rollyard.sandbox.base import CONTROL_DIR, WORKDIR, ImageKind, SandboxEnd, SandboxLimits, SandboxSpec
from rollyard.sandbox.doorway import DOORWAY_PORT
from rollyard.sandbox.egress.base import EGRESS_PORT
from rollyard.sandbox.launched_sandbox import FreezeRequest, LaunchedSandbox, SandboxPaths
from rollyard.sandbox.launcher import seccomp
from rollyard.sandbox.launcher.kernel import send
from rollyard.sandbox.launcher.message_socket import Message
from rollyard.sandbox.limits.cgroups import group_of
from rollyard.sandbox.limits.limiter import DEFAULTS, Limiter, mark_of
from rollyard.sandbox.python import INSIDE, PortablePython, PythonBuilds
from rollyard.sandbox.runtimes.launched import LaunchedRuntime
from rollyard.sandbox.runtimes.oci_files import IMPORT_S, export_container, import_folder, probe_image, upper_folder

log = logging.getLogger("rollyard.sandbox")

INSTALL = "install podman or docker (apt-get install podman runc), and set oci_command if it needs options"
LAUNCHER = "/.rollyard-launcher"
CALL_S = 120.0
HOME = "/home/agent"

UIDS, UIDS_EACH = range(0x7000_0000, 0x7FFF_0000), 65_536
"""Uids on the host for containers of a service run as root: a range for each, since an image may have files of any
uid. They are above those that systemd gives to containers, and below those that 32-bit programs read as negative."""


class OciRuntime(LaunchedRuntime):
    name: ClassVar[str] = "oci"
    is_isolated: ClassVar[bool] = True
    image_kinds: ClassVar[tuple[ImageKind, ...]] = ("folder",)

    def __init__(
        self,
        *,
        root: Path,
        control_root: Path | None = None,
        command: str = "",
        image: str | None = None,
        defaults: SandboxLimits = DEFAULTS,
        pythons: PythonBuilds | None = None,
        start_s: float = 60.0,
        kill_s: float = 20.0,
        max_starting: int | None = None,
    ) -> None:
        """`command` is the engine with its global options ("podman --runtime runc"); empty: podman, else docker.
        `image` is for sandboxes without one: a container cannot use the host's /usr as its root."""
        super().__init__(
            root=root, control_root=control_root, start_s=start_s, kill_s=kill_s, max_starting=max_starting or 4
        )
        self._words = shlex.split(command)
        self._image = image
        self._limiter = Limiter(defaults, has_cgroups=False)
        self._pythons = pythons or PythonBuilds(root / "python")
        self._launching: dict[str, asyncio.Future[None]] = {}
        self._images: dict[str, str] = {}  # sandbox → the engine's name of its image
        self._first_uids: dict[str, int] = {}  # sandbox → start of its range, if it needs one
        self._next_uids = int(mark_of(root), 16)  # another service on this machine starts elsewhere
        self._imports: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            await self._limiter.open(self._root, self._over_limit)
            if self._engine_or_none() is not None:
                await self._sweep_containers()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        await super().close()
        await self._limiter.close()
        if self._imports:
            await asyncio.wait(list(self._imports.values()))

    # --- the engine ---

    def _engine_or_none(self) -> list[str] | None:
        words = self._words or next(([name] for name in ("podman", "docker") if shutil.which(name)), None)
        return words if words and shutil.which(words[0]) else None

    def _engine(self) -> list[str]:
        words = self._engine_or_none()
        if words is None:
            raise SandboxStartFailed(
                f"{self._words[0] if self._words else 'podman'} was not found; {INSTALL}", step="program"
            )
        return words

    @property
    def _has_uids(self) -> bool:
        """Whether containers get their own uids. Only with podman: docker's daemon has a setting (userns-remap)."""
        return os.geteuid() == 0 and "podman" in Path(self._engine()[0]).name

    async def _call(
        self, *words: str, bound_s: float = CALL_S, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        argv = [*self._engine(), *words]
        try:
            return await asyncio.to_thread(
                subprocess.run,
                argv,
                capture_output=True,
                text=True,
                timeout=bound_s,
                check=False,
                stdin=subprocess.DEVNULL,
                cwd=cwd or self._root,  # conmon writes a file `oom` there when a container runs out of memory
            )
        except subprocess.TimeoutExpired as error:
            raise SandboxStartFailed(f"{words[0]} did not finish in {bound_s:g} s", step="engine") from error

    @property
    def _label(self) -> str:
        return f"rollyard={mark_of(self._root)}"

    async def _sweep_containers(self) -> None:
        """Removes containers of an earlier process, found by their label. They end by themselves when their lifeline
        closes, so usually there are none."""
        listing = await self._call("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={self._label}")
        if names := listing.stdout.split():
            await self._call("rm", "--force", *names)

    # --- a start ---

    def _prepare(self, sandbox_id: str, spec: SandboxSpec) -> tuple[SandboxPaths, Message]:
        if spec.image is None and self._image is None and not spec.layers:
            raise SandboxStartFailed("a container needs an image: name one in the task, or set oci_image", step="image")
        folder, control = self._root / sandbox_id, self._control / sandbox_id
        effective = self._limiter.effective_limits(spec.limits)
        limits = {"RLIMIT_CORE": 0}
        in_force: dict[str, str] = dict.fromkeys(("memory", "processes", "cpus", "disk", "files"), "none")
        for name, most in (("disk", effective.disk_bytes), ("files", effective.files)):
            if most is not None:
                in_force[name] = "watchdog"  # see `_watch_disk`
        if effective.open_files:
            limits["RLIMIT_NOFILE"] = effective.open_files
        for name, flag in _FLAGS.items():
            if getattr(effective, name) is not None and flag:
                in_force[name.removesuffix("_bytes")] = "container engine"
        in_force |= {
            "open_files": "rlimit",
            "calls": "seccomp",
            "user": "own" if self._has_uids else "the service's",
        }
        config: Message = {
            "id": sandbox_id,
            "spec": spec,
            "control": control,
            "folders": [folder, control],
            "message": {
                "doorway": DOORWAY_PORT if spec.has_doorway else 0,
                "egress": EGRESS_PORT if spec.egress is not None else 0,
                "make": [(WORKDIR, 0o755), ("/tmp", 0o1777), (HOME, 0o700)],
                "seccomp": base64.b64encode(seccomp.program(refuse_memfd=False)).decode(),
            },
        }
        env = {"HOME": HOME, "LANG": "C.UTF-8", **spec.env}
        return SandboxPaths(folder, folder / "upper", control, env, limits, in_force), config

    async def _ready_to_start(self, place: SandboxPaths, spec: SandboxSpec) -> None:
        """Does one-time preparations that may take minutes and do not count towards the start's timeout."""
        self._images[place.folder.name] = await self._image_of(spec)
        await self._pythons.get()

    async def _launch(self, config: Message, fds: Sequence[int]) -> None:
        spec: SandboxSpec = config["spec"]
        control: Path = config["control"]
        for folder, mode in zip(config["folders"], (0o700, 0o755), strict=True):
            folder.mkdir()
            folder.chmod(mode)
        image = self._images.pop(config["id"])
        python = await self._pythons.get()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(control / "socket"))
            (control / "socket").chmod(0o666)
            listener.listen(1)
            listener.setblocking(False)
            argv = self._argv(config["id"], spec, image, control, python)
            running = asyncio.ensure_future(self._call(*argv, cwd=config["folders"][0]))
            accepting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listener))
            try:
                await asyncio.wait([running, accepting], return_when=asyncio.FIRST_COMPLETED)
                if not accepting.done():
                    completed = running.result()
                    if completed.returncode != 0:
                        raise SandboxStartFailed(f"engine: {completed.stderr.strip()[-500:]}", step="engine")
                connection, _ = await accepting
            finally:
                accepting.cancel()
                self._launching[config["id"]] = asyncio.ensure_future(_settled(running))
            with connection:
                send(connection, config["message"], fds)
        (control / "socket").unlink()

    def _argv(self, name: str, spec: SandboxSpec, image: str, control: Path, python: PortablePython) -> list[str]:
        effective = self._limiter.effective_limits(spec.limits)
        argv = ["run", "--detach", "--name", f"rollyard-{name}", "--label", self._label, "--network", "none"]
        argv += ["--cap-drop", "all", "--security-opt", "no-new-privileges", "--hostname", "sandbox", "--user", "0"]
        argv += ["--ulimit", f"nofile={effective.open_files or 4096}", "--ulimit", "nproc=32768", "--workdir", "/"]
        if self._has_uids:
            first = self._take_uids(name)
            argv += ["--uidmap", f"0:{first}:{UIDS_EACH}", "--gidmap", f"0:{first}:{UIDS_EACH}"]
        for field, flag in _FLAGS.items():
            value = getattr(effective, field)
            if value is not None and flag:
                argv += [flag, str(value)]
        binds = [(control, CONTROL_DIR, True), (python.folder, INSIDE, True)]
        binds.append((Path(launcher.__file__).parent, LAUNCHER, True))
        # A tool may bind the portable Python as well: it is mounted already.
        more = [bind for bind in spec.binds if bind.inside != INSIDE]
        binds += [(bind.host.absolute(), bind.inside, bind.is_read_only) for bind in more]
        for host, inside, is_read_only in binds:
            argv += ["--volume", f"{host}:{inside}{':ro' if is_read_only else ''}"]
        program, *words = python.argv
        argv += ["--entrypoint", program, image, *words, "-I", "-S", f"{LAUNCHER}/program.py"]
        return [*argv, f"{CONTROL_DIR}/socket", "container"]

    def _take_uids(self, name: str) -> int:
        taken, ranges = set(self._first_uids.values()), range(UIDS.start, UIDS.stop, UIDS_EACH)
        for _ in ranges:
            self._next_uids += 1
            first = ranges[self._next_uids % len(ranges)]
            if first not in taken:
                self._first_uids[name] = first
                return first
        raise SandboxStartFailed(f"all {len(ranges)} ranges of uids for containers are in use", step="user")

    async def _image_of(self, spec: SandboxSpec) -> str:
        """Returns the engine's name of the sandbox's image; imports a folder at its first use."""
        if spec.layers:
            text = await asyncio.to_thread((spec.layers[0] / "image.json").read_text)
            return json.loads(text)["image"]
        image = spec.image or self._image or ""
        if not image.startswith("/"):
            return image
        image_stat = await asyncio.to_thread(os.stat, image)
        digest = blake2b(f"{image}\0{image_stat.st_ino}\0{image_stat.st_mtime_ns}".encode(), digest_size=12).hexdigest()
        name = f"localhost/rollyard:{digest}"
        if name not in self._imports:
            self._imports[name] = asyncio.get_running_loop().create_task(self._import(image, name))
            self._imports[name].add_done_callback(lambda _: self._imports.pop(name))
        await asyncio.shield(self._imports[name])  # a cancelled caller must not stop an import that others wait for
        return name

    async def _import(self, folder: str, name: str) -> None:
        if (await self._call("image", "inspect", name)).returncode != 0:
            await asyncio.to_thread(import_folder, self._engine(), folder, name)

    def _on_started(self, sandbox: LaunchedSandbox, place: SandboxPaths) -> None:
        """Reads kill counts from the kernel: the engine enforces limits but does not report them."""
        group, init_client = group_of(sandbox.pid), self._init_clients[sandbox.id]
        sandbox.count_oom_kills = init_client.count_oom_kills = lambda: group.events().oom_kills
        sandbox.count_host_kills = lambda: group.events().host_kills
        init_client.count_refused_forks = lambda: group.events().processes_refused
        self._watch_disk(sandbox, place)

    def _watch_disk(self, sandbox: LaunchedSandbox, place: SandboxPaths) -> None:
        """Monitors the engine's folder of the container's writes, if it can be read."""
        upper = upper_folder(sandbox.pid)
        if upper is not None:
            self._limiter.watch_disk(sandbox.id, sandbox.pid, upper, sandbox.spec.limits)
        elif named := [name for name in ("disk_bytes", "files") if getattr(sandbox.spec.limits, name) is not None]:
            raise TaskInvalid(
                f"sandbox.{named[0]}: this container engine's storage cannot be monitored, so the limit would not be"
                " enforced; leave it out, or use the runtime bubblewrap or apptainer"
            )
        else:
            place.limits_in_force.update(disk="none", files="none")

    def _over_limit(self, sandbox_id: str, limit: str, detail: str) -> None:
        sandbox = self._live.get(sandbox_id)
        if sandbox is not None and (limit == "disk" or limit == "files"):
            self._end(sandbox, SandboxEnd(limit, detail))

    async def _wait_for_room(self) -> None:
        await self._limiter.wait_for_room()

    # --- an end ---

    async def _freeze_layer(self, sandbox_id: str, upper: Path, frozen: FreezeRequest) -> None:
        if frozen.without:
            raise SandboxLost("a container engine cannot leave paths out of a layer: EVAL `same` needs another runtime")
        name = f"localhost/rollyard-layer:{sandbox_id.lower()}"
        if self._has_uids:
            first = self._first_uids[sandbox_id]
            await asyncio.to_thread(export_container, self._engine(), f"rollyard-{sandbox_id}", name, first)
        else:
            completed = await self._call("commit", "--quiet", f"rollyard-{sandbox_id}", name, bound_s=IMPORT_S)
            if completed.returncode != 0:
                raise SandboxLost(f"commit: {completed.stderr.strip()[-500:]}")
        frozen.target.mkdir(mode=0o700, parents=True)
        (frozen.target / "image.json").write_text(json.dumps({"image": name}))

    async def _on_ended(self, sandbox_id: str, place: SandboxPaths) -> None:
        self._images.pop(sandbox_id, None)
        self._limiter.forget(sandbox_id)
        launching = self._launching.pop(sandbox_id, None)
        if launching is not None:  # PID 1 has ended; the engine's `run` may not have returned yet
            await asyncio.wait([launching])
            await self._remove_container(sandbox_id)
        self._first_uids.pop(sandbox_id, None)

    async def _remove_container(self, sandbox_id: str) -> None:
        """Removes a container. Retries, since podman's own clean-up may be running (its shm mount is then busy)."""
        completed = None
        for wait_s in (0.0, 0.1, 0.3, 1.0):
            await asyncio.sleep(wait_s)
            completed = await self._call("rm", "--force", f"rollyard-{sandbox_id}")
            if completed.returncode == 0 or "no such container" in completed.stderr.lower():
                return
        detail = completed.stderr[-500:] if completed else ""
        log.warning("a container could not be removed", extra={"sandbox": sandbox_id, "detail": detail})

    async def remove(self, paths: Sequence[Path]) -> bool:
        for path in paths:
            if (image_file := path / "image.json").is_file():
                await self._call("rmi", "--force", json.loads(image_file.read_text())["image"])
        return await super().remove(paths)

    # --- probe ---

    def _explain(self, error: SandboxStartFailed) -> SandboxStartFailed:
        detail = error.detail
        if "hybrid mode" in detail or "setrlimit" in detail:
            detail += '; use another low-level runtime: oci_command = "podman --runtime runc" (apt-get install runc)'
        return error.with_detail(detail)

    async def probe(self) -> Mapping[str, str]:
        try:
            version = await self._call("--version")
        except SandboxStartFailed as error:
            return {"engine": error.detail}
        results = {"engine": "ok" if version.returncode == 0 else version.stderr.strip()}
        image = self._image or probe_image(self._root / "probe-image")
        if image is not None:
            spec = SandboxSpec(image=str(image), owner="probe")
            await self._probe_start(results, "start", spec)
            if self._image is None:
                await self.forget(str(image))
        return results

    async def forget(self, image: str) -> None:
        """Removes the engine's copy of an image folder. Its layers and containers must have been removed."""
        if image.startswith("/"):
            await self._call("rmi", await self._image_of(SandboxSpec(image=image)))


_FLAGS = {"memory_bytes": "--memory", "processes": "--pids-limit", "cpus": "--cpus"}


async def _settled(running: asyncio.Future[subprocess.CompletedProcess[str]]) -> None:
    await asyncio.wait([running])
    if not running.cancelled():
        running.exception()
