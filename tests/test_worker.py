"""The next run of the suite removes everything that a killed run left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import worker

TAKES = """
import os, signal
from tests import worker
folder = worker.MemoryFolder()
folder.take()
worker.Ownership().take()
print(folder._folder, os.environ["XDG_RUNTIME_DIR"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_run_removes_what_a_killed_run_left() -> None:
    killed = subprocess.run([sys.executable, "-c", TAKES], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    leftovers = [Path(path) for path in killed.stdout.split()]
    groups = [parent / leftovers[1].name for parent in worker._own_groups()]
    leftovers += [group for group in groups if os.geteuid() == 0 and group.parent.exists()]
    assert any(path.exists() for path in leftovers)

    worker.sweep()

    assert [path for path in leftovers if path.exists()] == []
    assert leftovers[0].name not in Path("/proc/self/mounts").read_text()


def test_the_files_of_a_running_suite_are_kept() -> None:
    folder = Path(os.environ["XDG_RUNTIME_DIR"])
    worker.sweep()
    assert folder.is_dir()


def test_the_files_of_a_suite_in_another_pid_namespace_are_kept() -> None:
    """Some tests run pytest in their own PID namespace, in which the processes of this one are not visible."""
    inside = [
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        sys.executable,
        "-c",
        "from tests import worker; worker.sweep()",
    ]
    if os.geteuid() != 0 or subprocess.run(["unshare", "--pid", "--fork", "true"], check=False).returncode != 0:
        pytest.skip("a PID namespace needs root")
    subprocess.run(inside, check=True, timeout=60)
    assert Path(os.environ["XDG_RUNTIME_DIR"]).is_dir()
