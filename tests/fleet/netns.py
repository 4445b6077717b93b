"""Namespaces with only their own loopback: new network and PID namespaces, in which tests and scripts run.

    python -m tests.fleet.netns PROGRAM [ARGUMENT …]

What listens there cannot be reached from outside and cannot connect to the outside: so a Ray cluster, which opens many
ports, is isolated. All of it ends with the program, however that ends, because PID 1 of the namespace ends. Root
creates such namespaces itself; other users need user namespaces to be allowed.
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
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARK = "ROLLYARD_TEST_NETNS"
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


def is_inside() -> bool:
    return os.environ.get(MARK) == "1"


def command(argv: Sequence[str]) -> list[str]:
    """Returns the command that runs the program in its own namespaces. Run it in the repository's root."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    namespaces = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *as_root, *namespaces, sys.executable, "-m", "tests.fleet.netns", "--first", *argv]


@cache
def why_not() -> str:
    """Returns why there can be no such namespaces here; empty if there can."""
    if shutil.which("unshare") is None:
        return "no network namespaces here: there is no program `unshare` (util-linux)"
    tried = subprocess.run(command(["true"]), cwd=ROOT, capture_output=True, text=True, timeout=30)
    if tried.returncode == 0:
        return ""
    return f"no network namespaces here (containers often forbid them): {tried.stderr.strip()[-300:]}"


def run_inside(
    argv: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program in its own namespaces to its end. Skips the test if namespaces cannot be created."""
    if reason := why_not():
        pytest.skip(reason)
    return subprocess.run(
        command(argv),
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=limit_s,
        stdin=subprocess.DEVNULL,
    )


def run_test_inside(node_id: str, home: Path, *, limit_s: float) -> None:
    """Runs a test, or a file of them, by pytest's id: all must pass and not be skipped."""
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={home / 'inside'}"]
    completed = run_inside([sys.executable, "-m", "pytest", *options, node_id], limit_s=limit_s)
    assert completed.returncode == 0, completed.stdout[-8000:] + completed.stderr[-2000:]
    assert "skipped" not in completed.stdout.splitlines()[-1], completed.stdout[-2000:]


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _be_first(argv: Sequence[str]) -> int:
    """PID 1 of the namespace: it reaps orphans, and ends when the program has."""
    _raise_loopback()
    os.environ[MARK] = "1"
    program = os.posix_spawnp(argv[0], list(argv), os.environ, setsigdef=(signal.SIGINT, signal.SIGQUIT))
    while True:
        pid, status = os.wait()
        if pid == program:
            return os.waitstatus_to_exitcode(status) & 0xFF


def main() -> None:
    argv = sys.argv[1:]
    if argv[:1] == ["--first"]:
        sys.exit(_be_first(argv[1:]))
    os.chdir(ROOT)
    inside = command(argv)
    os.execvp(inside[0], inside)


if __name__ == "__main__":
    main()
