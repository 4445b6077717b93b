"""The small parent of every sandbox: a program of its own, run as `python -I -S program.py FD KIND`.

    service ──socket──▶ zygote ──clone──▶ keeper (PID 1 of the sandbox's own namespaces)
       │                                    ├── bwrap or apptainer ── its init ── an idle process
       ├──────── one socket per sandbox ───▶├── exec'd commands (straight in the inner namespaces)
       └──────── lifeline (pipe) ──────────▶├── file jobs (in its mounts, not in its PID namespace)
                                            └── squashfuse, for a SIF image

The zygote is a loaded Python that clones itself, so that a start costs the service one message. It does what needs its
own user (folders, the record, cgroups, and, for a service run as root, mounts that show root's files as the sandbox's
own), and lets the keeper go. The keeper becomes the sandbox's user, opens the doorway, puts the root file system
together (image, layers, overlay), runs bwrap or Apptainer on it, and serves one sandbox for its life. With KIND `local`
there are no namespaces: the keeper is a subreaper and kills its descendants one by one. With KIND `container` this
program is PID 1 of a container, run by a Python of ours that is bound into it, and is its keeper.

Measured on two busy x86-64 cores with bubblewrap 0.8 (medians): 8 to 11 ms from the request to a sandbox that stands,
3.5 ms for a command's status; 0.6 ms of the service's CPU for a start and 0.4 for a kill; 6 ms of CPU for both in
all other processes together. 200 at once: 1.8 s. A Python loaded for each sandbox would add 70 ms.

Invariants. EOF on the lifeline, whose only write end is the service's, ends the keeper, and the kernel ends all
below it; so does EOF on its socket. The keeper's pidfd, sent before anything of the sandbox runs, is readable
only when everything in it is dead. No process here holds a descriptor of another sandbox; all are CLOEXEC, and
numbers are given anew in the child, so that none can collide. What runs inside has no capability, no way to get
one, and only the descriptors that the service named. A status comes from waitpid, never from inside.

Longer than other files because it is one program. It must load nothing from the package (it starts before, and
outlives, any import), and *nothing at all* after entering a sandbox, whose files are not ours: hence the imports of
everything at the top.
"""

# Descriptors and raw paths: pathlib would only be more to load.
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

AS_IT_IS, MUST_MAP, MAY_MAP = 0, 1, 2  # a tree that must, or should if it can, belong to the sandbox's user

OURS = frozenset((errno.EAGAIN, errno.EIO, errno.ENFILE, errno.ENODEV, errno.ENOMEM, errno.ESTALE))
"""Errors of a program's start that say something of the machine, and nothing of the program."""

JOB_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What a batch system, or a terminal, sends to every process of a job."""

JOB_SIGNAL_S = 2.0
"""Within which it has sent it to all of them, on a busy machine too."""

# --- the keeper: serves one sandbox for its life ------------------------------------------------------


class ProcessSpace:
    """Where the keeper's children go. This one is `local`: nowhere."""

    vital: tuple[int, ...] = ()  # without any of these processes there is no sandbox

    def fork_inside(self) -> int:
        return kernel.clone()

    def fork_unseen(self) -> int:
        return kernel.clone()

    def enter(self) -> None:
        pass

    def leave(self) -> NoReturn:
        """Ends everything, then us."""
        while True:
            kernel.kill_below(os.getpid())
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                os._exit(0)
            select.select([], [], [], 0.005)  # killed, and not yet dead; one that never dies keeps us, as it must


class ContainerSpace(ProcessSpace):
    """We are PID 1 in somebody else's container: its commands are our children, and die with us."""

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
        kernel.setns(self.pid, kernel.CLONE_NEWPID)  # for children only: they are born in the sandbox, ours to wait for
        return kernel.clone()

    def fork_unseen(self) -> int:
        """A child that the sandbox's processes cannot see: it may hold descriptors of the host's."""
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
        os._exit(0)  # we are PID 1: the kernel does the rest before our pidfd says so


class SandboxInit:
    def __init__(self, ctl: socket.socket, lifeline: int, wake: int, world: ProcessSpace, refused: bytes) -> None:
        self.ctl, self.lifeline, self.wake, self.world = ctl, lifeline, wake, world
        self.refused = refused  # a seccomp filter for all that runs inside
        self.is_signalled = False  # by the host: nothing inside can see us
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
        """As PID 1 of a namespace we would not notice a signal that we have no handler for."""
        for number in JOB_SIGNALS:
            signal.signal(number, self.on_signal)

    def on_signal(self, *_: object) -> None:
        self.is_signalled = True

    def got_it_too(self) -> bool:
        """Whether the signal that ended our first process was sent to the whole job: then it comes to us as well."""
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
        for pid in [pid for pid, job in self.jobs.items() if job == number]:  # not reaped: the number is its own
            if op == "end":
                os.kill(pid, signal.SIGSTOP)  # so that it starts nothing new, and orphans still come to it
                kernel.kill_below(pid)
            try:
                os.killpg(pid, signum)
            except ProcessLookupError:  # not yet the leader of its group
                os.kill(pid, signum)

    def execute(self, request: Message, fds: list[int]) -> NoReturn:
        """In the child: becomes the command. Trouble of ours goes to the service, the command's to its stderr."""
        try:
            kernel.reset_signals()
            os.setsid()
            if request["tty"]:
                fcntl.ioctl(fds[-1], termios.TIOCSCTTY, 0)
            with contextlib.suppress(OSError):  # before anything of the host's when memory runs out
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
        select.select([self.lifeline], [], [], 5.0)  # our status must not pass for the command's
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
    """execvpe, but with the search path of `env` and without a late import."""
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
    """In the zygote's child, the keeper to be. `step` names for the service what could not be done."""
    kernel.reset_signals()
    for group in config["tasks"]:  # cgroup v1: who may is decided by who opened them
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
            os._exit(1)  # the zygote could not, and has said so, or is dead
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
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # children about to exec inside cannot be looked into from there
            step = kind
            world, env = run_inner(config, kind, lifeline, vital)
            kernel.send(ctl, {"event": "env", "env": env})
        kernel.send(ctl, {"event": "ready"})
        init_client = SandboxInit(ctl, lifeline, wake, world, refused)
        if kind == "bubblewrap":
            init_client.listen()
        init_client.serve()
    except BaseException as error:
        with contextlib.suppress(OSError):
            kernel.send(ctl, {"event": "failed", "step": step, "detail": str(error)})
    os._exit(1)


def announce(ctl: socket.socket, pid: int) -> None:
    """Tells the service who we are, and gives it the proof of our end."""
    pidfd = os.pidfd_open(os.getpid())
    kernel.send(ctl, {"event": "born", "pid": pid}, [pidfd])
    os.close(pidfd)


def open_listeners(ctl: socket.socket, config: Message) -> None:
    """The doorway and the way out, where they are wanted (a port each). Before any code of the sandbox can run: nobody
    inside can have the port first."""
    for name in ("doorway", "egress"):
        if config[name]:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
                listener.bind(("127.0.0.1", config[name]))
                listener.listen(16)
                kernel.send(ctl, {"event": name}, [listener.fileno()])


def set_stage(stage: Message, trees: list[int]) -> None:
    """Everything of the host's that the sandbox is made of, under short names at one place: an ordinary user's paths
    need not be reachable by the user that we have become, and none of them shows in anyone's list of mounts."""
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
    """image + layers + what this sandbox writes = STAGE/root. Returns the processes that hold it up."""
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
    """A folder (or, for mode 0, a file) to mount something on. A link on the way could lead out: it goes."""
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
    """squashfuse's pid. It goes to the background once it has mounted, and is our child then: we are PID 1."""
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
    """Starts bwrap or Apptainer with an idle `cat` inside, which proves by an echo that the sandbox stands."""
    (echo_in, echo), (echoed, echoed_in), (info, info_in), (stderr, stderr_in) = (
        os.pipe2(os.O_CLOEXEC) for _ in "1234"
    )
    os.write(echo, b".")
    given, argv = [echo_in, echoed_in, stderr_in], config["argv"]
    if kind == "bubblewrap":
        arguments = os.memfd_create("arguments", os.MFD_CLOEXEC)  # `ps` need not show them
        files.write_all(arguments, b"".join(os.fsencode(word) + b"\0" for word in argv))
        os.lseek(arguments, 0, os.SEEK_SET)
        given += [info_in, arguments]
        argv = ["bwrap", "--info-fd", "3", "--args", "4"]
        if config["seccomp"]:  # for the idle program too: it is the image's
            refused = os.memfd_create("seccomp", os.MFD_CLOEXEC)
            files.write_all(refused, base64.b64decode(config["seccomp"]))
            os.lseek(refused, 0, os.SEEK_SET)
            given.append(refused)
            argv += ["--seccomp", "5"]
        argv += ["--", "cat"]
    # All of ours have numbers above 4, and only the last goes to 5: none is overwritten before it is used.
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
        # bwrap's own process would only pass on how PID 1 inside has ended, with 137 both for one that was killed from
        # outside and for one whose idle process was killed inside. As our child, PID 1 tells us itself.
        os.kill(idle, signal.SIGKILL)
        os.waitpid(idle, 0)
        world = NamespacedSpace((first, *vital), first)
        env: dict[str, str] = {}
    else:
        pid = innermost(idle)
        world, env = NamespacedSpace((idle, *vital), pid), environment(pid)
        shut(world, config["shm_bytes"])
    for fd in (echoed, info, stderr):  # `echo` stays: at its end the idle process would end
        os.close(fd)
    return world, env


def innermost(root: int) -> int:
    """The process below `root` that is deepest in PID namespaces, and there the youngest: the idle one."""
    found: list[tuple[int, int, int]] = []
    for pid in kernel.below({root}, kernel.living()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
            numbers = next(line for line in status if line.startswith("NSpid:")).split()[1:]
            found.append((len(numbers), int(numbers[-1]), pid))
    if not found:
        raise OSError("it has no process inside")
    return max(found)[2]


def environment(pid: int) -> dict[str, str]:
    """What the image sets, as Apptainer's start-up scripts made it."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        words = file.read(1 << 20).split(b"\0")
    return {os.fsdecode(key): os.fsdecode(value) for key, found, value in (w.partition(b"=") for w in words) if found}


def shut(world: NamespacedSpace, shm_bytes: int) -> None:
    """What Apptainer leaves open: /proc and /dev can be written to, /dev/shm may take half of the memory, and so may
    the file that it shows as /etc/resolv.conf, in a tmpfs of its own; and /proc/keys names the user's keys."""
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
        raise OSError(f"what Apptainer leaves open could not be shut: {trouble}")


# --- the zygote ---------------------------------------------------------------------------------------


class Removal:
    """`rm -rf` as a process: it copes with overlay work folders and deep trees, and with chmod where one forbids it."""

    STEPS = (("rm", "-rf"), ("chmod", "-R", "u+rwX"), ("rm", "-rf"))

    def __init__(self, paths: list[str], answer: int) -> None:
        self.paths, self.answer, self.step = paths, answer, 0
        for path in paths:
            with contextlib.suppress(OSError):  # mostly there is next to nothing, and no process is needed
                remove_small(path)

    def go_on(self) -> int | None:
        """Starts the next step, or answers. Its pid, or None when all is done."""
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
    """Some folders and a handful of files; raises on whatever is more than that."""
    for count, entry in enumerate(os.scandir(path)):
        if count == 16 or depth > 4:
            raise OSError("too much for this")
        if entry.is_dir(follow_symlinks=False):
            remove_small(entry.path, depth + 1)
        else:
            os.unlink(entry.path)
    os.rmdir(path)


GROUP_MS = 50


def make_group(wanted: Message | None, fds: list[int]) -> list[int]:
    """Its cgroup, to be born in (v2: a folder) or to enter (v1: files of tasks). `fds` are the zygote's to close."""
    opened: list[int] = []
    for folder, settings in wanted["make"] if wanted else ():
        os.mkdir(folder)
        for file, value, is_optional in settings:
            try:
                kernel.write_file(f"{folder}/{file}", value)
            except (FileNotFoundError, PermissionError):  # EPERM: no such file, and none can be made there
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
        self.init_clients: set[int] = set()
        self.removals: dict[int, Removal] = {}
        self.groups: list[str] = []  # empty, or about to be: the kernel may need a moment

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
                if message is None:  # the service is gone; the keepers see it too
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
            self.init_clients.add(pid)
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
        """What only the zygote's user may do for the keeper; then it may go."""
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
        """For a sandbox that runs as another user: opened by us, shown to it as its own."""
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
        elif pid in self.init_clients:
            self.init_clients.discard(pid)
            if status < 0 and self.kind == "local":  # it was killed; as their subreaper we have its orphans now
                kernel.kill_below(os.getpid(), spare=self.init_clients | self.removals.keys())


@contextlib.contextmanager
def step_of(name: str) -> Any:
    try:
        yield
    except OSError as error:
        error.step = name  # type: ignore[attr-defined]
        raise


def keep_container(path: str) -> NoReturn:
    """As PID 1 of a container: fetches its descriptors from the service's socket at `path`, and is its keeper."""
    kernel.reset_signals()  # PID 1 is safe from what it has no handler for, and Python has one for SIGINT
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
            os.chmod("/", 0o755)  # podman's is 0555, and without capabilities that binds root too
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
    os.chdir("/")  # the service's folder need not be open to the sandboxes' users, and Apptainer would go there
    if os.geteuid() == 0:
        os.setgroups([])
    if kind == "local":
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()  # clones share these pages for good
    gc.disable()
    ForkServer(sock, kind).serve()


if __name__ == "__main__":
    main()
