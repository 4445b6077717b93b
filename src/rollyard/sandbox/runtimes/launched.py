"""The base class of all runtimes: opening, starting, leases, ending, freezing, cleaning up after a dead process.

Invariants. The folders below `root` belong to the one process that holds `root/.lock`. A start that fails, times out
or is cancelled is cleaned up before it returns. One timer serves all leases. If the end of a sandbox cannot be proven,
`SandboxStuck` is raised and its folder is kept, so that nothing reuses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from rollyard.core.failure import RollyardError, SandboxLost, SandboxStartFailed, SandboxStuck
from rollyard.core.ids import new_id
from rollyard.core.locks import FileLock, is_abandoned
from rollyard.core.workclock import MOST_LATE_S
from rollyard.sandbox.base import ImageKind, SandboxEnd, SandboxSpec
from rollyard.sandbox.launched_sandbox import FreezeRequest, LaunchedSandbox, SandboxPaths
from rollyard.sandbox.launcher.fork_server import ForkServerClient
from rollyard.sandbox.launcher.freezing import covering, settle
from rollyard.sandbox.launcher.init_client import InitClient
from rollyard.sandbox.launcher.message_socket import Message, readable

log = logging.getLogger("rollyard.sandbox")

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ABANDONED_S = 60.0
"""A younger control folder may have just been created and not be locked yet."""

REMOVE_S = 120.0
"""Time limit of deleting a sandbox's files; after it, deletion continues in the launcher's child."""

MOST_UNDELETED = 10_000
"""Sandboxes whose files this process could not delete and tries again. The next process finds all of them."""

LATE_GRACE_S = 30.0
"""Time to renew leases after this process was suspended for more than `MOST_LATE_S`."""


class LaunchedRuntime(ABC):
    name: ClassVar[str]
    is_isolated: ClassVar[bool]
    image_kinds: ClassVar[tuple[ImageKind, ...]] = ()
    is_killed_by_signal: ClassVar[bool] = True  # SIGKILL to the init process ends the namespace with it
    can_reach_out: ClassVar[bool] = True  # it can enforce `SandboxSpec.egress`
    outside_statuses: ClassVar[frozenset[int]] = frozenset()  # see `InitClient`

    def __init__(
        self,
        *,
        root: Path,
        control_root: Path | None = None,
        start_s: float = 60.0,
        kill_s: float = 10.0,
        max_starting: int | None = None,
    ) -> None:
        """`root` contains the sandboxes' files; `control_root` (tmpfs) the folders to which commands are written."""
        self._root = root
        self._control_root = control_root
        self._start_s, self._kill_s = start_s, kill_s
        # Starts are CPU-bound: more at once only makes each of them slower.
        self._starting = asyncio.Semaphore(max_starting or 4 * (os.cpu_count() or 1))
        self.waiting = 0  # callers of `room`
        self._fork_server = ForkServerClient(self.name)
        self._live: dict[str, LaunchedSandbox] = {}
        self._init_clients: dict[str, InitClient] = {}
        self._places: dict[str, SandboxPaths] = {}
        self._endings: dict[str, asyncio.Task[None]] = {}
        self._stuck: set[InitClient] = set()  # of sandboxes whose end was not proven
        self._undeleted: deque[tuple[list[str], Sequence[str]]] = deque(
            maxlen=MOST_UNDELETED
        )  # files that could not be deleted
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._lock: FileLock | None = None
        self._control_lock: FileLock | None = None
        self._control = Path()  # set when opened

    # --- hooks of a runtime ---

    @abstractmethod
    def _prepare(self, sandbox_id: str, spec: SandboxSpec) -> tuple[SandboxPaths, Message]:
        """Returns the sandbox's paths, and the launcher's request for the start. Raises SandboxStartFailed if it cannot
        start."""

    def _explain(self, error: SandboxStartFailed) -> SandboxStartFailed:
        """Returns the error with a remedy."""
        return error

    async def _wait_for_room(self) -> None:  # noqa: B027
        """Waits until the machine has resources for one more sandbox. Nothing of it exists yet; `close` ends the
        wait."""

    async def _ready_to_start(self, place: SandboxPaths, spec: SandboxSpec) -> None:  # noqa: B027
        """Does slow preparations outside the event loop."""

    async def _launch(self, config: Message, fds: Sequence[int]) -> None:
        """Passes the descriptors (socket, lifeline) to a new init process. The caller may close them afterwards."""
        self._fork_server.post(config, fds)

    def _on_started(self, sandbox: LaunchedSandbox, place: SandboxPaths) -> None:  # noqa: B027
        """Called when the sandbox is ready, before `start` returns it."""

    async def _on_ended(self, sandbox_id: str, place: SandboxPaths) -> None:  # noqa: B027
        """Called when its end is proven, before its files are deleted."""

    def _start_semaphore(self, spec: SandboxSpec) -> asyncio.Semaphore:
        """Returns the semaphore that a start waits for."""
        return self._starting

    @property
    def layer_root(self) -> Path:
        return self._root / "layers"

    @abstractmethod
    async def probe(self) -> Mapping[str, str]: ...

    # --- opening and closing ---

    async def __aenter__(self) -> Self:
        self._root = self._root.absolute()
        self.layer_root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._root / ".lock")
        if not lock.try_acquire():
            lock.close()
            raise RuntimeError(f"{self._root} is in use by another process")
        self._lock = lock
        try:
            self._control = self._open_control()
            await self._sweep()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        lock, self._lock = self._lock, None  # refuses new starts
        if lock is None:
            return
        while self._live or self._endings:
            for sandbox in list(self._live.values()):
                self._end(sandbox, SandboxEnd("killed", "the runtime closed"))
            await asyncio.wait(list(self._endings.values()))  # includes those whose files are being deleted
        for init_client in [*self._stuck]:
            init_client.close()
        if self._timer is not None:
            self._timer.cancel()
        for _ in range(len(self._undeleted)):
            await self._try_remove(*self._undeleted.popleft())
        await self._fork_server.close()
        with contextlib.suppress(OSError):
            self._control.rmdir()
        if self._control_lock is not None:
            self._control_lock.close()
        lock.close()

    def _open_control(self) -> Path:
        base = self._control_root or Path(os.environ.get("XDG_RUNTIME_DIR") or "/dev/shm")
        folder = base / f"rollyard-{os.geteuid()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder_stat = folder.lstat()
        if folder_stat.st_uid != os.geteuid() or folder_stat.st_mode & 0o077:  # all users can write to /dev/shm
            raise RuntimeError(f"{folder} must belong to the service's user and have mode 0700")
        control = folder / blake2b(os.fsencode(self._root), digest_size=8).hexdigest()
        control.mkdir(mode=0o700, exist_ok=True)
        self._control_lock = FileLock(control, is_folder=True)
        self._control_lock.acquire(shared=True)
        return control

    # --- starting ---

    async def room(self) -> None:
        self.waiting += 1
        try:
            await self._wait_for_room()
        finally:
            self.waiting -= 1

    async def start(self, spec: SandboxSpec, *, lease_s: float) -> LaunchedSandbox:
        async with self._start_semaphore(spec):
            try:
                return await self._start(spec, lease_s)
            except SandboxStartFailed as error:
                if error.data.get("step") != "launcher":
                    raise self._explain(error) from None
            return await self._start(spec, lease_s)  # the launcher ended during the start; this uses a new one

    async def _start(self, spec: SandboxSpec, lease_s: float) -> LaunchedSandbox:
        await self._wait_for_room()
        if self._lock is None:
            raise SandboxStartFailed("the runtime is closed")
        sandbox_id = new_id("sbx")
        init_client = InitClient(self.outside_statuses)
        try:
            place, config = self._prepare(sandbox_id, spec)
        except BaseException:
            init_client.finish(SandboxEnd("killed", "it was never started"), by_signal=False)
            init_client.sent()
            raise
        sandbox = LaunchedSandbox(
            sandbox_id,
            spec,
            init_client,
            place,
            on_kill=self._kill,
            on_renew=lambda sandbox: self._arm(sandbox.expires_at),
        )
        self._live[sandbox_id], self._init_clients[sandbox_id], self._places[sandbox_id] = sandbox, init_client, place
        init_client.ended.add_done_callback(lambda _: sandbox.close_doorway())
        try:
            try:
                await self._ready_to_start(place, spec)
                config = {**config, "op": "start", "record": str(place.folder / "record.json")}
                async with asyncio.timeout(self._start_s):
                    await self._launch(config, init_client.remote_fds)
            finally:
                init_client.sent()
            async with asyncio.timeout(self._start_s):
                await asyncio.shield(init_client.ready)
            if sandbox.ending is not None or init_client.end is not None:
                raise SandboxStartFailed("it ended as soon as it was ready")
            self._on_started(sandbox, place)
            sandbox.open_doorway()
            await sandbox.open_egress()
        except BaseException as error:
            ending = self._end(sandbox, SandboxEnd("killed", "its start failed"))
            await asyncio.wait([ending])
            if isinstance(error, TimeoutError):
                raise SandboxStartFailed(f"it was not ready within {self._start_s} s") from None
            raise
        sandbox.renew(lease_s)
        log.debug("sandbox started", extra={"sandbox": sandbox_id, "owner": spec.owner, "runtime": self.name})
        return sandbox

    # --- ending ---

    async def _kill(self, sandbox: LaunchedSandbox, frozen: FreezeRequest | None) -> None:
        if frozen is not None and sandbox.ending is not None:
            raise SandboxLost("it ended before it could be frozen")
        await asyncio.shield(self._end(sandbox, SandboxEnd("killed"), frozen))

    def _end(
        self, sandbox: LaunchedSandbox, end: SandboxEnd, frozen: FreezeRequest | None = None
    ) -> asyncio.Task[None]:
        """Returns the one task that ends this sandbox; the first reason counts."""
        task = sandbox.ending
        if task is None:
            task = sandbox.ending = self._own(sandbox.id, self._finish(sandbox, end, frozen))
        return task

    def _own(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def on_done(task: asyncio.Task[None]) -> None:
            self._endings.pop(name, None)
            if not task.cancelled() and (error := task.exception()):
                log.error("a sandbox could not be ended: %s", error, extra={"sandbox": name})

        task = asyncio.get_running_loop().create_task(work)
        self._endings[name] = task
        task.add_done_callback(on_done)
        return task

    async def _finish(self, sandbox: LaunchedSandbox, end: SandboxEnd, frozen: FreezeRequest | None) -> None:
        init_client, place = self._init_clients[sandbox.id], self._places[sandbox.id]
        sandbox.close_doorway()
        init_client.finish(end, by_signal=self.is_killed_by_signal)
        try:
            async with asyncio.timeout(self._kill_s):
                await asyncio.shield(init_client.ended)
        except TimeoutError:
            self._stuck.add(init_client)
            init_client.ended.add_done_callback(lambda _: self._stuck.discard(init_client))
            raise SandboxStuck(
                f"sandbox {sandbox.id} had not ended {self._kill_s} s after its kill", pid=init_client.pid
            ) from None
        finally:
            for table in (self._live, self._init_clients, self._places):
                table.pop(sandbox.id, None)
        try:
            if frozen is not None:
                if not frozen.target.parent.is_relative_to(self.layer_root):
                    raise ValueError(f"a layer must be below {self.layer_root}")
                await self._freeze_layer(sandbox.id, place.upper, frozen)
        finally:
            try:
                await self._on_ended(sandbox.id, place)
            finally:
                await self._remove([str(place.folder), str(place.control)], place.groups)

    async def _freeze_layer(self, sandbox_id: str, upper: Path, frozen: FreezeRequest) -> None:
        """Makes a layer of the files that an ended sandbox wrote, without the excluded paths."""
        hidden = await asyncio.to_thread(covering, upper, frozen.without)
        if hidden and not await self._fork_server.remove([str(path) for path in hidden]):
            raise SandboxLost("the excluded paths could not be removed from its files")
        await asyncio.to_thread(settle, upper, frozen.target)

    async def remove(self, paths: Sequence[Path]) -> bool:
        """Deletes folders (layers), whatever their contents. Returns False if something is left."""
        return await self._fork_server.remove([str(path) for path in paths])

    async def _remove(self, paths: list[str], groups: Sequence[str] = ()) -> None:
        """Deletes a sandbox's files. Each success also retries one earlier failure (for example for lack of a
        descriptor). The rest is retried by `close`, and when the folder is next opened."""
        if await self._try_remove(paths, groups) and self._undeleted:
            await self._try_remove(*self._undeleted.popleft())

    async def _try_remove(self, paths: list[str], groups: Sequence[str]) -> bool:
        is_deleted = False
        with contextlib.suppress(TimeoutError, OSError):  # OSError: no descriptor or process available
            async with asyncio.timeout(REMOVE_S):
                is_deleted = await self._fork_server.remove(paths, groups)
        if not is_deleted:
            self._undeleted.append((paths, groups))
            log.warning("files of a sandbox could not be deleted", extra={"paths": paths})
        return is_deleted

    # --- leases ---

    def _arm(self, when: float) -> None:
        if when < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = when
            self._timer = asyncio.get_running_loop().call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        now = asyncio.get_running_loop().time()
        is_late = now - self._timer_at > MOST_LATE_S
        self._timer, self._timer_at = None, float("inf")
        for sandbox in list(self._live.values()):
            if is_late:  # this process was suspended, so the lease could not be renewed
                sandbox.expires_at = max(sandbox.expires_at, now + LATE_GRACE_S)
            if sandbox.expires_at <= now:
                log.warning("a lease expired", extra={"sandbox": sandbox.id, "owner": sandbox.spec.owner})
                self._end(sandbox, SandboxEnd("lease", "its lease was not renewed"))
            elif sandbox.ending is None:
                self._arm(sandbox.expires_at)

    # --- leftovers of an earlier process ---

    async def _sweep(self) -> None:
        paths: list[str] = []
        for folder in self._root.glob("sbx_*"):
            if await self._end_recorded(folder / "record.json"):
                paths += [str(folder), str(self._control / folder.name)]
            else:
                log.error("a sandbox of an earlier process cannot be ended", extra={"folder": str(folder)})
        paths += [str(path) for path in self._control.iterdir() if str(path) not in paths]
        paths += [str(path) for path in self._control.parent.iterdir() if is_abandoned(path, older_than_s=ABANDONED_S)]
        if paths:
            log.info("removing leftovers of an earlier process", extra={"paths": len(paths)})
            await self._remove(paths)

    async def _end_recorded(self, record: Path) -> bool:
        """Ends the init process that the record names, if it is still that process. Returns whether it has ended."""
        try:
            entry = json.loads(record.read_bytes())  # noqa: ASYNC240  (a hundred bytes, once, at opening)
            pidfd = os.pidfd_open(entry["pid"])
        except (OSError, ValueError, KeyError):
            return True  # no such process, or the record was never completed
        try:
            if not _is_recorded(entry):
                return True
            if not self.is_isolated:  # it ends its descendants by itself, since its lifeline has closed
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._kill_s):
                        await readable(pidfd)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            async with asyncio.timeout(self._kill_s):
                await readable(pidfd)
            return True
        except TimeoutError:
            return False
        finally:
            os.close(pidfd)

    async def _probe_start(self, results: dict[str, str], name: str, spec: SandboxSpec) -> bool:
        """Starts a sandbox, runs a command in it, and ends it."""
        try:
            sandbox = await self.start(spec, lease_s=60.0)
            try:
                result = await sandbox.exec("echo ok", timeout_s=10.0)
            finally:
                await sandbox.kill()
            results[name] = "ok" if result.stdout == b"ok\n" else f"echo returned status {result.status}"
        except RollyardError as error:
            results[name] = error.detail
        return results[name] == "ok"


def _is_recorded(entry: Mapping[str, Any]) -> bool:
    """Whether start time and PID namespace are the same: the PID has not been reused."""
    try:
        stat = Path(f"/proc/{entry['pid']}/stat").read_bytes().rpartition(b")")[2].split()
        if stat[19].decode() != entry["start_time"]:
            return False
        with contextlib.suppress(PermissionError):  # hidden from an ordinary user; the start time must suffice
            return Path(f"/proc/{entry['pid']}/ns/pid").stat().st_ino == entry["pid_namespace"]
        return True
    except OSError:
        return False
