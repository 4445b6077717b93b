"""Sandboxes by bubblewrap: no root, no daemon, no network, about 10 ms each.

Own user, mount, PID, IPC, UTS and network namespaces; all capabilities dropped, nested user namespaces refused; a
clean environment. The root is the host's /usr read-only with a private /workspace, /tmp and home, or an image:
a folder, under a private overlay. The user inside is 1000 and is, on the host, whoever runs the service.

Not here: memory, process and disk limits by cgroups, seccomp. `limits_in_force` says so.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Self

from rollyard.core.failure import SandboxStartFailed
from rollyard.sandbox._runtime import PATH, LaunchedRuntime
from rollyard.sandbox._sandbox import Place
from rollyard.sandbox._wire import Message
from rollyard.sandbox.base import CONTROL_DIR, WORKDIR, Bind, SandboxSpec

HOME = "/home/agent"
UID = 1000

INSTALL = "install it: apt-get install bubblewrap (0.8 or newer)"
ALLOW = (
    "user namespaces are forbidden here. Ubuntu 24.04: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an"
    " AppArmor profile for bwrap and this Python; elsewhere: sysctl -w user.max_user_namespaces=15000; in Docker:"
    " --security-opt seccomp=unconfined --security-opt systempaths=unconfined"
)

_ETC = (
    # What normal programs read, and nothing that could hold a secret: a service run as root owns /etc/ssl/private.
    "ca-certificates ca-certificates.conf debian_version gai.conf host.conf inputrc java-*"
    " ld.so.cache ld.so.conf ld.so.conf.d locale.alias localtime magic magic.mime mime.types networks os-release perl"
    " pki/ca-trust pki/tls/certs protocols python3* rpc services shells ssl/openssl.cnf terminfo timezone vim"
)
_BOUND_ETC = ("alternatives", "ssl/certs")  # hundreds of links each: shown, not copied
_OWN_ETC = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{UID}:{UID}:agent:{HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
}


class BubblewrapRuntime(LaunchedRuntime):
    name: ClassVar[str] = "bubblewrap"
    is_isolated: ClassVar[bool] = True

    def __init__(
        self,
        *,
        root: Path,
        control_root: Path | None = None,
        program: str | None = None,
        tmp_bytes: int = 1 << 30,
        shm_bytes: int = 256 << 20,
        open_files: int = 4096,
        start_s: float = 60.0,
        kill_s: float = 10.0,
        max_starting: int | None = None,
    ) -> None:
        """`program` is bwrap's path if not in PATH; `tmp_bytes` bounds /tmp and the home, each a tmpfs."""
        super().__init__(
            root=root, control_root=control_root, start_s=start_s, kill_s=kill_s, max_starting=max_starting
        )
        self._program = program
        self._found: str | None = None
        self._tmp_bytes, self._shm_bytes, self._open_files = tmp_bytes, shm_bytes, open_files
        self._host_root: list[str] = []

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        etc = self._root / "etc"
        await asyncio.to_thread(_make_etc, etc)
        self._host_root = list(_host_root(etc))
        return self

    def _bwrap(self) -> str:
        if self._found is None:
            self._found = shutil.which(self._program or "bwrap")
        if self._found is None:
            raise SandboxStartFailed(f"bwrap was not found; {INSTALL}", step="program")
        return self._found

    def _prepare(self, sandbox_id: str, spec: SandboxSpec) -> tuple[Place, Message]:
        folder, control = self._root / sandbox_id, self._control / sandbox_id
        work, root = folder / "work", folder / "root"
        folders = [folder, work, control]
        config: Message = {"env": {"PATH": PATH}}
        argv = ["--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        argv += ["--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox", "--cap-drop", "ALL"]
        if spec.image is None:
            argv += self._host_root
        else:
            folders += [root, folder / "upper", folder / "overlay"]
            config["overlay"] = {"at": str(root), "options": _overlay(Path(spec.image), folder)}
            argv += ["--bind", str(root), "/"]
        argv += ["--proc", "/proc", "--dev", "/dev"]
        for path, size in (("/dev/shm", self._shm_bytes), ("/tmp", self._tmp_bytes), (HOME, self._tmp_bytes)):
            argv += ["--size", str(size), "--tmpfs", path]
        argv += ["--bind", str(work), WORKDIR, "--ro-bind", str(control), CONTROL_DIR]
        for bind in spec.binds:
            argv += ["--ro-bind" if bind.is_read_only else "--bind", str(bind.host), bind.inside]
        # /proc too: bwrap shuts /proc/sys only if that *folder* is writable, which it never is, and to the files in it
        # the kernel lets whoever is root on the host, as the sandbox's user is where the service is run by root.
        argv += ["--remount-ro", "/proc", "--remount-ro", "/dev"]
        argv += [*(["--remount-ro", "/"] if spec.image is None else []), "--chdir", WORKDIR]
        env = {"PATH": PATH, "HOME": HOME, "USER": "agent", "LANG": "C.UTF-8", **spec.env}
        limits, in_force = self._limits(spec)
        config |= {"folders": [str(path) for path in folders], "program": self._bwrap(), "argv": argv}
        return Place(folder, work, control, env, limits, in_force), config

    def _limits(self, spec: SandboxSpec) -> tuple[dict[str, int], dict[str, str]]:
        limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": spec.limits.open_files or self._open_files}
        in_force = {"memory": "none", "processes": "none", "disk": "none", "open_files": "rlimit", "tmp": "tmpfs"}
        if spec.limits.processes is not None and os.geteuid() != 0:  # it never binds the host's root
            limits["RLIMIT_NPROC"] = spec.limits.processes
            in_force["processes"] = "rlimit"
        return limits, in_force

    def _explain(self, error: SandboxStartFailed) -> SandboxStartFailed:
        step, detail = error.data.get("step"), error.detail
        if step in ("namespaces", "mounts", "loopback", "proc") or (step == "bubblewrap" and "namespace" in detail):
            detail = f"{detail}; {ALLOW}"
        elif step == "overlay":
            detail = (
                f"{detail}; an image needs overlayfs in user namespaces (Linux 5.11 or newer), must not lie on an"
                " overlay itself, and must belong to the user who runs the service"
            )
        elif step == "bubblewrap" and "Unknown option" in detail:
            detail = f"{detail}; {INSTALL}"
        return SandboxStartFailed(detail, **error.data)

    async def probe(self) -> Mapping[str, str]:
        results: dict[str, str] = {}
        try:
            program = self._bwrap()
        except SandboxStartFailed as error:
            return {"bubblewrap": error.detail}
        version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=5, check=False)  # noqa: ASYNC221
        results["bubblewrap"] = "ok" if version.returncode == 0 else version.stderr.strip()
        if await self._probe_start(results, "start", SandboxSpec(owner="probe")):
            image = _probe_image(self._root / "probe-image")
            if image is not None:
                await self._probe_start(results, "overlay", image)
        return results


def _probe_image(image: Path) -> SandboxSpec | None:
    """The smallest image that can start: links into the host's /usr. None where /usr is not merged."""
    if not Path("/bin").is_symlink():
        return None
    (image / "usr").mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink() and not (image / name).is_symlink():
            (image / name).symlink_to(f"usr/{name}")
    return SandboxSpec(image=str(image), binds=(Bind(Path("/usr"), "/usr"),), owner="probe")


def _host_root(etc: Path) -> Iterator[str]:
    """The host's programs without the host's files."""
    yield from ("--ro-bind", "/usr", "/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    yield from ("--ro-bind", str(etc), "/etc")
    for name in _BOUND_ETC:
        if Path("/etc", name).is_dir():
            yield from ("--ro-bind", f"/etc/{name}", f"/etc/{name}")
    yield from ("--dir", "/run", "--dir", "/var", "--symlink", "/tmp", "/var/tmp")


def _make_etc(etc: Path) -> None:
    """A copy, made once: one mount per sandbox instead of forty (bwrap alone: 3.0 ms instead of 6.6)."""
    shutil.rmtree(etc, ignore_errors=True)
    etc.mkdir()
    for pattern in _ETC.split():
        for path in Path("/etc").glob(pattern):
            target = etc / path.relative_to("/etc")
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True)
                else:
                    shutil.copy2(path, target, follow_symlinks=False)
            except (OSError, shutil.Error):  # what this user may not read, the sandbox does without
                continue
    for name in _BOUND_ETC:
        (etc / name).mkdir(parents=True, exist_ok=True)
    for name, text in _OWN_ETC.items():
        (etc / name).unlink(missing_ok=True)
        (etc / name).write_text(text)


def _overlay(image: Path, folder: Path) -> str:
    if not image.is_dir():
        raise SandboxStartFailed(f"image {image} is not a folder", step="image")
    parts = {"lowerdir": image.absolute(), "upperdir": folder / "upper", "workdir": folder / "overlay"}
    for path in parts.values():
        if set(str(path)) & set(":,\\"):
            raise SandboxStartFailed(f"{path}: an overlay's path must not contain ':', ',' or '\\'", step="image")
    return ",".join([*(f"{name}={path}" for name, path in parts.items()), "userxattr"])
