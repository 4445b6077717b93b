"""The service's client of one sandbox's init process: numbered requests, their answers, and the proof of its end.

Invariants. `ended` is done only when the init process's pidfd is readable, so that everything in the sandbox is dead
(before the pidfd has arrived: when its socket has closed, which only its death causes). Every request then pending
fails with the error for that end: caused by the policy, or a loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rollyard.core.failure import (
    DiskLimit,
    FileLimit,
    MemoryLimit,
    ProcessLimit,
    RollyardError,
    SandboxEndedByPolicy,
    SandboxLost,
    SandboxStartFailed,
)
from rollyard.sandbox.base import SandboxEnd
from rollyard.sandbox.launcher.message_socket import Message, MessageSocket, close_all

BROKEN_S = 2.0
"""How long a request that the init process could not serve waits for a report of the sandbox's end."""

NO_ROOM = "this process has no file descriptor left; raise its limit (ulimit -n), or hold fewer sandboxes"


class InitRequest:
    """A pending request. `started` and `done` are its two possible answers, each at most once."""

    def __init__(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.started: asyncio.Future[int] = loop.create_future()  # a pidfd, which the caller closes
        self.done: asyncio.Future[Message] = loop.create_future()
        self.is_broken = False  # the init process could not serve it: a later status is not a command's

    def fail(self, error: BaseException) -> None:
        for future in (self.started, self.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: it may have no waiter


class InitClient:
    """The client of one init process. Create it, send `remote_fds` with the start request, then call `sent()`."""

    def __init__(self, outside_statuses: Collection[int] = ()) -> None:
        """`outside_statuses`: exit statuses that the runtime's own process also has if a signal from the host ended
        it."""
        self._outside_statuses = outside_statuses
        self._loop = asyncio.get_running_loop()
        own_socket, self._remote_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._lifeline_out, self._lifeline = os.pipe2(os.O_CLOEXEC)
        except OSError:
            own_socket.close()
            self._remote_socket.close()
            raise
        self._jobs: dict[int, InitRequest] = {}
        self._numbers = itertools.count(1)
        self._pidfd = -1
        self.pid = 0
        self.doorway: socket.socket | None = None  # the runtime takes it once the sandbox is ready
        self.egress: socket.socket | None = None  # the same
        self.env: Mapping[str, str] = {}  # variables that the image sets, if its runtime reports them
        self._end: SandboxEnd | None = None  # the reason, as known before the proof
        self.count_oom_kills: Callable[[], int] = lambda: 0  # set by the runtime, if it can count them
        self.count_refused_forks: Callable[[], int] = lambda: 0  # the same
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[SandboxEnd] = self._loop.create_future()
        self._wire = MessageSocket(own_socket, self._on_message)

    @property
    def remote_fds(self) -> tuple[int, int]:
        return self._remote_socket.fileno(), self._lifeline_out

    def sent(self) -> None:
        """Closes the descriptors that the launcher now has copies of, so that EOF means that the sandbox ended."""
        self._remote_socket.close()
        os.close(self._lifeline_out)

    @property
    def end(self) -> SandboxEnd | None:
        return self.ended.result() if self.ended.done() else None

    # --- requests ---

    def request(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> InitRequest:
        job = InitRequest(next(self._numbers))
        if self.ended.done():
            raise error_of(self.ended.result())
        self._jobs[job.number] = job
        self._wire.post({**message, "n": job.number}, fds)
        return job

    def signal(self, job: InitRequest, signum: signal.Signals) -> None:
        if not job.done.done():
            self._wire.post({"op": "signal", "n": job.number, "signum": int(signum)})

    def end_job(self, job: InitRequest) -> None:
        """Kills a job with all its descendants; its status is still reported."""
        if not job.done.done():
            self._wire.post({"op": "end", "n": job.number})

    # --- its end ---

    def finish(self, end: SandboxEnd, *, by_signal: bool) -> None:
        """Ends the sandbox, for the given reason. `by_signal`: also kills the init process, whose PID namespace ends
        with it."""
        if self._end is None:
            self._end = end
        self._cut_lifeline()
        if by_signal and self._pidfd >= 0:
            # A container engine may run it under a uid that this process may not signal; the lifeline still ends it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Closes its descriptors, whether or not its end is proven."""
        self._close_pidfd()
        self._wire.close()
        self._cut_lifeline()

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _cut_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _on_message(self, message: Message | None, fds: list[int]) -> None:
        if message is None:
            if self._pidfd < 0:
                self._on_ended()
            return
        match message.get("event"):
            case "born" if not fds:  # the kernel drops descriptors beyond this process's limit
                self._fail_start(SandboxStartFailed(NO_ROOM))
            case "born":
                self._pidfd = fds.pop()
                self.pid = message["pid"] or pid_of(self._pidfd)
                self._loop.add_reader(self._pidfd, self._on_ended)
                if self._end is not None:
                    self.finish(self._end, by_signal=bool(message["pid"]))
            case "doorway" | "egress" if not fds:
                self._fail_start(SandboxStartFailed(NO_ROOM))
            case "doorway":
                self.doorway = socket.socket(fileno=fds.pop())
            case "egress":
                self.egress = socket.socket(fileno=fds.pop())
            case "env":
                self.env = image_env(message["env"])
            case "ready":
                if not self.ready.done():
                    self.ready.set_result(None)
            case "failed":
                self._fail_start(SandboxStartFailed(f"{message['step']}: {message['detail']}", step=message["step"]))
            case "ended":
                status = message["status"]
                # No process inside can reach bwrap's own process or squashfuse: a signal to them came from the host.
                is_outside = status < 0 or message["which"] or status in self._outside_statuses
                reason = "lost" if is_outside else "ended_inside"
                what = "the process that mounts its image" if message["which"] else "its first process"
                self._end = self._end or SandboxEnd(reason, f"{what} ended with status {status}")
            case _:
                self._on_answer(message, fds)
        close_all(fds)

    def _on_answer(self, message: Message, fds: list[int]) -> None:
        job = self._jobs.get(message["n"])
        if job is None:
            return
        if "started" in message:
            if not fds:
                self.end_job(job)
                job.fail(SandboxLost(NO_ROOM))
            elif not job.started.done():
                job.started.set_result(fds.pop())
            return
        if job.is_broken:
            return
        if "broken" in message:
            job.is_broken = True
            # Usually the sandbox is just ending: the reason, which decides the blame, arrives shortly.
            self._loop.call_later(BROKEN_S, self._give_up, job, message["broken"], message.get("errno"))
            return
        del self._jobs[job.number]
        if not job.done.done():
            job.done.set_result(message)

    def _give_up(self, job: InitRequest, detail: str, number: int | None) -> None:
        """Fails a broken request. The init process forks within the sandbox's own limits, so the commands inside can
        leave it no process and no memory."""
        if self._jobs.pop(job.number, None) is None:
            return
        if number == errno.EAGAIN and self.count_refused_forks():
            job.fail(ProcessLimit(detail))
        elif number == errno.ENOMEM and self.count_oom_kills():
            job.fail(MemoryLimit(detail))
        else:
            job.fail(SandboxLost(detail))

    def _fail_start(self, error: RollyardError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()

    def _on_ended(self) -> None:
        """Handles the proven end. Earlier messages of the init process are still in the socket."""
        if self._pidfd >= 0:
            self._close_pidfd()
            self._wire.drain()
        self.close()
        end = self._end or SandboxEnd("lost", "its init process was killed from outside")
        if end.reason == "lost" and self.count_oom_kills():
            # Files on a tmpfs belong to no process: the kernel kills all processes in vain, including PID 1.
            end = SandboxEnd("memory", "all its processes were killed at its memory limit")
        self._fail_start(SandboxStartFailed("the launcher ended", step="launcher"))
        if not self.ended.done():
            self.ended.set_result(end)
        error = error_of(end)
        for job in self._jobs.values():
            job.fail(error)
        self._jobs.clear()


def image_env(reported: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that the image sets, without those of its runtime and of that one process."""
    own = {"PS1", "PROMPT_COMMAND", "PWD", "OLDPWD", "SHLVL", "TERM", "_", "HOSTNAME", "container"}
    env = {
        key: value
        for key, value in reported.items()
        if key not in own and not key.startswith(("APPTAINER_", "SINGULARITY_"))
    }
    libraries = [path for path in env.pop("LD_LIBRARY_PATH", "").split(":") if path and path != "/.singularity.d/libs"]
    return {**env, "LD_LIBRARY_PATH": ":".join(libraries)} if libraries else env


def pid_of(pidfd: int) -> int:
    """Returns the PID in this process's namespace; the init process has another number for it."""
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        return next(int(line.split()[1]) for line in info if line.startswith("Pid:"))


_POLICYS: dict[str, type[RollyardError]] = {
    "ended_inside": SandboxEndedByPolicy,
    "memory": MemoryLimit,
    "processes": ProcessLimit,
    "disk": DiskLimit,
    "files": FileLimit,
}


def error_of(end: SandboxEnd) -> RollyardError:
    if kind := _POLICYS.get(end.reason):
        return kind(end.detail)
    return SandboxLost(f"the sandbox has ended ({end.reason}) {end.detail}".strip(), reason=end.reason)
