"""The resources of one test worker, so that several workers can run side by side on one machine.

pytest-xdist starts the workers; without it there is one. Each has its own ports below the range that the kernel assigns
by itself, uids for its sandboxes, a folder in memory for control files, and control groups. Programs that a test starts
inherit all of it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from rollyard.sandbox.limits.cgroup_files import own_folders
from rollyard.sandbox.runtimes import namespaced

PORTS = 1000
FIRST_PORT = 12_000
"""Linux assigns 32768 and up: to clients, and to servers that request any port."""

UIDS = 4096
PREFIX = f"ry-tests-{Path('/proc/self/ns/pid').stat().st_ino & 0xFFFF:x}-"
"""The prefix of the names that a run creates; its pid follows. Short, because paths of sockets contain it. It includes
the PID namespace: a pid identifies a process only there, and some tests run pytest in their own namespace."""

SHM = Path("/dev/shm")
MEMORY_BYTES = 8 << 30
CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")

FIRST_WORKER = "ROLLYARD_TESTS_FIRST_WORKER"
"""The number of the first worker, 0 by default. A second run of the suite beside the first needs another one."""

NAME = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
NUMBER = int(os.environ.get(FIRST_WORKER, "0")) + int(NAME.removeprefix("gw"))

_ports = itertools.cycle(range(FIRST_PORT + PORTS * NUMBER, FIRST_PORT + PORTS * (NUMBER + 1)))


def free_port() -> int:
    """Returns a port that no other program on this machine takes before the caller's server does."""
    for port in itertools.islice(_ports, PORTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"all ports of test worker {NAME} are in use")


def sweep() -> None:
    """Removes what killed runs have left: mounts, folders and control groups."""
    for folder in {Path(tempfile.gettempdir()), SHM}:
        for leftover in _leftovers_in(folder):
            subprocess.run(["umount", "--lazy", str(leftover)], capture_output=True, check=False)
            shutil.rmtree(leftover, ignore_errors=True)
    for parent in _own_groups():
        for leftover in _leftovers_in(parent):
            _remove_groups(leftover)


def _leftovers_in(folder: Path) -> list[Path]:
    candidates = [(path, path.name.removeprefix(PREFIX).partition("-")[0]) for path in folder.glob(f"{PREFIX}*")]
    return [path for path, pid in candidates if pid.isdecimal() and not Path("/proc", pid).exists()]


class MemoryFolder:
    """A folder in memory for temporary files, for a whole run of the suite.

    The tests create and delete some hundred thousand files. An ext4 filesystem without a journal checks every inode
    that was deleted in the last seconds before it assigns one: a third of the suite's CPU time, on such a machine. Only
    root can mount the folder; without root, temporary files stay in the usual folder.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
        self._is_mounted = False

    def take(self) -> None:
        argv = ["mount", "-t", "tmpfs", "-o", f"size={MEMORY_BYTES},mode=1777", "rollyard-tests", self._folder]
        if os.geteuid() != 0 or shutil.disk_usage("/dev/shm").total < MEMORY_BYTES:
            return
        with contextlib.suppress(OSError):
            self._is_mounted = subprocess.run(argv, capture_output=True, check=False).returncode == 0
        if self._is_mounted:
            os.environ["TMPDIR"] = self._folder
            tempfile.tempdir = None  # so that TMPDIR is read again

    def give_back(self) -> None:
        if self._is_mounted:
            subprocess.run(["umount", "--lazy", self._folder], capture_output=True, check=False)
        with contextlib.suppress(OSError):
            Path(self._folder).rmdir()


def own_uids() -> range:
    first = namespaced.UIDS.start + UIDS * NUMBER
    return range(first, first + UIDS)


class Ownership:
    """Allocates the worker's resources for the duration of its session."""

    def __init__(self) -> None:
        self._runtime_dir = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=SHM))
        self._groups: list[tuple[Path, Path]] = []  # the worker's own group, and its parent, from which it came

    def take(self) -> None:
        os.environ["XDG_RUNTIME_DIR"] = str(self._runtime_dir)
        uids = own_uids()
        os.environ["ROLLYARD_SANDBOX_UIDS"] = f"{uids.start}-{uids.stop - 1}"
        defaults = namespaced.NamespacedRuntime.__init__.__kwdefaults__
        assert defaults is not None and "uids" in defaults
        defaults["uids"] = uids
        # OpenMP threads spin while they wait for each other, which costs the other workers a CPU.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._enter_groups()

    def give_back(self) -> None:
        for group, parent in self._groups:
            with contextlib.suppress(OSError):
                (parent / "cgroup.procs").write_text(str(os.getpid()))
            _remove_groups(group)
        shutil.rmtree(self._runtime_dir, ignore_errors=True)

    def _enter_groups(self) -> None:
        """Creates and enters a group below each group of this process. Only with cgroup v1, and only as root: a v2
        group with processes cannot have controlled groups below it, so there the sandboxes' groups stay side by side.
        """
        for parent in _own_groups():
            group = parent / self._runtime_dir.name
            with contextlib.suppress(OSError):
                group.mkdir()
                (group / "cgroup.procs").write_text(str(os.getpid()))
                self._groups.append((group, parent))


def _own_groups() -> set[Path]:
    folders = own_folders("/proc")
    return {Path(folders[name][0]) for name in CONTROLLERS if name in folders}


def _remove_groups(folder: Path) -> None:
    """Removes the group and those below it that contain no process. Killed services leave some, which their next start
    would remove."""
    for below, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            Path(below).rmdir()
