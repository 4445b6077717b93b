"""Runs a Ray cluster in new network and PID namespaces with only a loopback interface.

Ray opens many ports, some of them on every interface. In such a namespace no other process can reach them, and all of
Ray ends with the program, however it ends, because PID 1 of the namespace ends. Root can create these namespaces; other
users need user namespaces that are not disabled.

    python -m bench._fleet_place PROGRAM [ARGUMENT …]      (PID 1 of the namespace)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence

from bench.processes import module_argv
from rollyard.cli._console import CommandError

TRY_S = 30.0
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


def inside(argv: Sequence[str]) -> list[str]:
    """Returns the command that runs a program in new namespaces. Raises CommandError if they cannot be created."""
    remedy = "run it as root, or where `unshare --map-root-user --net true` works"
    if shutil.which("unshare") is None:
        raise CommandError("Ray is only started in a network namespace, but there is no program `unshare`", remedy)
    tried = subprocess.run(_command(["true"]), capture_output=True, text=True, timeout=TRY_S, check=False)
    if tried.returncode:
        errors = tried.stderr.strip().splitlines()
        raise CommandError(
            f"cannot create a network namespace here: {errors[-1] if errors else 'unshare failed'}", remedy
        )
    return _command(argv)


def _command(argv: Sequence[str]) -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    namespaces = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *as_root, *namespaces, *module_argv("_fleet_place", *argv)]


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def be_first(argv: Sequence[str]) -> int:
    """Runs as PID 1 of the namespace: reaps orphans, and exits with the program."""
    _raise_loopback()
    program = os.posix_spawnp(argv[0], list(argv), os.environ, setsigdef=(signal.SIGINT, signal.SIGQUIT))
    while True:
        pid, status = os.wait()
        if pid == program:
            return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(be_first(sys.argv[1:]))
