"""Attacks on the host through what a process inherits or can name: environment, descriptors, sockets, addresses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile

from rollyard.sandbox.base import Runtime
from rollyard.testing.sandbox_conformance import marked
from rollyard.tools.shell import Shell
from tests.sandbox.hostile.cases import LONG_S, SECONDS, answers, hostile, python, script_output, started

_ENVIRONMENT = {
    "ROLLYARD_HOSTILE": "secret-of-the-host",
    "SLURM_JOB_ID": "secret-of-the-host",
    "PMI_FD": "secret-of-the-host",
    "PMIX_RANK": "secret-of-the-host",
    "APPTAINERENV_ROLLYARD_HOSTILE": "secret-of-the-host",
    "SINGULARITYENV_ROLLYARD_HOSTILE": "secret-of-the-host",
    "APPTAINER_BIND": "/etc:/secret-of-the-host",
    "SINGULARITY_BINDPATH": "/etc:/secret-of-the-host",
}
"""The last four are orders to Apptainer; a leaked SLURM_* or PMI* lets a sandbox end its job."""


@hostile
async def the_hosts_environment(runtime: Runtime) -> None:
    """Every process inside is given its environment by name; nothing of the server's is in any of them."""
    os.environ.update(_ENVIRONMENT)
    try:
        async with started(runtime) as sandbox:
            shell = await Shell.open(sandbox)
            try:
                everyone = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; env; ls -d /secret* 2>/dev/null; :"
                output = (await sandbox.exec(everyone, timeout_s=SECONDS)).stdout.decode()
                output += (await shell.run(everyone, SECONDS)).output
                assert "PATH=" in output
                for word in ("secret-of-the-host", "SLURM", "PMI", "ROLLYARD_HOSTILE"):
                    assert word not in output, [line for line in output.splitlines() if word in line]
            finally:
                await shell.close()
    finally:
        for name in _ENVIRONMENT:
            os.environ.pop(name, None)


_DESCRIPTORS = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        continue
    for number in numbers:
        try:
            print(pid, number, os.readlink(f"/proc/{pid}/fd/{number}"))
        except OSError:
            pass
"""


@hostile
async def descriptors_left_open(runtime: Runtime) -> None:
    """A process has the descriptors that were named for it, and no other; nor has any process that it can see."""
    with tempfile.NamedTemporaryFile(prefix="secret-of-the-host-") as secret:
        os.set_inheritable(secret.fileno(), True)
        async with started(runtime) as sandbox:
            listed = (await sandbox.exec("exec ls /proc/self/fd", timeout_s=SECONDS)).stdout.split()
            assert set(listed) == {b"0", b"1", b"2", b"3"}, listed  # 3: the folder that ls reads
            reader, writer = os.pipe()
            null = os.open(os.devnull, os.O_RDWR)
            try:
                process = await sandbox.spawn(["ls", "/proc/self/fd"], fds={0: null, 1: writer, 2: null})
                assert await process.wait() == 0
                assert set(os.read(reader, 1000).split()) == {b"0", b"1", b"2", b"3"}
            finally:
                for fd in (reader, writer, null):
                    os.close(fd)
            listing = await script_output(sandbox, _DESCRIPTORS)
            for line in listing.splitlines():
                target = line.split(" ", 2)[2]
                assert "secret-of-the-host" not in target, line
                assert target.startswith(("/proc/", "/dev/null", "pipe:", "anon_inode:")), line


_THIEF = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
mine, known, end = os.getpid(), set(os.listdir("/proc")), time.monotonic() + 20
print("ready", flush=True)
while time.monotonic() < end and not os.path.exists("stop"):
    for pid in map(int, filter(str.isdigit, set(os.listdir("/proc")) - known)):
        if pid == mine:
            continue
        try:
            for number in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                if not target.startswith(("pipe:", "/dev/null", "/proc/", "/usr/", "/lib/", "/etc/")):
                    print("saw", target, flush=True)
                pidfd = os.pidfd_open(pid)
                got = libc.syscall(438, pidfd, int(number), 0)  # pidfd_getfd
                os.close(pidfd)
                if got >= 0:
                    if os.readlink(f"/proc/self/fd/{got}").startswith("socket:"):
                        print("took", target, flush=True)
                    os.close(got)
        except OSError:
            pass
print("done", flush=True)
"""


@hostile
async def descriptors_of_a_process_that_is_being_born(runtime: Runtime) -> None:
    """Between its birth and its exec a command is still the launcher's child, with the launcher's descriptors: it
    must not be one that can be looked into (PR_SET_DUMPABLE)."""
    async with started(runtime) as sandbox:
        thief = asyncio.ensure_future(python(sandbox, _THIEF, timeout_s=LONG_S))
        try:
            for _ in range(100):
                await sandbox.exec(["true"], timeout_s=SECONDS)
            await sandbox.write("stop", b"")
            result = await thief
        finally:
            thief.cancel()
            await asyncio.wait([thief])
        assert result.stdout.splitlines() == [b"ready", b"done"], result


@hostile
async def the_hosts_abstract_sockets(runtime: Runtime) -> None:
    """The network namespace: abstract names have no permissions, only it keeps D-Bus and its like apart."""
    name = f"\0rollyard-hostile-{marked()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        async with started(runtime) as sandbox:
            script = "import socket, sys; socket.socket(socket.AF_UNIX).connect('\\0' + sys.argv[1])"
            result = await python(sandbox, script, name[1:])
            assert result.status == 1 and b"ConnectionRefusedError" in result.stderr, result
            listed = await sandbox.exec("cat /proc/net/unix", timeout_s=SECONDS)
            assert name[1:].encode() not in listed.stdout


_CONNECT = """
import socket, sys
for word in sys.argv[1:]:
    host, _, port = word.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 3).close()
        print("reached", word)
    except TimeoutError:
        print("waited for", word)
    except OSError:
        pass
"""


@hostile
async def the_hosts_loopback_services(runtime: Runtime) -> None:
    """The network namespace: 127.0.0.1 is the sandbox's own, and the host has no other address in there."""
    with contextlib.ExitStack() as stack:
        addresses: list[str] = []
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with contextlib.suppress(OSError):  # no IPv6 here
                server = stack.enter_context(socket.create_server((address, 0), family=family))
                port = server.getsockname()[1]
                addresses += [f"{address}:{port}", f"localhost:{port}", f"0.0.0.0:{port}", f"10.0.2.2:{port}"]
        assert addresses
        async with started(runtime) as sandbox:
            assert await script_output(sandbox, _CONNECT, *addresses) == ""
            routes = await sandbox.exec("tail -n +2 /proc/net/route", timeout_s=SECONDS)
            assert routes.stdout == b"", routes.stdout


@hostile
async def the_metadata_address(runtime: Runtime) -> None:
    """No route: the credentials of a cloud machine are one request away from anyone who has one."""
    async with started(runtime) as sandbox:
        assert await script_output(sandbox, _CONNECT, "169.254.169.254:80", "fd00:ec2::254:80", "192.0.2.1:443") == ""
        script = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'', ('169.254.169.254', 53))"
        assert (await python(sandbox, script)).status == 1
        raw = "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"
        assert (await python(sandbox, raw)).status == 1
        await answers(sandbox)
