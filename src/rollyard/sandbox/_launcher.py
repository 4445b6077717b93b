"""The small parent of every sandbox: a program of its own, run as `python -I -S _launcher.py FD KIND`.

    service ──socket──▶ zygote ──clone──▶ keeper (PID 1 of the sandbox's own namespaces)
       │                                    ├── bwrap ── its init ── an idle process
       ├──────── one socket per sandbox ───▶├── exec'd commands (straight in bwrap's namespaces)
       └──────── lifeline (pipe) ──────────▶└── file jobs (in its mounts, not in its PID namespace)

The zygote is a loaded Python that clones itself, so that a start costs the service one message. The keeper makes the
namespaces' insides, runs bwrap, and serves one sandbox for its life. With KIND `local` there are no namespaces:
the keeper is a subreaper and kills its descendants one by one.

Measured on two busy x86-64 cores with bubblewrap 0.8 (medians): 8 to 11 ms from the request to a sandbox that stands,
3.5 ms for a command's status; 0.6 ms of the service's CPU for a start and 0.4 for a kill; 6 ms of CPU for both in
all other processes together. 200 at once: 1.8 s. A Python loaded for each sandbox would add 70 ms.

Invariants. EOF on the lifeline, whose only write end is the service's, ends the keeper, and the kernel ends all
below it; so does EOF on its socket. The keeper's pidfd, sent before anything of the sandbox runs, is readable
only when everything in it is dead. No process here holds a descriptor of another sandbox; all are CLOEXEC, and
numbers are given anew in the child, so that none can collide. What runs inside has no capability, no way to get
one, and only the descriptors that the service named. A status comes from waitpid, never from inside.

Longer than other files because it is one program: it must load nothing from the package (it starts before, and
outlives, any import), and *nothing at all* after entering a sandbox, whose files are not ours: hence the
imports of everything at the top.
"""

# Descriptors and raw paths: pathlib would only be more to load.
# ruff: noqa: PTH101, PTH103, PTH104, PTH106, PTH108, PTH110, PTH112, PTH114, PTH115, PTH116, PTH118, PTH208, PTH211

from __future__ import annotations

import contextlib
import ctypes
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
import struct
import sys
import tarfile
import termios
import warnings  # noqa: F401  tarfile and os load it when first needed: too late inside
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

Message = dict[str, Any]

INLINE_BYTES = 32 << 10  # a longer message travels in a memfd: a packet socket's buffer is about 200 kB
MAX_FDS = 64
CHUNK = 1 << 20
LATEST = 1 << 33  # a file's time in an archive: beyond the year 2242 not every file system can set it
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NS_GET_USERNS = 0xB701
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 4, 24, 36, 38, 47
LINUX_CAPABILITY_VERSION_3 = 0x20080522
SYS_CLONE = 56 if os.uname().machine == "x86_64" else 220  # every other machine has the generic table
DEFAULTED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT)

# --- messages (the service uses these two as well) ----------------------------------------------------


def send(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """One message and its descriptors, whole or not at all."""
    data = json.dumps(message).encode()
    if len(data) <= INLINE_BYTES:
        socket.send_fds(sock, [data], fds)
        return
    spill = os.memfd_create("message", os.MFD_CLOEXEC)
    try:
        with open(spill, "wb", closefd=False) as file:
            file.write(data)
        socket.send_fds(sock, [b"@"], [*fds, spill])
    finally:
        os.close(spill)


def receive(sock: socket.socket) -> tuple[Message | None, list[int]]:
    """The next message; None at the other end's end."""
    # Not socket.recv_fds: it forgets its flags (CPython before 3.12), and with them CLOEXEC.
    room = socket.CMSG_SPACE(MAX_FDS * 4)
    data, ancillary, _, _ = sock.recvmsg(INLINE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = [fd for _, _, packed in ancillary for (fd,) in struct.iter_unpack("i", packed)]
    if data == b"@":
        with open(fds.pop(), "rb") as file:
            file.seek(0)
            data = file.read()
    return (json.loads(data) if data else None), fds


# --- the kernel ---------------------------------------------------------------------------------------

_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: keeps the interpreter's lock, which a clone must hold
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def _checked(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def clone(flags: int = 0) -> int:
    """fork, with namespaces. 0.6 ms instead of os.fork's 1.4: it skips the interpreter's hooks for threads, locks and
    random numbers, of which this program has none."""
    return _checked(_libc.syscall(SYS_CLONE, ctypes.c_ulong(flags | signal.SIGCHLD), 0, 0, 0, 0), "clone")


def prctl(option: int, first: int = 0, second: int = 0) -> int:
    return _checked(_libc.prctl(option, first, second, 0, 0), f"prctl {option}")


def setns(fd: int, kind: int) -> None:
    _checked(_libc.setns(fd, kind), f"setns {kind:#x}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    parts = [os.fsencode(part) for part in (source, target, kind, options)]
    _checked(_libc.mount(parts[0], parts[1], parts[2], flags, parts[3]), f"mount {kind or source} on {target}")


def write_file(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def bring_lo_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH14s", b"lo", 0x1 | 0x40, b""))  # SIOCSIFFLAGS, UP | RUNNING


def drop_privileges() -> None:
    """No capability now, none by any later exec."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == -1:
            break  # beyond the last one that this kernel knows
    prctl(PR_CAP_AMBIENT, 4)  # CLEAR_ALL
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header, none = struct.pack("Ii", LINUX_CAPABILITY_VERSION_3, 0), bytes(24)
    _checked(_libc.capset(header, none), "capset")


def place(slots: Mapping[int, int]) -> None:
    """Descriptor k becomes what `slots[k]` is. First all go above every target, so that no move hits another."""
    above = max(slots) + 1
    moved = {slot: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for slot, fd in slots.items()}
    for slot, fd in moved.items():
        os.dup2(fd, slot, inheritable=True)


def close_from(lowest: int) -> None:
    try:
        _checked(_libc.close_range(lowest, 0xFFFFFFFF, 0), "close_range")
    except (AttributeError, OSError):  # glibc before 2.34, Linux before 5.9
        os.closerange(lowest, os.sysconf("SC_OPEN_MAX"))


def reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in DEFAULTED:
        signal.signal(number, signal.SIG_DFL)


def watch_children() -> int:
    """A descriptor that becomes readable when a child ends."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def reaped(wake: int) -> Iterator[tuple[int, int]]:
    """(pid, status) of each child that has ended; the status as in `subprocess`."""
    with contextlib.suppress(BlockingIOError):
        os.read(wake, 4096)
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


# --- ending a tree of processes -----------------------------------------------------------------------


def living() -> dict[int, tuple[int, str]]:
    """pid → (parent, start time) of every process in sight that is not a zombie."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in b"ZX":
                    found[int(name)] = (int(fields[1]), fields[19].decode())
    return found


def below(roots: set[int], processes: dict[int, tuple[int, str]]) -> set[int]:
    found: set[int] = set()
    level = set(roots)
    while level:
        level = {pid for pid, (parent, _) in processes.items() if parent in level} - found - roots
        found |= level
    return found


def kill_below(root: int, spare: set[int] | None = None) -> None:
    """Kills all descendants of `root`, again and again until a look finds none; by pidfd, never by number."""
    for _ in range(100):
        processes = living()
        targets = below({root}, processes)
        if spare:
            targets -= spare | below(spare, processes)
        if not targets:
            return
        for pid in targets:
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
                try:
                    with open(f"/proc/{pid}/stat", "rb") as file:
                        if file.read().rpartition(b")")[2].split()[19].decode() == processes[pid][1]:
                            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                finally:
                    os.close(pidfd)


# --- files, done inside the sandbox by a forked child -------------------------------------------------


class Refused(Exception):
    """Not an error of the system: the file is not what was asked for."""


class Unwritten(Exception):
    """The host's side could not be written: ours to mend, never the sandbox's doing."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Bounded:
    """A file of the host's that refuses more than `limit` bytes."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd, self.limit, self.count = fd, limit, 0

    def write(self, data: bytes) -> int:
        self.count += len(data)
        if self.count > self.limit:
            raise Refused(f"more than {self.limit} bytes")
        try:
            write_all(self.fd, data)
        except OSError as error:
            raise Unwritten(error) from None
        return len(data)


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """Missing, or a folder: an OSError. Whatever else keeps it from being read is what the sandbox made of it."""
    try:
        fd = open_allowed(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode):
        return fd, found
    os.close(fd)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise Refused(f"{path} is not a regular file")


def open_allowed(path: str, flags: int) -> int:
    """Opens what its owner, who we are here, forbade to itself; its mode stays as it was."""
    try:
        return os.open(path, flags)
    except PermissionError:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        os.chmod(path, mode | 0o400)
        try:
            return os.open(path, flags)
        finally:
            os.chmod(path, mode)


def copy(source: int, write: Callable[[bytes], object]) -> None:
    while data := os.read(source, CHUNK):
        write(data)


def create(path: str, mode: int, source: int) -> None:
    """Whole or not at all: a link or FIFO at `path` is replaced, never followed or waited for."""
    if os.path.isdir(path) and not os.path.islink(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    folder, name = os.path.split(path)
    os.makedirs(folder or ".", exist_ok=True)
    partial = os.path.join(folder, f".{name[:200]}.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        copy(source, lambda data: write_all(fd, data))
        os.fchmod(fd, mode)
        os.rename(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    finally:
        os.close(fd)


def copy_folder(source: int, path: str) -> None:
    """The host's folder (a descriptor of it) to `path`: folders, files and links as they are, nothing else."""
    os.makedirs(path, exist_ok=True)
    for name in os.listdir(source):
        found = os.stat(name, dir_fd=source, follow_symlinks=False)
        inner = os.path.join(path, name)
        if stat.S_ISLNK(found.st_mode):
            if os.path.lexists(inner):
                os.unlink(inner)
            os.symlink(os.readlink(name, dir_fd=source), inner)
        elif stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
            try:
                if stat.S_ISDIR(found.st_mode):
                    copy_folder(fd, inner)
                else:
                    create(inner, stat.S_IMODE(found.st_mode) & 0o777, fd)
            finally:
                os.close(fd)
    os.chmod(path, stat.S_IMODE(os.fstat(source).st_mode) & 0o777 | 0o700)


def listed(folder: str) -> list[os.DirEntry[str]]:
    """What is in a folder, by name. One that its owner shut is opened, and stays so."""
    mode = stat.S_IMODE(os.stat(folder).st_mode)
    if mode & 0o500 != 0o500:
        os.chmod(folder, mode | 0o700)
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name, reverse=True)


def pack_folder(folder: str, archive: tarfile.TarFile) -> None:
    """Adds what is in `folder`; never asks the sandbox's name service who owns a file.

    Processes of the sandbox may be at work in it: what vanishes is left out, what cannot be read is refused.
    """
    left = [("", entry) for entry in listed(folder)]  # a stack: folders can be deeper than calls
    while left:
        above, entry = left.pop()
        name = f"{above}{entry.name}"
        try:
            is_folder = pack(entry, name, archive)
            if is_folder:
                left += [(f"{name}/", inner) for inner in listed(entry.path)]
        except FileNotFoundError:
            continue


def pack(entry: os.DirEntry[str], name: str, archive: tarfile.TarFile) -> bool:
    """Adds one entry. True: it is a folder, and what is in it comes next."""
    info = tarfile.TarInfo(name)
    found = entry.stat(follow_symlinks=False)
    info.mode = stat.S_IMODE(found.st_mode)
    info.mtime = max(0, min(int(found.st_mtime), LATEST))
    if entry.is_symlink():
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(entry.path)
        archive.addfile(info)
    elif entry.is_dir(follow_symlinks=False):
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
        return True
    elif entry.is_file(follow_symlinks=False):
        fd, found = open_regular(entry.path)
        info.size = found.st_size
        with open(fd, "rb") as file:
            try:
                archive.addfile(info, file)
            except OSError as error:
                raise Refused(f"{entry.path} changed while it was read") from error
    return False


def do_read(request: Message, fds: list[int]) -> Message:
    source, found = open_regular(request["path"])
    if found.st_size > request["limit"]:  # a sparse terabyte is refused before it is read
        raise Refused(f"{request['path']} has {found.st_size} bytes, more than {request['limit']}")
    copy(source, Bounded(fds[0], request["limit"]).write)
    return {}


def do_write(request: Message, fds: list[int]) -> Message:
    create(request["path"], request["mode"], fds[0])
    return {}


def do_upload(request: Message, fds: list[int]) -> Message:
    found = os.fstat(fds[0])
    if stat.S_ISDIR(found.st_mode):
        copy_folder(fds[0], request["path"])
    else:
        create(request["path"], stat.S_IMODE(found.st_mode) & 0o777, fds[0])
    return {}


def do_download(request: Message, fds: list[int]) -> Message:
    bounded = Bounded(fds[0], request["limit"])
    try:
        source, found = open_regular(request["path"])
    except IsADirectoryError:
        with tarfile.open(fileobj=bounded, mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
            try:
                pack_folder(request["path"], archive)
            except OSError as error:
                raise Refused(f"{request['path']}: {error.strerror}") from None
        return {"kind": "tar"}
    if found.st_size > request["limit"]:
        raise Refused(f"{request['path']} has {found.st_size} bytes, more than {request['limit']}")
    copy(source, bounded.write)
    return {"kind": "file"}


def do_unpack(request: Message, fds: list[int]) -> Message:
    """What `pack_folder` packed. Members lie below the folder by construction: their names came from scandir."""
    folder = request["path"]
    os.makedirs(folder, exist_ok=True)
    with open(fds[0], "rb", closefd=False) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        for info in archive:
            path = os.path.join(folder, info.name)
            if info.isdir():
                os.makedirs(path, exist_ok=True)
                os.chmod(path, info.mode & 0o777 | 0o700)
            elif info.issym():
                if os.path.lexists(path):
                    os.unlink(path)
                os.symlink(info.linkname, path)
            elif (content := archive.extractfile(info)) is not None:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    while data := content.read(CHUNK):
                        write_all(fd, data)
                    os.fchmod(fd, info.mode & 0o777)
                    os.utime(fd, (info.mtime, info.mtime))
                finally:
                    os.close(fd)
    return {}


FILE_JOBS = {
    "read": do_read,
    "write": do_write,
    "upload": do_upload,
    "download": do_download,
    "unpack": do_unpack,
}

# --- the keeper: serves one sandbox for its life ------------------------------------------------------


class World:
    """Where the keeper's children go. This one is `local`: nowhere."""

    idle: int | None = None  # bwrap's pid

    def fork_inside(self) -> int:
        return clone()

    def fork_unseen(self) -> int:
        return clone()

    def enter(self) -> None:
        pass

    def leave(self) -> NoReturn:
        """Ends everything, then us."""
        while True:
            kill_below(os.getpid())
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                os._exit(0)
            select.select([], [], [], 0.005)  # killed, and not yet dead; one that never dies keeps us, as it must


class Bubble(World):
    """The namespaces that bwrap made for process `pid`."""

    def __init__(self, idle: int, pid: int) -> None:
        self.idle = idle
        here = f"/proc/{pid}/ns"
        self.user, self.mnt, self.ipc, self.uts, self.pid = (
            os.open(f"{here}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("user", "mnt", "ipc", "uts", "pid")
        )
        self.our_pid = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        # The mounts belong to bwrap's outer user namespace, the processes to an inner one (--disable-userns).
        self.owner = fcntl.ioctl(self.mnt, NS_GET_USERNS)
        self.is_nested = os.fstat(self.owner).st_ino != os.fstat(self.user).st_ino

    def fork_inside(self) -> int:
        setns(self.pid, CLONE_NEWPID)  # for children only: they are born in the sandbox, and ours to wait for
        return clone()

    def fork_unseen(self) -> int:
        """A child that the sandbox's processes cannot see: it may hold descriptors of the host's."""
        setns(self.our_pid, CLONE_NEWPID)
        return clone()

    def enter(self) -> None:
        setns(self.owner, CLONE_NEWUSER)
        setns(self.ipc, CLONE_NEWIPC)
        setns(self.uts, CLONE_NEWUTS)
        setns(self.mnt, CLONE_NEWNS)
        if self.is_nested:
            setns(self.user, CLONE_NEWUSER)
        drop_privileges()

    def leave(self) -> NoReturn:
        os._exit(0)  # we are PID 1: the kernel does the rest before our pidfd says so


class Keeper:
    def __init__(self, ctl: socket.socket, lifeline: int, wake: int, world: World) -> None:
        self.ctl, self.lifeline, self.wake, self.world = ctl, lifeline, wake, world
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
                    message, fds = receive(self.ctl)
                    if message is None:
                        self.world.leave()
                    self.handle(message, fds)
                    for fd in fds:
                        os.close(fd)
            except (BrokenPipeError, ConnectionResetError):
                self.world.leave()

    def reap(self) -> None:
        for pid, status in reaped(self.wake):
            if pid == self.world.idle:
                send(self.ctl, {"event": "ended", "status": status})
                self.world.leave()
            if (number := self.jobs.pop(pid, None)) is not None:
                send(self.ctl, {"n": number, "status": status})

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
                    send(self.ctl, {"n": number, "started": True}, [pidfd])
                    os.close(pidfd)
            elif op in FILE_JOBS:
                pid = self.world.fork_unseen()
                if pid == 0:
                    self.do_file_job(message, fds)
                self.jobs[pid] = number
            else:
                self.signal(op, number, message.get("signum", signal.SIGKILL))
        except OSError as error:
            if isinstance(error, BrokenPipeError | ConnectionResetError):
                raise
            send(self.ctl, {"n": number, "broken": f"{op}: {error}"})

    def signal(self, op: str, number: int, signum: int) -> None:
        for pid in [pid for pid, job in self.jobs.items() if job == number]:  # not reaped: the number is its own
            if op == "end":
                os.kill(pid, signal.SIGSTOP)  # so that it starts nothing new, and orphans still come to it
                kill_below(pid)
            try:
                os.killpg(pid, signum)
            except ProcessLookupError:  # not yet the leader of its group
                os.kill(pid, signum)

    def execute(self, request: Message, fds: list[int]) -> NoReturn:
        """In the child: becomes the command. Trouble of ours goes to the service, the command's to its stderr."""
        try:
            reset_signals()
            os.setsid()
            if request["tty"]:
                fcntl.ioctl(fds[-1], termios.TIOCSCTTY, 0)
            self.world.enter()
            for name, value in request["limits"].items():
                _, hard = resource.getrlimit(getattr(resource, name))
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(getattr(resource, name), (value, value))
            os.umask(0o022)
            if request["reaps"]:
                prctl(PR_SET_CHILD_SUBREAPER, 1)
        except BaseException as error:
            send(self.ctl, {"n": request["n"], "broken": f"entering the sandbox: {error}"})
            select.select([self.lifeline], [], [], 5.0)  # our status must not pass for the command's
            os._exit(255)
        what, status = request["cwd"], 126
        try:
            slots = dict(zip(request["slots"], fds, strict=False))
            if 0 not in slots:
                slots[0] = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            place(slots)
            os.chdir(what)
            what, status = request["argv"][0], 127
            env = {os.fsencode(key): os.fsencode(value) for key, value in request["env"].items()}
            run_program(request["argv"], env)
        except OSError as error:
            write_all(2, os.fsencode(f"{what}: {error.strerror}\n"))
        finally:
            os._exit(status)

    def do_file_job(self, request: Message, fds: list[int]) -> NoReturn:
        answer: Message
        try:
            self.world.enter()
            os.umask(0o022)
            try:
                answer = {"done": FILE_JOBS[request["op"]](request, fds)}
            except Refused as refused:
                answer = {"refused": str(refused)}
            except Unwritten as unwritten:
                answer = {"errno": unwritten.error.errno, "strerror": unwritten.error.strerror}
            except OSError as error:
                answer = {"errno": error.errno, "strerror": error.strerror}
        except BaseException as error:
            answer = {"broken": f"{request['op']}: {error}"}
        with contextlib.suppress(OSError):
            send(self.ctl, {"n": request["n"], **answer})
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


def start(config: Message, kind: str, owner: tuple[int, int], fds: list[int]) -> NoReturn:
    """In the zygote's child, the keeper to be. `step` names for the service what could not be done."""
    reset_signals()
    place({3: fds[0], 4: fds[1]})
    close_from(5)
    ctl, lifeline, step = socket.socket(fileno=3), 4, "namespaces"
    for fd in (3, 4):
        os.set_inheritable(fd, False)
    try:
        if kind != "local":
            write_file("/proc/self/setgroups", "deny")
            write_file("/proc/self/uid_map", f"0 {owner[0]} 1")
            write_file("/proc/self/gid_map", f"0 {owner[1]} 1")
        step = "folders"
        for folder in config["folders"]:
            os.makedirs(folder, mode=0o700)
        announce(ctl, config["record"])
        wake = watch_children()
        if kind == "local":
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            os.setsid()
            world = World()
        else:
            step = "mounts"
            mount("none", "/", "", MS_REC | MS_PRIVATE)
            step = "loopback"
            bring_lo_up()
            # The doorway's listening socket is to be opened here: before any code of the sandbox can run.
            if overlay := config.get("overlay"):
                step = "overlay"
                mount("overlay", overlay["at"], "overlay", MS_NOSUID | MS_NODEV, overlay["options"])
            step = "proc"
            mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
            prctl(PR_SET_DUMPABLE, 0)  # children that are about to exec inside cannot be looked into from there
            step = "bubblewrap"
            world = run_bwrap(config, lifeline)
        send(ctl, {"event": "ready"})
        Keeper(ctl, lifeline, wake, world).serve()
    except BaseException as error:
        with contextlib.suppress(OSError):
            send(ctl, {"event": "failed", "step": step, "detail": str(error)})
    os._exit(1)


def announce(ctl: socket.socket, record: str) -> None:
    """Tells the service, and whoever comes after it, who the keeper is. /proc is still the host's here."""
    with open("/proc/self/stat", "rb") as file:
        pid, _, rest = file.read().partition(b" ")
    start_time = rest.rpartition(b")")[2].split()[19].decode()
    inode = os.stat("/proc/self/ns/pid").st_ino
    write_file(record, json.dumps({"pid": int(pid), "start_time": start_time, "pid_namespace": inode}))
    pidfd = os.pidfd_open(os.getpid())
    send(ctl, {"event": "born", "pid": int(pid)}, [pidfd])
    os.close(pidfd)


def run_bwrap(config: Message, lifeline: int) -> Bubble:
    """Starts bwrap with an idle `cat` inside, which proves by an echo that the sandbox stands."""
    (echo_in, echo), (echoed, echoed_in), (info, info_in), (stderr, stderr_in) = (
        os.pipe2(os.O_CLOEXEC) for _ in "1234"
    )
    arguments = os.memfd_create("arguments", os.MFD_CLOEXEC)  # on the command line `ps` would show the host's paths
    write_all(arguments, b"".join(os.fsencode(word) + b"\0" for word in config["argv"]))
    os.lseek(arguments, 0, os.SEEK_SET)
    os.write(echo, b".")
    argv = ["bwrap", "--info-fd", "3", "--args", "4", "--", "cat"]
    # All of ours have numbers above 4: none is overwritten before it is used.
    given = [
        (os.POSIX_SPAWN_DUP2, fd, slot) for slot, fd in enumerate((echo_in, echoed_in, stderr_in, info_in, arguments))
    ]
    idle = os.posix_spawn(config["program"], argv, config["env"], file_actions=given, setsigdef=DEFAULTED)
    for fd in (echo_in, echoed_in, info_in, stderr_in, arguments):
        os.close(fd)
    if lifeline in select.select([echoed, lifeline], [], [])[0]:
        os._exit(1)
    if os.read(echoed, 1) != b".":
        raise OSError(os.read(stderr, 4096).decode("utf-8", "replace").strip() or "it ended at once")
    world = Bubble(idle, json.loads(os.read(info, 4096))["child-pid"])
    for fd in (echoed, info, stderr):  # `echo` stays: at its end the idle process would end
        os.close(fd)
    return world


# --- the zygote ---------------------------------------------------------------------------------------


class Removal:
    """`rm -rf` as a process: it copes with overlay work folders and deep trees, and with chmod where one forbids it."""

    STEPS = (("rm", "-rf"), ("chmod", "-R", "u+rwX"), ("rm", "-rf"))

    def __init__(self, paths: list[str], answer: int) -> None:
        self.paths, self.answer, self.step = paths, answer, 0
        for path in paths:
            with contextlib.suppress(OSError):  # mostly there is next to nothing, and no process is needed
                for entry in os.scandir(path):
                    (os.rmdir if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
                os.rmdir(path)

    def go_on(self) -> int | None:
        """Starts the next step, or answers. Its pid, or None when all is done."""
        self.paths = [path for path in self.paths if os.path.lexists(path)]
        if self.paths and self.step < len(self.STEPS):
            name, *options = self.STEPS[self.step]
            self.step += 1
            program = f"/bin/{name}" if os.path.exists(f"/bin/{name}") else f"/usr/bin/{name}"
            with contextlib.suppress(OSError):
                return os.posix_spawn(program, [name, *options, "--", *self.paths], {}, setsigdef=DEFAULTED)
        with contextlib.suppress(OSError):
            os.write(self.answer, b"1" if self.paths else b"0")
        os.close(self.answer)
        return None


class Zygote:
    def __init__(self, sock: socket.socket, kind: str) -> None:
        self.sock, self.kind, self.wake = sock, kind, watch_children()
        self.owner = os.geteuid(), os.getegid()
        self.flags = 0 if kind == "local" else CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET
        self.keepers: set[int] = set()
        self.removals: dict[int, Removal] = {}

    def serve(self) -> NoReturn:
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        poller.register(self.wake, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self.wake:
                    for pid, status in reaped(self.wake):
                        self.on_end(pid, status)
                    continue
                message, fds = receive(self.sock)
                if message is None:
                    os._exit(0)  # the service is gone; the keepers see it too
                if message["op"] == "remove":
                    self.remove(Removal(message["paths"], fds[0]))
                else:
                    self.start(message, fds)

    def start(self, message: Message, fds: list[int]) -> None:
        try:
            pid = clone(self.flags)
        except OSError as error:
            with socket.socket(fileno=os.dup(fds[0])) as ctl, contextlib.suppress(OSError):
                send(ctl, {"event": "failed", "step": "namespaces", "detail": str(error)})
        else:
            if pid == 0:
                try:
                    start(message, self.kind, self.owner, fds)
                finally:
                    os._exit(1)
            self.keepers.add(pid)
        for fd in fds:
            os.close(fd)

    def remove(self, removal: Removal) -> None:
        pid = removal.go_on()
        if pid is not None:
            self.removals[pid] = removal

    def on_end(self, pid: int, status: int) -> None:
        if removal := self.removals.pop(pid, None):
            self.remove(removal)
        elif pid in self.keepers:
            self.keepers.discard(pid)
            if status < 0 and self.kind == "local":  # it was killed; as their subreaper we have its orphans now
                kill_below(os.getpid(), spare=self.keepers | self.removals.keys())


def main() -> NoReturn:
    sock, kind = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    sock.set_inheritable(False)
    if os.geteuid() == 0:
        os.setgroups([])
    if kind == "local":
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()  # clones share these pages for good
    gc.disable()
    Zygote(sock, kind).serve()


if __name__ == "__main__":
    main()
