"""Attacks on the kernel's own doors: namespaces, devices, /proc, setuid programs, ptrace, keys, terminals."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import tempfile
from collections.abc import Generator

from rollyard.sandbox.base import Runtime
from rollyard.testing.sandbox_conformance import marked
from rollyard.tools.shell import Shell
from tests.sandbox.hostile.cases import SECONDS, answers, hostile, limited, script_output, started

_NAMESPACES = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
clone = 56 if os.uname().machine == "x86_64" else 220
kinds = {"user": 0x10000000, "mnt": 0x20000, "net": 0x40000000, "pid": 0x20000000, "ipc": 0x8000000, "uts": 0x4000000,
         "cgroup": 0x2000000, "time": 0x80}
for name, flag in kinds.items():
    for flags in (flag, flag | kinds["user"]):
        pid = os.fork()
        if pid == 0:
            os._exit(libc.unshare(flags) == 0)
        if os.waitpid(pid, 0)[1]:
            print("unshared", name)
        if name == "time":
            continue  # only for unshare
        pid = libc.syscall(clone, ctypes.c_ulong(flags | signal.SIGCHLD), 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        if pid > 0:
            os.waitpid(pid, 0)
            print("cloned", name)
for name in kinds:
    try:
        own = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
        if libc.setns(own, 0) == 0:
            print("entered", name)
    except OSError:
        pass
"""


@hostile
async def nested_namespaces(runtime: Runtime) -> None:
    """None can be made: in a user namespace of its own a process is root, and most holes of the kernel begin there."""
    async with started(runtime) as sandbox:
        assert await script_output(sandbox, _NAMESPACES) == ""


_DEVICES = """
import os, stat
nodes = (("mem", stat.S_IFCHR, (1, 1)), ("disk", stat.S_IFBLK, (8, 0)), ("null", stat.S_IFCHR, (1, 3)))
for name, kind, number in nodes:
    for folder in (".", "/tmp", "/dev/shm"):
        try:
            os.mknod(os.path.join(folder, name), 0o666 | kind, os.makedev(*number))
            print("made", name, "in", folder)
        except OSError:
            pass
harmless = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2)}
for top, _, names in os.walk("/dev"):
    for name in names:
        path = os.path.join(top, name)
        found = os.lstat(path)
        number = os.major(found.st_rdev), os.minor(found.st_rdev)
        if stat.S_ISBLK(found.st_mode) or stat.S_ISCHR(found.st_mode) and number not in harmless and number[0] != 136:
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
                print("opened", path)
            except OSError:
                pass
"""


@hostile
async def device_nodes(runtime: Runtime) -> None:
    """No mknod, and a /dev with nothing in it that is anybody else's: no disk, no memory, no FUSE."""
    async with started(runtime) as sandbox:
        assert await script_output(sandbox, _DEVICES) == ""


_SETTINGS = """
import os, stat
for path in ("/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/proc/kcore", "/proc/kmsg"):
    try:
        with open(path, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            print("read", path) if file.read(1) else None
    except OSError:
        pass
tops = ["/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi", "/sys"]
paths = [os.path.join("/proc", name) for name in os.listdir("/proc") if not name.isdigit()]
for top in tops:
    for folder, _, names in os.walk(top):
        paths += [os.path.join(folder, name) for name in names]
for path in paths:  # asked, never tried: where this fails, trying would do it
    if stat.S_ISREG(os.lstat(path).st_mode) and os.access(path, os.W_OK):
        print("writable", path)
"""


@hostile
async def settings_and_memory_of_the_kernel(runtime: Runtime) -> None:
    """/proc/sys and /sys are read-only for every user of the service: core_pattern alone would run anything as root."""
    async with started(runtime) as sandbox:
        output = await script_output(sandbox, _SETTINGS)
        assert output == "", output[:1000]


_SETUID = """
import os, shutil, subprocess
shutil.copy("/bin/sh", "root-shell")
os.chmod("root-shell", 0o6755)
try:  # cap_setuid, effective
    os.setxattr("root-shell", "security.capability", bytes.fromhex("0100000280000000000000000000000000000000"))
except OSError:
    pass
look = "id -u; id -g; grep -E '^(CapEff|CapPrm|CapBnd|NoNewPrivs)' /proc/self/status"
expected = [str(os.getuid()), str(os.getgid()), *["CapPrm:", "0" * 16, "CapEff:", "0" * 16, "CapBnd:", "0" * 16],
            "NoNewPrivs:", "1"]
for argv in (["./root-shell", "-p", "-c", look], ["sh", "-c", look]):
    got = subprocess.run(argv, capture_output=True, text=True).stdout.split()
    if got != expected:
        print(argv[0], got)
for change in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.chown(".", 0, 0)):
    try:
        change()
        print("became root") if os.getuid() != 0 else None
    except OSError:
        pass
"""


@hostile
async def setuid_programs(runtime: Runtime) -> None:
    """no_new_privs, and no capability in any set: a setuid bit or a file capability grants nothing."""
    async with started(runtime) as sandbox:
        assert await script_output(sandbox, _SETUID) == ""
        shell = await Shell.open(sandbox)
        try:
            result = await shell.run("grep -E '^(CapBnd|NoNewPrivs)' /proc/$$/status", SECONDS)
            assert result.output.split() == ["CapBnd:", "0" * 16, "NoNewPrivs:", "1"], result
        finally:
            await shell.close()


_PTRACE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
spaces = ("user", "mnt", "pid", "net")
mine = [os.readlink(f"/proc/self/ns/{name}") for name in spaces]
if os.getppid():
    print("my parent is seen:", os.getppid())
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    if pid == os.getpid():
        continue
    if libc.ptrace(16, pid, None, None) == 0:  # PTRACE_ATTACH
        os.waitpid(pid, 0x40000000)  # __WALL
        theirs = [os.readlink(f"/proc/{pid}/ns/{name}") for name in spaces]
        libc.ptrace(17, pid, None, None)
        if theirs != mine:
            print("traced", pid, open(f"/proc/{pid}/cmdline").read().replace(chr(0), " "))
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
        if [os.readlink(f"/proc/{pid}/ns/{name}") for name in spaces] != mine:
            print("memory of", pid)
    except OSError:
        pass
    for way in ("root", "cwd"):
        try:
            with open(f"/proc/{pid}/{way}{sys.argv[1]}") as file:
                print(way, pid, file.read())
        except OSError:
            pass
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        continue
    for number in numbers:
        try:
            os.close(os.open(f"/proc/{pid}/fd/{number}{sys.argv[1]}", os.O_RDONLY | os.O_NONBLOCK))
            print("fd", pid, number)
        except OSError:
            pass
"""


@hostile
async def ptrace_and_the_ways_through_proc(runtime: Runtime) -> None:
    """The keeper is in no PID namespace of the sandbox, and what is seen there lies in the sandbox's own namespaces or
    cannot be looked into: no parent to trace, no root, no memory and no descriptor of anyone outside."""
    with tempfile.NamedTemporaryFile("w") as secret:
        secret.write("the host's")
        secret.flush()
        async with started(runtime) as sandbox:
            assert await script_output(sandbox, _PTRACE, secret.name) == ""
            await answers(sandbox)


_KEYS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
first = 248 if os.uname().machine == "x86_64" else 217
name = sys.argv[1].encode()
if libc.syscall(first, b"user", b"rollyard-own", b"x", ctypes.c_size_t(1), ctypes.c_int(-3)) != -1:
    print("added a key")
for ring in (-3, -4, -5):
    if libc.syscall(first + 2, 10, ctypes.c_int(ring), b"user", name, 0) != -1:  # KEYCTL_SEARCH
        print("found the host's key in", ring)
if libc.syscall(first + 1, b"user", name, None, 0) != -1:
    print("was given the host's key")
try:
    if sys.argv[1] in open("/proc/keys").read():
        print("sees the host's key")
except OSError:
    pass
"""


@contextlib.contextmanager
def host_key(name: str) -> Generator[None, None, None]:
    """A key on this process's session keyring, which children inherit. Nothing happens where there are no keys."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = 248 if os.uname().machine == "x86_64" else 217
    key = libc.syscall(first, b"user", name.encode(), b"secret", ctypes.c_size_t(6), ctypes.c_int(-3))
    try:
        yield
    finally:
        if key != -1:
            libc.syscall(first + 2, 3, key, 0, 0, 0)  # KEYCTL_REVOKE


@hostile
async def the_hosts_keys(runtime: Runtime) -> None:
    """No keyctl and its like (seccomp), and no /proc/keys: session keyrings are inherited, and it names every key of
    the user whom the sandbox is on the host."""
    name = f"rollyard-hostile-{marked()}"
    with host_key(name):
        async with started(runtime) as sandbox:
            assert await script_output(sandbox, _KEYS, name) == ""


_TERMINALS = """
import os, time
for _ in range(7):
    if os.fork() == 0:
        break
held = []
try:
    while len(held) < 240:
        held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError:
    pass
os.write(1, b".")
time.sleep(60)
"""


@hostile
async def every_terminal_there_is(runtime: Runtime) -> None:
    """A devpts of its own, and bounded descriptors: who takes all the PTYs it can takes none from a neighbour, and
    sees none of the host's. A shell's PTY is the host's, so its own next shell opens too."""
    async with started(runtime, limited(processes=True)) as sandbox, started(runtime) as neighbour:
        (reader, writer), null = os.pipe(), os.open(os.devnull, os.O_RDWR)
        master, slave = os.openpty()
        try:
            name = os.ttyname(slave)
            result = await sandbox.exec(["test", "-e", name], timeout_s=SECONDS)
            assert result.status == 1, f"{name} of the host is seen"
            process = await sandbox.spawn(["python3", "-c", _TERMINALS], fds={0: null, 1: writer, 2: null})
            async with asyncio.timeout(SECONDS):
                for _ in range(8):
                    assert await asyncio.to_thread(os.read, reader, 1) == b"."
            for who in (sandbox, neighbour):
                shell = await Shell.open(who)
                assert (await shell.run("echo on", SECONDS)).output.strip() == "on"
                await shell.close()
            process.kill(signal.SIGKILL)
        finally:
            for fd in (reader, writer, null, master, slave):
                os.close(fd)
