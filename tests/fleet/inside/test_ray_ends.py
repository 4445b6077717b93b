"""A Ray cluster that the head starts, and its end. The test counts all processes of Ray."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fleet.inside.ray_parts import Front, alive, host_of, until, wait_for_exit

pytestmark = pytest.mark.timeout(100)

RAY = (b"/raylet/raylet", b"gcs_server", b"ray::NodeActor")
"""Programs of Ray's: raylets, the GCS, and nodes."""


async def test_a_cluster_that_we_start_is_unreachable_from_outside_and_ends_with_its_driver_and_host(
    front: Front, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ROLLYARD_RUN_SLOTS", "5")
    async with host_of(None, front) as host:
        hello = await front.hello()
        assert hello["run_slots"] == 5
        await until(lambda: len(alive(host)) == 1)
        shown = subprocess.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True).stdout
        listening = {fields[1].split(":")[0] for line in shown.splitlines() if (fields := line.split())[3] == "0A"}
        assert listening <= {"0100007F", "0000000000000000FFFF00000100007F"}
        assert not processes(b"ray::IDLE"), "an idle process"

        first = [os.pidfd_open(pid) for pid in processes(*RAY)]
        assert first and host.driver_pid is not None
        os.kill(host.driver_pid, signal.SIGKILL)
        for process in first:
            await wait_for_exit(process)
        await front.hello()  # from a cluster that was started in its place
        await until(lambda: host.error == "")
        second = [os.pidfd_open(pid) for pid in processes(*RAY)]
        assert second
    for process in second:
        await wait_for_exit(process)


def processes(*words: bytes) -> list[int]:
    """Returns the processes of this PID namespace with one of these in their command lines."""
    pids: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if any(word in line for word in words):
            pids.append(int(folder.name))
    return pids
