"""The launcher's kernel interface: messages with descriptors, namespaces, mounts, privileges, process trees.

Standard library only, and no import of the package: a bare Python imports it next to `program.py`. The service uses
`send` and `receive` as well.
"""

# Descriptors and raw paths: pathlib would only be one more import.
# ruff: noqa: PTH208

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

INLINE_BYTES = 32 << 10  # a longer message is sent in a memfd: a packet socket's buffer is about 200 kB
MAX_FDS = 64
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NS_GET_USERNS = 0xB701
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 4, 22, 24, 36
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 38, 47
LINUX_CAPABILITY_VERSION_3 = 0x20080522
SYS_CLONE = 56 if os.uname().machine == "x86_64" else 220  # other machines use the generic table
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442  # the same on every machine
SYS_CLONE3, CLONE_INTO_CGROUP = 435, 0x200000000
AT_EMPTY_PATH, AT_RECURSIVE, OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 0x1000, 0x8000, 1, 4
MOUNT_ATTR_IDMAP = 0x100000
DEFAULTED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""Signals to reset. A service started in the background by a script ignores the last three, and its children would
inherit that."""

# --- messages -----------------------------------------------------------------------------------------


def send(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Sends one message and its descriptors atomically."""
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
    """Returns the next message; None when the other end has closed."""
    # Not socket.recv_fds: before CPython 3.12 it ignores its flags, and with them CLOEXEC.
    room = socket.CMSG_SPACE(MAX_FDS * 4)
    data, ancillary, _, _ = sock.recvmsg(INLINE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = [fd for _, _, packed in ancillary for (fd,) in struct.iter_unpack("i", packed)]
    if data == b"@":
        with open(fds.pop(), "rb") as file:
            file.seek(0)
            data = file.read()
    return (json.loads(data) if data else None), fds


# --- the kernel ---------------------------------------------------------------------------------------

_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL does not release the GIL, which a clone must hold
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def _checked(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def clone(flags: int = 0) -> int:
    """fork with namespaces. It takes 0.6 ms instead of os.fork's 1.4: it skips the interpreter's hooks for threads,
    locks and random numbers, which this program does not use."""
    return _checked(_libc.syscall(SYS_CLONE, ctypes.c_ulong(flags | signal.SIGCHLD), 0, 0, 0, 0), "clone")


def clone_into(flags: int, group: int) -> int:
    """The same, started in the cgroup (v2) whose folder is `group`: moving a process later waits for a machine-wide
    lock."""
    arguments = struct.pack("11Q", flags | CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, group)
    return _checked(_libc.syscall(SYS_CLONE3, arguments, ctypes.c_size_t(len(arguments))), "clone3")


def prctl(option: int, first: int = 0, second: int = 0) -> int:
    return _checked(_libc.prctl(option, first, second, 0, 0), f"prctl {option}")


def setns(fd: int, kind: int) -> None:
    _checked(_libc.setns(fd, kind), f"setns {kind:#x}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    parts = [os.fsencode(part) for part in (source, target, kind, options)]
    _checked(_libc.mount(parts[0], parts[1], parts[2], flags, parts[3]), f"mount {kind or source} on {target}")


# --- mount trees: copied from any path, mounted at one with a short name without special characters ---


def open_tree(path: str) -> int:
    """Returns a detached copy of the tree at `path`, with all mounts below it."""
    flags = OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC
    number = ctypes.c_uint(flags)
    return _checked(_libc.syscall(SYS_OPEN_TREE, -100, ctypes.c_char_p(os.fsencode(path)), number), f"open {path}")


def idmap(tree: int, user_namespace: int) -> None:
    """Maps ownership: files of the namespace's uid 0 *on disk* belong, seen through this tree, to the uid that it maps
    to outside."""
    attributes = struct.pack("QQQQ", MOUNT_ATTR_IDMAP, 0, 0, user_namespace)
    flags = ctypes.c_uint(AT_EMPTY_PATH | AT_RECURSIVE)
    size = ctypes.c_size_t(len(attributes))
    _checked(_libc.syscall(SYS_MOUNT_SETATTR, tree, ctypes.c_char_p(b""), flags, attributes, size), "idmapped mount")


def move_mount(tree: int, target: str) -> None:
    empty, path = ctypes.c_char_p(b""), ctypes.c_char_p(os.fsencode(target))
    flags = ctypes.c_uint(MOVE_MOUNT_F_EMPTY_PATH)
    _checked(_libc.syscall(SYS_MOVE_MOUNT, tree, empty, -100, path, flags), f"mount on {target}")


def refuse_calls(program: bytes) -> None:
    """Installs a seccomp filter (see `seccomp.py`) permanently. Needs no_new_privs."""
    code = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    fprog = ctypes.create_string_buffer(filters, len(filters))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(fprog))


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
    """Drops all capabilities, so that no later exec can regain one."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == -1:
            break  # beyond this kernel's last capability
    prctl(PR_CAP_AMBIENT, 4)  # CLEAR_ALL
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header, none = struct.pack("Ii", LINUX_CAPABILITY_VERSION_3, 0), bytes(24)
    _checked(_libc.capset(header, none), "capset")


def place(slots: Mapping[int, int]) -> None:
    """Makes descriptor k a copy of `slots[k]`. All are first moved above every target, so that none is overwritten."""
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
    """Returns a descriptor that becomes readable when a child ends."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def reaped(wake: int) -> Iterator[tuple[int, int]]:
    """Yields (pid, status) of each child that has ended; the status as in `subprocess`."""
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


# --- ending a process tree ----------------------------------------------------------------------------


def running_processes() -> dict[int, tuple[int, str]]:
    """Returns pid → (parent, start time) of every visible process that is not a zombie."""
    processes = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in b"ZX":
                    processes[int(name)] = (int(fields[1]), fields[19].decode())
    return processes


def descendants(roots: set[int], processes: dict[int, tuple[int, str]]) -> set[int]:
    descendants: set[int] = set()
    level = set(roots)
    while level:
        level = {pid for pid, (parent, _) in processes.items() if parent in level} - descendants - roots
        descendants |= level
    return descendants


def kill_below(root: int, spare: set[int] | None = None) -> None:
    """Kills all descendants of `root`, repeatedly until there are no more; by pidfd, never by number."""
    for _ in range(100):
        processes = running_processes()
        targets = descendants({root}, processes)
        if spare:
            targets -= spare | descendants(spare, processes)
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
