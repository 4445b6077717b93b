"""The parent of every sandbox: a program of its own, run as `python -I -S program.py FD KIND`.

    service ──socket──▶ fork server ─clone─▶ init process (PID 1 of the sandbox's own namespaces)
       │                                    ├── bwrap or apptainer ── its init ── an idle process
       ├──────── one socket per sandbox ───▶├── exec'd commands (directly in the inner namespaces)
       └──────── lifeline (pipe) ──────────▶├── file jobs (in its mounts, not in its PID namespace)
                                            └── squashfuse, for a SIF image

The fork server is a loaded Python that clones itself, so that a start costs the service one message. It does what
requires its own user (folders, the record, cgroups, and, for a service run as root, mounts that show root's files as
the sandbox's own), and then releases the init process. The init process switches to the sandbox's user, opens the
doorway, assembles the root file system (image, layers, overlay), runs bwrap or Apptainer on it, and serves one sandbox
until it ends. With KIND `local` there are no namespaces: the init process is a subreaper and kills its descendants one
by one. With KIND `container` this program is PID 1 of a container, run by the portable Python that is bound into it,
and is its init process.

Measured on two busy x86-64 cores with bubblewrap 0.8 (medians): 8 to 11 ms from the request to a ready sandbox, 3.5 ms
for a command's status; 0.6 ms of the service's CPU for a start and 0.4 for a kill; 6 ms of CPU for both in all other
processes together. 200 at once: 1.8 s. Loading a Python for each sandbox would add 70 ms.

Invariants. EOF on the lifeline, whose only write end is the service's, ends the init process, and the kernel ends all
processes below it; so does EOF on its socket. The init process's pidfd, sent before any code of the sandbox runs, is
readable only when everything in the sandbox is dead. No process here holds a descriptor of another sandbox; all are
CLOEXEC, and the child renumbers its own, so that numbers cannot collide. Processes inside have no capability, no way to
get one, and only the descriptors that the service passed. A status comes from waitpid, never from inside.

The file is longer than others because it is one program. It must import nothing from the package (it starts before, and
outlives, any import), and *nothing at all* after entering a sandbox, whose files are not trusted: hence all imports are
at the top.
"""

# Descriptors and raw paths: pathlib would only be one more import.
# ruff: noqa: PTH100, PTH101, PTH102, PTH106, PTH108, PTH110, PTH116, PTH118
# ruff: noqa: PTH120

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import termios
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING or __package__:
    from rollyard.sandbox.launcher import file_jobs as files
    from rollyard.sandbox.launcher import kernel
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import file_jobs as files
    import kernel

Message = dict[str, Any]

AS_IT_IS, MUST_MAP, MAY_MAP = 0, 1, 2  # whether a tree must, or should if possible, belong to the sandbox's user

OURS = frozenset((errno.EAGAIN, errno.EIO, errno.ENFILE, errno.ENODEV, errno.ENOMEM, errno.ESTALE))
"""Errors of exec that are caused by the machine, not by the program."""

JOB_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a batch system or a terminal sends to every process of a job."""

JOB_SIGNAL_S = 2.0
"""The time in which it reaches all of them, even on a busy machine."""

# --- the init process: serves one sandbox until it ends -----------------------------------------------


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
                if status - 128 in JOB_SIGNALS and self.got_it_too():
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

    def got_it_too(self) -> bool:
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
            if error.errno in OURS:
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


# --- starting one sandbox -----------------------------------------------------------------------------


def start(config: Message, kind: str, fds: list[int]) -> NoReturn:
    """Runs in the fork server's child and becomes the init process. `step` names the failed step for the service."""
    kernel.reset_signals()
    for group in config["tasks"]:  # cgroup v1 checks the permissions of the process that opened the files
        os.write(group, b"0")
    kernel.place({3: fds[0], 4: fds[1], 5: fds[2]})
    kernel.close_from(6)
    for fd in (3, 4, 5):
        os.set_inheritable(fd, False)
    ctl, lifeline, gate, step = socket.socket(fileno=3), 4, socket.socket(fileno=5), "launcher"
    try:
        go, trees = kernel.receive(gate)
        gate.close()
        if go is None:
            os._exit(1)  # the fork server failed and has reported it, or has ended
        refused = base64.b64decode(config.get("seccomp", ""))
        announce(ctl, go["pid"])
        wake = kernel.watch_children()
        if kind == "local":
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            os.setsid()
            world = ProcessSpace()
        else:
            step = "user"
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            step = "mounts"
            kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
            step = "loopback"
            kernel.bring_lo_up()
            step = "doorway"
            open_listeners(ctl, config)
            step = "stage"
            set_stage(config["stage"], trees)
            step = "proc"
            if config["namespaces"] is not None:
                kernel.write_file("/proc/sys/user/max_user_namespaces", str(config["namespaces"]))
            kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
            step = "overlay"
            vital = make_root(config["stage"], config["root"]) if config["root"] else ()
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # processes inside cannot inspect children that are about to exec
            step = kind
            world, env = run_inner(config, kind, lifeline, vital)
            kernel.send(ctl, {"event": "env", "env": env})
        kernel.send(ctl, {"event": "ready"})
        sandbox_init = SandboxInit(ctl, lifeline, wake, world, refused)
        if kind == "bubblewrap":
            sandbox_init.listen()
        sandbox_init.serve()
    except BaseException as error:
        with contextlib.suppress(OSError):
            kernel.send(ctl, {"event": "failed", "step": step, "detail": str(error)})
    os._exit(1)


def announce(ctl: socket.socket, pid: int) -> None:
    """Sends the service this process's PID and pidfd, which proves its end."""
    pidfd = os.pidfd_open(os.getpid())
    kernel.send(ctl, {"event": "born", "pid": pid}, [pidfd])
    os.close(pidfd)


def open_listeners(ctl: socket.socket, config: Message) -> None:
    """Opens the listeners of the doorway and the egress proxy, if requested (a port each). Called before any code of
    the sandbox can run, so that no process inside can take the port first."""
    for name in ("doorway", "egress"):
        if config[name]:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
                listener.bind(("127.0.0.1", config[name]))
                listener.listen(16)
                kernel.send(ctl, {"event": name}, [listener.fileno()])


def set_stage(stage: Message, trees: list[int]) -> None:
    """Mounts all host trees of the sandbox below one folder, under short names: the sandbox's user may not be able to
    reach their original paths, and those paths do not appear in any list of mounts."""
    at = stage["at"]
    opened = trees or [kernel.open_tree(path) for _, path, _ in stage["trees"]]
    kernel.mount("stage", at, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
    for (name, _, _), tree in zip(stage["trees"], opened, strict=True):
        target = f"{at}/{name}"
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        kernel.move_mount(tree, target)
        os.close(tree)


def make_root(stage: Message, root: Message) -> tuple[int, ...]:
    """Mounts image, layers and the sandbox's own files as STAGE/root. Returns the processes that it depends on."""
    at, vital = stage["at"], ()
    if sif := root.get("sif"):
        os.mkdir(f"{at}/image")
        vital = (mount_sif(sif, f"{at}/sif", f"{at}/image"),)
    os.mkdir(f"{at}/root")
    lowers = ":".join(f"{at}/{name}" for name in root["lowers"])
    options = f"lowerdir={lowers},upperdir={at}/own/upper,workdir={at}/own/work,userxattr"
    kernel.mount("overlay", f"{at}/root", "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for path, mode in root["make"]:
        make_place(f"{at}/root", path, mode)
    return vital


def make_place(root: str, path: str, mode: int) -> None:
    """Creates a folder (or, for mode 0, a file) as a mount point. A link in its path could lead out, so it is
    replaced."""
    here = root
    *above, last = path.strip("/").split("/")
    for name in above:
        here = f"{here}/{name}"
        make_folder(here, 0o755)
    here = f"{here}/{last}"
    if mode:
        make_folder(here, mode)
        return
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(os.lstat(here).st_mode):
            return
        os.unlink(here)
    os.close(os.open(here, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def make_folder(path: str, mode: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            return
        os.unlink(path)
    os.mkdir(path)
    os.chmod(path, mode)


def mount_sif(sif: Message, image: str, target: str) -> int:
    """Mounts a SIF file and returns squashfuse's PID. It goes to the background once it has mounted, and PID 1, this
    process, becomes its parent."""
    stderr, stderr_in = os.pipe2(os.O_CLOEXEC)
    options = f"offset={sif['offset']},ro,nosuid,nodev"
    argv = ["squashfuse", "-o", options, image, target]
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    given = [(os.POSIX_SPAWN_DUP2, fd, slot) for slot, fd in enumerate((null, null, stderr_in))]
    env = {"PATH": "/usr/bin:/bin"}
    pid = os.posix_spawn(sif["program"], argv, env, file_actions=given, setsigdef=kernel.DEFAULTED)
    os.close(stderr_in)
    os.close(null)
    _, status = os.waitpid(pid, 0)
    said = os.read(stderr, 4096).decode("utf-8", "replace").strip() if status else ""
    os.close(stderr)
    if status:
        raise OSError(f"squashfuse: {said or status}")
    return next(child for child, (parent, _) in kernel.living().items() if parent == 1)


def run_inner(
    config: Message, kind: str, lifeline: int, vital: tuple[int, ...]
) -> tuple[NamespacedSpace, dict[str, str]]:
    """Starts bwrap or Apptainer with an idle `cat` inside, whose echo proves that the sandbox is ready."""
    (echo_in, echo), (echoed, echoed_in), (info, info_in), (stderr, stderr_in) = (
        os.pipe2(os.O_CLOEXEC) for _ in "1234"
    )
    os.write(echo, b".")
    given, argv = [echo_in, echoed_in, stderr_in], config["argv"]
    if kind == "bubblewrap":
        arguments = os.memfd_create("arguments", os.MFD_CLOEXEC)  # keeps them out of `ps`
        files.write_all(arguments, b"".join(os.fsencode(word) + b"\0" for word in argv))
        os.lseek(arguments, 0, os.SEEK_SET)
        given += [info_in, arguments]
        argv = ["bwrap", "--info-fd", "3", "--args", "4"]
        if config["seccomp"]:  # for the idle program too, since it is a file of the image
            refused = os.memfd_create("seccomp", os.MFD_CLOEXEC)
            files.write_all(refused, base64.b64decode(config["seccomp"]))
            os.lseek(refused, 0, os.SEEK_SET)
            given.append(refused)
            argv += ["--seccomp", "5"]
        argv += ["--", "cat"]
    # All source descriptors are above 4, and only the last target is 5: none is overwritten before it is used.
    actions = [(os.POSIX_SPAWN_DUP2, fd, slot) for slot, fd in enumerate(given)]
    idle = os.posix_spawn(config["program"], argv, config["env"], file_actions=actions, setsigdef=kernel.DEFAULTED)
    for fd in {*given, info_in}:
        os.close(fd)
    if lifeline in select.select([echoed, lifeline], [], [])[0]:
        os._exit(1)
    if os.read(echoed, 1) != b".":
        raise OSError(os.read(stderr, 4096).decode("utf-8", "replace").strip() or "it ended at once")
    if kind == "bubblewrap":
        first = json.loads(os.read(info, 4096))["child-pid"]
        # bwrap's own process would only forward how PID 1 inside ended, with 137 both if it was killed from outside and
        # if its idle process was killed inside. As a child of this process, PID 1 reports its own status.
        os.kill(idle, signal.SIGKILL)
        os.waitpid(idle, 0)
        world = NamespacedSpace((first, *vital), first)
        env: dict[str, str] = {}
    else:
        pid = innermost(idle)
        world, env = NamespacedSpace((idle, *vital), pid), environment(pid)
        shut(world, config["shm_bytes"])
    for fd in (echoed, info, stderr):  # `echo` stays open: at EOF the idle process would end
        os.close(fd)
    return world, env


def innermost(root: int) -> int:
    """Returns the idle process: the one below `root` that is deepest in PID namespaces, and there the youngest."""
    found: list[tuple[int, int, int]] = []
    for pid in kernel.below({root}, kernel.living()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
            numbers = next(line for line in status if line.startswith("NSpid:")).split()[1:]
            found.append((len(numbers), int(numbers[-1]), pid))
    if not found:
        raise OSError("it has no process inside")
    return max(found)[2]


def environment(pid: int) -> dict[str, str]:
    """Returns the variables that the image sets, as Apptainer's start-up scripts left them."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        words = file.read(1 << 20).split(b"\0")
    return {os.fsdecode(key): os.fsdecode(value) for key, found, value in (w.partition(b"=") for w in words) if found}


def shut(world: NamespacedSpace, shm_bytes: int) -> None:
    """Restricts what Apptainer leaves open: /proc and /dev are writable; /dev/shm, and the tmpfs of the file mounted as
    /etc/resolv.conf, may each take half of the memory; and /proc/keys lists the user's keys."""
    said, said_in = os.pipe2(os.O_CLOEXEC)
    pid = world.fork_unseen()
    if pid == 0:
        try:
            world.enter_mounts()
            socket.sethostname("sandbox")
            again = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
            for path in ("/proc/keys", "/proc/key-users"):
                with contextlib.suppress(FileNotFoundError):  # a kernel without keys
                    kernel.mount("/dev/null", path, "", kernel.MS_BIND)
            with open("/proc/1/mounts", "rb") as file:
                mounts = [os.fsdecode(line).split(" ") for line in file]
            for _, at, kind, options, *_ in mounts:
                if kind == "tmpfs" and options.split(",")[0] == "rw" and at != "/dev/shm":
                    kernel.mount("none", at, "", again | kernel.MS_NODEV * (at != "/dev"))
            kernel.mount("none", "/proc", "", again | kernel.MS_NODEV)
            kernel.mount("none", "/dev", "", again)
            flags = kernel.MS_REMOUNT | kernel.MS_NOSUID | kernel.MS_NODEV
            kernel.mount("tmpfs", "/dev/shm", "tmpfs", flags, f"size={shm_bytes}")
        except OSError as error:
            os.write(said_in, str(error).encode()[:500])
        finally:
            os._exit(0)
    os.close(said_in)
    os.waitpid(pid, 0)
    trouble = os.read(said, 500).decode("utf-8", "replace")
    os.close(said)
    if trouble:
        raise OSError(f"restricting Apptainer's mounts failed: {trouble}")


# --- the fork server ----------------------------------------------------------------------------------


class Removal:
    """Runs `rm -rf` as a process, since it handles overlay work folders and deep trees; if permissions forbid it, runs
    chmod and retries."""

    STEPS = (("rm", "-rf"), ("chmod", "-R", "u+rwX"), ("rm", "-rf"))

    def __init__(self, paths: list[str], answer: int) -> None:
        self.paths, self.answer, self.step = paths, answer, 0
        for path in paths:
            with contextlib.suppress(OSError):  # usually there are few files, and no process is needed
                remove_small(path)

    def go_on(self) -> int | None:
        """Starts the next step and returns its PID, or sends the answer and returns None."""
        self.paths = [path for path in self.paths if os.path.lexists(path)]
        if self.paths and self.step < len(self.STEPS):
            name, *options = self.STEPS[self.step]
            self.step += 1
            program = f"/bin/{name}" if os.path.exists(f"/bin/{name}") else f"/usr/bin/{name}"
            with contextlib.suppress(OSError):
                return os.posix_spawn(program, [name, *options, "--", *self.paths], {}, setsigdef=kernel.DEFAULTED)
        with contextlib.suppress(OSError):
            os.write(self.answer, b"1" if self.paths else b"0")
        os.close(self.answer)
        return None


def remove_small(path: str, depth: int = 0) -> None:
    """Removes a few folders and files; raises OSError if there are more."""
    for count, entry in enumerate(os.scandir(path)):
        if count == 16 or depth > 4:
            raise OSError("too many entries")
        if entry.is_dir(follow_symlinks=False):
            remove_small(entry.path, depth + 1)
        else:
            os.unlink(entry.path)
    os.rmdir(path)


GROUP_MS = 50


def make_group(wanted: Message | None, fds: list[int]) -> list[int]:
    """Creates the sandbox's cgroup and returns descriptors: of its folder, to start in (v2), or of its tasks files, to
    enter (v1). They are added to `fds`, which the fork server closes."""
    opened: list[int] = []
    for folder, settings in wanted["make"] if wanted else ():
        os.mkdir(folder)
        for file, value, is_optional in settings:
            try:
                kernel.write_file(f"{folder}/{file}", value)
            except (FileNotFoundError, PermissionError):  # EPERM: the file does not exist and cannot be created there
                if not is_optional:
                    raise
        is_v2 = wanted is not None and wanted["is_v2"]
        path, flags = (folder, os.O_RDONLY | os.O_DIRECTORY) if is_v2 else (f"{folder}/tasks", os.O_WRONLY)
        opened.append(os.open(path, flags | os.O_CLOEXEC))
        fds.append(opened[-1])
    return opened


def is_removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


class ForkServer:
    def __init__(self, sock: socket.socket, kind: str) -> None:
        self.sock, self.kind, self.wake = sock, kind, kernel.watch_children()
        self.owner = os.geteuid(), os.getegid()
        spaces = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
        self.flags = 0 if kind == "local" else spaces
        self.inits: set[int] = set()
        self.removals: dict[int, Removal] = {}
        self.groups: list[str] = []  # to be removed once the kernel has emptied them, which may take a moment

    def serve(self) -> NoReturn:
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        poller.register(self.wake, select.POLLIN)
        while True:
            self.groups = [folder for folder in self.groups if not is_removed(folder)]
            for fd, _ in poller.poll(GROUP_MS if self.groups else None):
                if fd == self.wake:
                    for pid, status in kernel.reaped(self.wake):
                        self.on_end(pid, status)
                    continue
                message, fds = kernel.receive(self.sock)
                if message is None:  # the service has ended; the init processes detect it too
                    self.groups = [folder for folder in self.groups if not is_removed(folder)]
                    os._exit(0)
                if message["op"] == "remove":
                    self.groups += message["groups"]
                    self.remove(Removal(message["paths"], fds[0]))
                else:
                    self.start(message, fds)

    def start(self, message: Message, fds: list[int]) -> None:
        gate, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        step, pid = "folders", 0
        try:
            for folder, mode in message["folders"]:
                os.mkdir(folder)
                os.chmod(folder, mode)
            step = "cgroup"
            groups = make_group(message.get("cgroup"), fds)
            step = "namespaces"
            is_v2 = bool(groups) and message["cgroup"]["is_v2"]
            pid = kernel.clone_into(self.flags, groups[0]) if is_v2 else kernel.clone(self.flags)
            if pid == 0:
                gate.close()
                try:
                    message["tasks"] = [] if is_v2 else groups
                    start(message, self.kind, [fds[0], fds[1], theirs.fileno()])
                finally:
                    os._exit(1)
            self.inits.add(pid)
            self.release(pid, message, gate)
        except OSError as error:
            step = getattr(error, "step", step)
            with socket.socket(fileno=os.dup(fds[0])) as ctl, contextlib.suppress(OSError):
                kernel.send(ctl, {"event": "failed", "step": step, "detail": str(error)})
        finally:
            gate.close()
            theirs.close()
            for fd in fds:
                os.close(fd)

    def release(self, pid: int, message: Message, gate: socket.socket) -> None:
        """Does what only the fork server's user may do for the init process, then lets it continue."""
        here, trees = f"/proc/{pid}", []
        with step_of("namespaces"):
            if self.kind != "local":
                uid, gid = (message["user"],) * 2 if message["user"] is not None else self.owner
                kernel.write_file(f"{here}/setgroups", "deny")
                kernel.write_file(f"{here}/uid_map", f"0 {uid} 1")
                kernel.write_file(f"{here}/gid_map", f"0 {gid} 1")
        with step_of("record"), open(f"{here}/stat", "rb") as file:
            start_time = file.read().rpartition(b")")[2].split()[19].decode()
            inode = os.stat(f"{here}/ns/pid").st_ino
            record = {"pid": pid, "start_time": start_time, "pid_namespace": inode}
            kernel.write_file(message["record"], json.dumps(record))
        try:
            with step_of("stage"):
                if self.kind != "local" and message["user"] is not None:
                    trees = self.trees(f"{here}/ns/user", message["stage"]["trees"])
            kernel.send(gate, {"pid": pid}, trees)
        finally:
            for tree in trees:
                os.close(tree)

    def trees(self, user_namespace: str, wanted: list[tuple[str, str, int]]) -> list[int]:
        """Opens the trees for a sandbox that runs as another user, with an idmap that makes it their owner."""
        opened: list[int] = []
        mapping = os.open(user_namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for _, path, mode in wanted:
                opened.append(tree := kernel.open_tree(path))
                try:
                    if mode:
                        kernel.idmap(tree, mapping)
                except OSError:
                    if mode == MUST_MAP:
                        raise
        except BaseException:
            for tree in opened:
                os.close(tree)
            raise
        finally:
            os.close(mapping)
        return opened

    def remove(self, removal: Removal) -> None:
        pid = removal.go_on()
        if pid is not None:
            self.removals[pid] = removal

    def on_end(self, pid: int, status: int) -> None:
        if removal := self.removals.pop(pid, None):
            self.remove(removal)
        elif pid in self.inits:
            self.inits.discard(pid)
            if status < 0 and self.kind == "local":  # it was killed; this subreaper has adopted its orphans
                kernel.kill_below(os.getpid(), spare=self.inits | self.removals.keys())


@contextlib.contextmanager
def step_of(name: str) -> Any:
    try:
        yield
    except OSError as error:
        error.step = name  # type: ignore[attr-defined]
        raise


def keep_container(path: str) -> NoReturn:
    """Serves a container as its PID 1. Receives its descriptors from the service's socket at `path`."""
    kernel.reset_signals()  # PID 1 ignores signals without a handler, and Python has one for SIGINT
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(path)
        config, fds = kernel.receive(sock)
    if config is None:
        os._exit(1)
    ctl, lifeline, step = socket.socket(fileno=fds[0]), fds[1], "container"
    try:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        announce(ctl, 0)
        wake = kernel.watch_children()
        step = "doorway"
        open_listeners(ctl, config)
        step = "folders"
        with contextlib.suppress(PermissionError):
            os.chmod("/", 0o755)  # podman's is 0555, which without capabilities applies to root too
        for folder, mode in config["make"]:
            make_place("", folder, mode)
        kernel.send(ctl, {"event": "env", "env": environment(os.getpid())})
        kernel.send(ctl, {"event": "ready"})
        SandboxInit(ctl, lifeline, wake, ContainerSpace(), base64.b64decode(config["seccomp"])).serve()
    except BaseException as error:
        with contextlib.suppress(OSError):
            kernel.send(ctl, {"event": "failed", "step": step, "detail": str(error)})
    os._exit(1)


def main() -> NoReturn:
    if sys.argv[2] == "container":
        keep_container(sys.argv[1])
    sock, kind = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    sock.set_inheritable(False)
    os.chdir("/")  # the sandboxes' users may not have access to the service's folder, and Apptainer would enter it
    if os.geteuid() == 0:
        os.setgroups([])
    if kind == "local":
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()  # clones keep sharing these pages
    gc.disable()
    ForkServer(sock, kind).serve()


if __name__ == "__main__":
    main()
