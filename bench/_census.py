"""Counts what sandboxes leave on a machine, from outside: processes, mounts, descriptors, folders, cgroups.

Processes are counted by descent, which they cannot fake or escape: while `adopting` is active, every orphan below this
process becomes its child (or that of the init process of a PID namespace below it). So launchers, init processes, FUSE
helpers, `conmon` and daemons are counted, and unrelated processes are not. Mounts are those of this process's mount
namespace, the host's; cgroups and containers are identified by the mark of their runtime's root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from bench._parts import engine
from rollyard.sandbox.launcher import kernel
from rollyard.sandbox.limits.limiter import mark_of

POLL_S = 0.02
_ENGINES = ("/containers/", "/docker/")
"""Parts of the mount points of container engines, which are counted only for the runtime `oci`."""

_TEMPORARY = ("/tmp/", "/var/tmp/", "/dev/shm/")
"""Mounts below these belong to other programs, unless they are below the parent of the counted root."""


@contextlib.contextmanager
def adopting() -> Generator[None, None, None]:
    """Within the context, orphans below this process become its children."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 0)


@dataclass(frozen=True, slots=True)
class Count:
    """What existed at one moment, by name, so that survivors can be reported."""

    processes: frozenset[str]
    mounts: frozenset[str]
    folders: frozenset[str]
    cgroups: frozenset[str]
    running: frozenset[str]  # containers
    containers: frozenset[str]  # running or not
    descriptors: int

    def more(self, before: Count) -> dict[str, int]:
        """Returns how many of each kind are new since `before`."""
        new_counts = {name: len(getattr(self, name) - getattr(before, name)) for name in KINDS}
        return {**new_counts, "descriptors": max(0, self.descriptors - before.descriptors)}

    def names(self, before: Count) -> list[str]:
        return [f"{kind}: {name}" for kind in KINDS for name in sorted(getattr(self, kind) - getattr(before, kind))]


KINDS = ("processes", "mounts", "folders", "cgroups", "running", "containers")


def control_of(root: Path) -> Path:
    """Returns the control folder of a runtime whose folders are counted."""
    return root / "control"


class Census:
    """Counts for one root of one runtime, whose control folder is `control_of(root)`."""

    def __init__(self, runtime: str, root: Path) -> None:
        self._is_oci, self._root, self._mark = runtime == "oci", root, mark_of(root)

    def take(self) -> Count:
        """Blocks for about 20 ms. Reaps orphans, so call it only while no child process is being waited for."""
        processes = self._processes()
        containers = self._containers() if self._is_oci else {}
        return Count(
            processes=frozenset(f"{pid} {_name(pid)} {started_at}" for pid, started_at in processes.items()),
            mounts=frozenset(self._mounts()),
            folders=frozenset(self._folders()),
            cgroups=frozenset(self._cgroups()),
            running=frozenset(name for name, is_running in containers.items() if is_running),
            containers=frozenset(containers),
            descriptors=sum(_descriptors(pid) for pid in (os.getpid(), *processes)),
        )

    def settle(self, is_good: Callable[[Count], bool], bound_s: float) -> tuple[Count, float]:
        """Polls until `is_good`, or for `bound_s`. Returns the last count, and the elapsed time."""
        started_at = time.monotonic()
        while True:
            count = self.take()
            took_s = time.monotonic() - started_at
            if is_good(count) or took_s > bound_s:
                return count, took_s
            time.sleep(POLL_S)

    def _processes(self) -> dict[int, str]:
        """Returns our descendants that are not zombies, with their start times."""
        with contextlib.suppress(ChildProcessError):
            for pid in _zombies():
                os.waitpid(pid, os.WNOHANG)
        living = kernel.running_processes()
        return {pid: living[pid][1] for pid in kernel.descendants({os.getpid()}, living)}

    def _mounts(self) -> Generator[str, None, None]:
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            number, *_, point = line.split()[:5]
            is_others = point.startswith(_TEMPORARY) and not point.startswith(f"{self._root.parent}/")
            if not is_others and (self._is_oci or not any(name in point for name in _ENGINES)):
                yield f"{number} {point}"

    def _folders(self) -> Generator[str, None, None]:
        yield from (str(path) for path in self._root.glob("sbx_*"))
        yield from (str(path) for path in control_of(self._root).glob("*/*/*"))

    def _cgroups(self) -> Generator[str, None, None]:
        own_part = f"/rollyard-{self._mark}/"
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if after.startswith("cgroup"):
                for folder, _, _ in os.walk(before.split()[4]):
                    if own_part in folder or (self._is_oci and "/libpod" in folder):
                        yield folder

    def _containers(self) -> dict[str, bool]:
        argv = [*engine(), "ps", "--all", "--no-trunc", "--filter", f"label=rollyard={self._mark}"]
        argv += ["--format", "{{.ID}} {{.State}}"]
        output = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).stdout
        return {words[0]: words[1:] == ["running"] for line in output.splitlines() if (words := line.split())}


def _zombies() -> list[int]:
    """Returns our children that have ended, adopted ones included."""
    zombies: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_bytes().rpartition(b")")[2].split()
            if fields[0] == b"Z" and int(fields[1]) == os.getpid():
                zombies.append(int(path.parent.name))
    return zombies


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def _descriptors(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return 0
