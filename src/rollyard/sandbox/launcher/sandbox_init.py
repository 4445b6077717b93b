"""The init process of a sandbox: runs commands and file jobs in it until it ends.

Part of the launcher's program (`program.py`), with the same rules: nothing is imported from the package, and nothing at
all after entering a sandbox.
"""

# Descriptors and raw paths: pathlib would only be one more import.
# ruff: noqa: PTH118

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import termios
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING or __package__:
    from rollyard.sandbox.launcher import file_jobs as files
    from rollyard.sandbox.launcher import kernel
    from rollyard.sandbox.launcher.kernel import Message
else:
    import file_jobs as files
    import kernel
    from kernel import Message

INFRASTRUCTURE_ERRNOS = frozenset((errno.EAGAIN, errno.EIO, errno.ENFILE, errno.ENODEV, errno.ENOMEM, errno.ESTALE))
"""Errors of exec that are caused by the machine, not by the program."""

JOB_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a batch system or a terminal sends to every process of a job."""

JOB_SIGNAL_S = 2.0
"""The time in which it reaches all of them, even on a busy machine."""


class ProcessSpace:
    """Where the init process's children run. This base class is for `local`: they stay in the host's namespaces."""

    vital: tuple[int, ...] = ()  # the sandbox ends when any of these processes ends

    def fork_inside(self) -> int:
        return kernel.clone()

    def fork_unseen(self) -> int:
        return kernel.clone()

    def enter(self) -> None:
        pass

    def leave(self) -> NoReturn:
        """Ends all descendants, then this process."""
        while True:
            kernel.kill_below(os.getpid())
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                os._exit(0)
            select.select([], [], [], 0.005)  # killed but not yet dead; this process must not end before they do


class ContainerSpace(ProcessSpace):
    """This process is PID 1 of a container: its commands are its children, and end with it."""

    def enter(self) -> None:
        kernel.drop_privileges()

    def leave(self) -> NoReturn:
        os._exit(0)


class NamespacedSpace(ProcessSpace):
    """The namespaces that bwrap or Apptainer made for process `pid`."""

    def __init__(self, vital: tuple[int, ...], pid: int) -> None:
        self.vital = vital
        here = f"/proc/{pid}/ns"
        self.user, self.mnt, self.ipc, self.uts, self.pid = (
            os.open(f"{here}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("user", "mnt", "ipc", "uts", "pid")
        )
        self.our_pid = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        # bwrap's mounts belong to its outer user namespace, the processes to an inner one (--disable-userns).
        self.owner = fcntl.ioctl(self.mnt, kernel.NS_GET_USERNS)
        self.is_nested = os.fstat(self.owner).st_ino != os.fstat(self.user).st_ino

    def fork_inside(self) -> int:
        kernel.setns(self.pid, kernel.CLONE_NEWPID)  # for children only: they start inside, and this process reaps them
        return kernel.clone()

    def fork_unseen(self) -> int:
        """Forks a child that the sandbox's processes cannot see, since it may hold descriptors of the host."""
        kernel.setns(self.our_pid, kernel.CLONE_NEWPID)
        return kernel.clone()

    def enter(self) -> None:
        self.enter_mounts()
        if self.is_nested:
            kernel.setns(self.user, kernel.CLONE_NEWUSER)
        kernel.drop_privileges()

    def enter_mounts(self) -> None:
        kernel.setns(self.owner, kernel.CLONE_NEWUSER)
        kernel.setns(self.ipc, kernel.CLONE_NEWIPC)
        kernel.setns(self.uts, kernel.CLONE_NEWUTS)
        kernel.setns(self.mnt, kernel.CLONE_NEWNS)

    def leave(self) -> NoReturn:
        os._exit(0)  # as this is PID 1, the kernel kills the rest before the pidfd becomes readable


class SandboxInit:
    def __init__(self, ctl: socket.socket, lifeline: int, wake: int, world: ProcessSpace, refused: bytes) -> None:
        self.ctl, self.lifeline, self.wake, self.world = ctl, lifeline, wake, world
        self.refused = refused  # a seccomp filter for all commands inside
        self.is_signalled = False  # by the host: processes inside cannot see this one
        self.jobs: dict[int, int] = {}  # pid → number of its request

    def serve(self) -> NoReturn:
        poller = select.poll()
        for fd in (self.ctl.fileno(), self.lifeline, self.wake):
            poller.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self.lifeline in ready:
                self.world.leave()
            try:
                if self.wake in ready:
                    self.reap()
                if self.ctl.fileno() in ready:
                    message, fds = kernel.receive(self.ctl)
                    if message is None:
                        self.world.leave()
                    self.handle(message, fds)
                    for fd in fds:
                        os.close(fd)
            except (BrokenPipeError, ConnectionResetError):
                self.world.leave()

    def reap(self) -> None:
        for pid, status in kernel.reaped(self.wake):
            if pid in self.world.vital:
                if status - 128 in JOB_SIGNALS and self.was_signalled_too():
                    status = 128 - status
                kernel.send(self.ctl, {"event": "ended", "status": status, "which": self.world.vital.index(pid)})
                self.world.leave()
            if (number := self.jobs.pop(pid, None)) is not None:
                kernel.send(self.ctl, {"n": number, "status": status})

    def listen(self) -> None:
        """Installs handlers: PID 1 of a namespace does not receive signals without a handler."""
        for number in JOB_SIGNALS:
            signal.signal(number, self.on_signal)

    def on_signal(self, *_: object) -> None:
        self.is_signalled = True

    def was_signalled_too(self) -> bool:
        """Whether the signal that ended the first process was sent to the whole job: then it reaches this process
        too."""
        end = time.monotonic() + JOB_SIGNAL_S
        while not self.is_signalled and time.monotonic() < end:
            select.select([], [], [], 0.005)
        return self.is_signalled

    def handle(self, message: Message, fds: list[int]) -> None:
        op, number = message["op"], message["n"]
        try:
            if op == "run":
                pid = self.world.fork_inside()
                if pid == 0:
                    self.execute(message, fds)
                self.jobs[pid] = number
                if message["tell"]:
                    pidfd = os.pidfd_open(pid)
                    kernel.send(self.ctl, {"n": number, "started": True}, [pidfd])
                    os.close(pidfd)
            elif op in files.FILE_JOBS:
                pid = self.world.fork_unseen()
                if pid == 0:
                    self.do_file_job(message, fds)
                self.jobs[pid] = number
            else:
                self.signal(op, number, message.get("signum", signal.SIGKILL))
        except OSError as error:
            if isinstance(error, BrokenPipeError | ConnectionResetError):
                raise
            kernel.send(self.ctl, {"n": number, "broken": f"{op}: {error}", "errno": error.errno})

    def signal(self, op: str, number: int, signum: int) -> None:
        for pid in [pid for pid, job in self.jobs.items() if job == number]:  # not reaped, so the PID is still its own
            if op == "end":
                os.kill(pid, signal.SIGSTOP)  # it starts no more processes, but still adopts orphans
                kernel.kill_below(pid)
            try:
                os.killpg(pid, signum)
            except ProcessLookupError:  # not yet the leader of its group
                os.kill(pid, signum)

    def execute(self, request: Message, fds: list[int]) -> NoReturn:
        """Runs in the child, and becomes the command. Infrastructure errors are sent to the service, errors of the
        command are written to its stderr."""
        try:
            kernel.reset_signals()
            os.setsid()
            if request["tty"]:
                fcntl.ioctl(fds[-1], termios.TIOCSCTTY, 0)
            with contextlib.suppress(OSError):  # killed before processes of the host when memory runs out
                kernel.write_file("/proc/self/oom_score_adj", "1000")
            self.world.enter()
            for name, value in request["limits"].items():
                _, hard = resource.getrlimit(getattr(resource, name))
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(getattr(resource, name), (value, value))
            os.umask(0o022)
            if request["reaps"]:
                kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            if self.refused:
                kernel.refuse_calls(self.refused)
        except BaseException as error:
            self.give_up(request, f"entering the sandbox: {error}", error)
        what, status = request["cwd"], 126
        try:
            slots = dict(zip(request["slots"], fds, strict=False))
            if 0 not in slots:
                slots[0] = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            kernel.place(slots)
            os.chdir(what)
            what, status = request["argv"][0], 127
            env = {os.fsencode(key): os.fsencode(value) for key, value in request["env"].items()}
            run_program(request["argv"], env)
        except OSError as error:
            if error.errno in INFRASTRUCTURE_ERRNOS:
                self.give_up(request, f"{what}: {error}", error)
            files.write_all(2, os.fsencode(f"{what}: {error.strerror}\n"))
        finally:
            os._exit(status)

    def give_up(self, request: Message, trouble: str, error: BaseException) -> NoReturn:
        kernel.send(self.ctl, {"n": request["n"], "broken": trouble, "errno": getattr(error, "errno", None)})
        select.select([self.lifeline], [], [], 5.0)  # this exit status must not be taken for the command's
        os._exit(255)

    def do_file_job(self, request: Message, fds: list[int]) -> NoReturn:
        answer: Message
        try:
            self.world.enter()
            os.umask(0o022)
            try:
                answer = {"done": files.FILE_JOBS[request["op"]](request, fds)}
            except files.Refused as refused:
                answer = {"refused": str(refused)}
            except files.Unwritten as unwritten:
                answer = {"errno": unwritten.error.errno, "strerror": unwritten.error.strerror}
            except OSError as error:
                answer = {"errno": error.errno, "strerror": error.strerror}
        except BaseException as error:
            answer = {"broken": f"{request['op']}: {error}"}
        with contextlib.suppress(OSError):
            kernel.send(self.ctl, {"n": request["n"], **answer})
        os._exit(0)


def run_program(argv: list[str], env: dict[bytes, bytes]) -> None:
    """Like execvpe, but uses the search path of `env` and imports nothing."""
    if "/" in argv[0]:
        os.execve(argv[0], argv, env)
    missing: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for folder in os.fsdecode(env.get(b"PATH", b"/usr/bin:/bin")).split(":"):
        try:
            os.execve(os.path.join(folder, argv[0]), argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            missing = error
    raise missing
