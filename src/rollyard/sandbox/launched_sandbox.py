"""`LaunchedSandbox`, the implementation of `base.Sandbox` for all runtimes: exec, spawn, files, lease, kill."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import posixpath
import signal
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollyard.core.failure import MemoryLimit, SandboxLost, SandboxStartFailed
from rollyard.sandbox.base import CONTROL_DIR, KILLED, WORKDIR, ExecResult, SandboxEnd, SandboxSpec
from rollyard.sandbox.doorway import Doorway
from rollyard.sandbox.egress.mirrors import OS_RELEASE, OS_RELEASE_BYTES, write_apt_files
from rollyard.sandbox.egress.proxy import EgressProxy
from rollyard.sandbox.launcher.init_client import InitClient, InitRequest, pid_of
from rollyard.sandbox.launcher.message_socket import Message, PipeReader, PipeWriter

END_S = 10.0
"""How long a timed-out command may take to end after SIGKILL. Only one stuck in the kernel takes longer."""

FILE_S = 600.0
"""Time limit of a file job. Its size is limited already; this covers a disk that hangs."""


@dataclass(frozen=True, slots=True)
class SandboxPaths:
    """The host folders and settings of a sandbox, and the conversion of its paths for the launcher."""

    folder: Path  # on the host; deleted with the sandbox
    upper: Path  # the files that the sandbox writes, relative to its root
    control: Path
    env: Mapping[str, str]
    limits: Mapping[str, int] = field(default_factory=dict[str, int])
    limits_in_force: dict[str, str] = field(default_factory=dict[str, str])
    is_mapped: bool = True  # False: WORKDIR and CONTROL_DIR are only names for host folders
    uid: int | None = None  # on the host, if it is not the service's
    groups: Sequence[str] = ()  # folders of its cgroup, removed after it has ended

    @property
    def work(self) -> Path:
        return self.upper / WORKDIR.strip("/")

    def path(self, path: str) -> str:
        path = posixpath.join(WORKDIR, path)
        if not self.is_mapped:
            for name, host in ((WORKDIR, self.work), (CONTROL_DIR, self.control)):
                if path == name or path.startswith(f"{name}/"):
                    return f"{host}{path[len(name) :]}"
        return path


@dataclass(frozen=True, slots=True)
class FreezeRequest:
    """Where to keep a sandbox's files when it ends, and which paths to leave out."""

    target: Path
    without: tuple[str, ...]


class SpawnedProcess:
    def __init__(self, init_client: InitClient, job: InitRequest, pid: int) -> None:
        self._init_client, self._job, self._pid = init_client, job, pid

    @property
    def pid(self) -> int:
        return self._pid

    async def wait(self) -> int:
        try:
            return (await asyncio.shield(self._job.done))["status"]
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception:  # the sandbox ended, and the process with it
            return -signal.SIGKILL

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        self._init_client.signal(self._job, signum)


class LaunchedSandbox:
    def __init__(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        init_client: InitClient,
        place: SandboxPaths,
        *,
        on_kill: Callable[[LaunchedSandbox, FreezeRequest | None], Awaitable[None]],
        on_renew: Callable[[LaunchedSandbox], None],
    ) -> None:
        self._id, self._spec, self._init_client, self._place = sandbox_id, spec, init_client, place
        self._on_kill, self._on_renew = on_kill, on_renew
        self.expires_at = float("inf")
        self.ending: asyncio.Task[None] | None = None  # set by the runtime
        self._doorway: Doorway | None = None
        self._egress: EgressProxy | None = None
        self._counted_oom_kills = 0
        self.odd_kills = 0
        self.count_oom_kills: Callable[[], int] = lambda: 0  # set by the runtime, if it can count them
        self.count_host_kills: Callable[[], int] = lambda: 0  # the same

    def __repr__(self) -> str:
        return f"<sandbox {self._id}>"

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    @property
    def control_dir(self) -> Path:
        return self._place.control

    @property
    def control_path(self) -> str:
        return self._place.path(CONTROL_DIR)

    @property
    def limits_in_force(self) -> Mapping[str, str]:
        return self._place.limits_in_force

    @property
    def doorway(self) -> Doorway | None:
        return self._doorway

    @property
    def _egress_env(self) -> Mapping[str, str]:
        return {} if self._spec.egress is None else self._spec.egress.env

    def open_doorway(self) -> None:
        if self._init_client.doorway is not None:
            port = self._init_client.doorway.getsockname()[1]
            self._doorway = Doorway(self._init_client.doorway, port=port, owner=self._spec.owner)

    async def open_egress(self) -> None:
        """Serves the egress proxy, if the spec requests one."""
        egress, sock = self._spec.egress, self._init_client.egress
        if egress is None:
            return
        if sock is None:
            raise SandboxStartFailed("this runtime does not support egress; use bubblewrap or apptainer")
        os_release = b""
        if "apt" in egress.mirrors:
            with contextlib.suppress(OSError, ValueError):  # the image has none, or an unusual one
                os_release = await self.read(OS_RELEASE, limit_bytes=OS_RELEASE_BYTES)
        write_apt_files(self.control_dir, self.control_path, egress.mirrors, os_release.decode("utf-8", "replace"))
        self._egress = EgressProxy(sock, egress, owner=self._spec.owner)
        await self._egress.serve()

    def close_doorway(self) -> None:
        """Closes doorway and egress. Called first when the sandbox ends: an open connection would keep its network
        namespace."""
        if self._doorway is not None:
            self._doorway.close()
        elif self._init_client.doorway is not None:
            self._init_client.doorway.close()
        if self._egress is not None:
            self._egress.close()
        elif self._init_client.egress is not None:
            self._init_client.egress.close()

    @property
    def pid(self) -> int:
        """The init process's PID on the host; for /proc only."""
        return self._init_client.pid

    @property
    def oom_kills(self) -> int:
        return self.count_oom_kills()

    @property
    def host_kills(self) -> int:
        return self.count_host_kills()

    @property
    def end(self) -> SandboxEnd | None:
        return self._init_client.end

    async def ended(self) -> SandboxEnd:
        return await asyncio.shield(self._init_client.ended)

    def renew(self, lease_s: float) -> None:
        self.expires_at = asyncio.get_running_loop().time() + lease_s
        self._on_renew(self)

    async def kill(self) -> None:
        await self._on_kill(self, None)

    async def freeze(self, target: Path, *, without: Sequence[str] = ()) -> None:
        await self._on_kill(self, FreezeRequest(target, tuple(without)))

    # --- commands ---

    def _run(
        self,
        argv: Sequence[str],
        fds: Mapping[int, int],
        *,
        tty: int | None = None,
        cwd: str,
        env: Mapping[str, str] | None,
        is_spawned: bool,
    ) -> InitRequest:
        request: Message = {
            "op": "run",
            "argv": list(argv),
            "cwd": self._place.path(cwd),
            "env": {**self._init_client.env, **self._place.env, **self._egress_env, **(env or {})},
            "limits": self._place.limits,
            "slots": list(fds),
            "tty": tty is not None,
            "tell": is_spawned,
            "reaps": not is_spawned,  # an exec'd command adopts its orphans, so that a timeout reaches them
        }
        return self._init_client.request(request, [*fds.values(), *([] if tty is None else [tty])])

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float,
        cwd: str = WORKDIR,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_bytes: int = 1 << 20,
    ) -> ExecResult:
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        if not argv:
            raise ValueError("the command is empty")
        pipes: list[PipeReader | PipeWriter] = []
        job = None
        try:
            pipes.append(out := PipeReader(output_bytes))
            pipes.append(err := PipeReader(output_bytes))
            fds = {1: out.writer, 2: err.writer}
            if stdin:
                pipes.append(feeder := PipeWriter(stdin))
                fds[0] = feeder.reader
            job = self._run(argv, fds, cwd=cwd, env=env, is_spawned=False)
            for pipe in pipes:
                pipe.started()
            done, _ = await asyncio.wait([job.done], timeout=max(timeout_s, 0.0))
            is_timed_out = not done
            if is_timed_out:
                self._init_client.end_job(job)
                done, _ = await asyncio.wait([job.done], timeout=END_S)
                if not done:
                    raise SandboxLost(f"a command did not end within {END_S} s of SIGKILL")
            status = job.done.result()["status"]
            out.finish()
            err.finish()
            dropped = out.dropped_bytes + err.dropped_bytes
            duration_s, is_oom = loop.time() - started_at, self._is_out_of_memory(status)
            if status in KILLED and not is_timed_out and not is_oom:
                self.odd_kills += 1
            return ExecResult(status, bytes(out.data), bytes(err.data), duration_s, is_timed_out, dropped, is_oom)
        finally:
            if job is not None:
                self._init_client.end_job(job)  # for a cancelled caller; does nothing if the job is done
            for pipe in pipes:
                pipe.close()

    def _is_out_of_memory(self, status: int) -> bool:
        if status not in KILLED:
            return False
        before, self._counted_oom_kills = self._counted_oom_kills, self.oom_kills
        return self._counted_oom_kills > before

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        fds: Mapping[int, int],
        tty: int | None = None,
        cwd: str = WORKDIR,
        env: Mapping[str, str] | None = None,
    ) -> SpawnedProcess:
        if not {0, 1, 2} <= fds.keys():
            raise ValueError("descriptors 0, 1 and 2 are required")
        job = self._run(argv, fds, tty=tty, cwd=cwd, env=env, is_spawned=True)
        try:
            pidfd = await asyncio.shield(job.started)
        except asyncio.CancelledError:
            job.started.add_done_callback(lambda future: future.exception() or os.close(future.result()))
            self._init_client.end_job(job)
            raise
        try:
            pid = pid_of(pidfd)
        finally:
            os.close(pidfd)
        return SpawnedProcess(self._init_client, job, pid)

    # --- files ---

    def _file_job(self, op: str, path: str, fd: int, **more: int | list[str]) -> InitRequest:
        return self._init_client.request({"op": op, "path": self._place.path(path), **more}, [fd])

    async def _answer(self, job: InitRequest, path: str) -> Message:
        try:
            done, _ = await asyncio.wait([job.done], timeout=FILE_S)
            if not done:
                raise SandboxLost(f"a file job did not end within {FILE_S} s")
        finally:
            self._init_client.end_job(job)
        answer = job.done.result()
        if "refused" in answer:
            raise ValueError(answer["refused"])
        if "errno" in answer:
            if answer["errno"] == errno.ELOOP:
                raise ValueError(f"{path}: {answer['strerror']}")
            raise OSError(answer["errno"], answer["strerror"], path)
        if "done" not in answer:
            if self._is_out_of_memory(answer.get("status", 0)):  # a file job counts against the sandbox's memory
                raise MemoryLimit(f"{path} could not be handled within the sandbox's memory")
            raise SandboxLost(f"a file job was killed (status {answer.get('status')})")
        return answer

    async def read(self, path: str, *, limit_bytes: int) -> bytes:
        pipe = PipeReader(limit_bytes)
        try:
            job = self._file_job("read", path, pipe.writer, limit=limit_bytes)
            pipe.started()
            await self._answer(job, path)
            await pipe.end()
            return bytes(pipe.data)
        finally:
            pipe.close()

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        pipe = PipeWriter(data)
        try:
            job = self._file_job("write", path, pipe.reader, mode=mode)
            pipe.started()
            await self._answer(job, path)
        finally:
            pipe.close()

    async def upload(self, source: Path, path: str) -> None:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            await self._answer(self._file_job("upload", path, fd), path)
        finally:
            os.close(fd)

    async def unpack(self, archive: Path, path: str, *, is_replaced: bool = False) -> None:
        fd = os.open(archive, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Without isolation, only the workspace is the sandbox's own. All other folders are the host's.
            is_own = self._place.is_mapped or Path(self._place.path(path)).is_relative_to(self._place.work)
            is_replaced = is_replaced and is_own
            binds = [self._place.path(bind.inside) for bind in self._spec.binds]
            await self._answer(self._file_job("unpack", path, fd, is_replaced=is_replaced, binds=binds), path)
        finally:
            os.close(fd)

    async def download(self, path: str, target: Path, *, limit_bytes: int) -> Literal["file", "tar"]:
        partial = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
        with _of_the_host(target):
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            answer = await self._answer(self._file_job("download", path, fd, limit=limit_bytes), path)
            with _of_the_host(target):
                partial.replace(target)
            return "tar" if answer["done"]["kind"] == "tar" else "file"
        finally:
            os.close(fd)
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _of_the_host(target: Path) -> Generator[None, None, None]:
    """Converts FileNotFoundError, so that a missing host folder is not reported as a missing file of the sandbox."""
    try:
        yield
    except FileNotFoundError as error:
        raise OSError(errno.EIO, f"the folder to download to is gone: {error.strerror}", str(target)) from error
