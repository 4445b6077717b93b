"""Ray clusters that end: the head's own, and one that breaks. Each test counts all processes of Ray there are."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fleet.inside.ray_parts import Cluster, Front, alive, gone, host_of, until

pytestmark = pytest.mark.timeout(100)


async def test_the_head_outlives_ray(own_cluster: Cluster, front: Front, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "3")  # 60 where nobody says otherwise
    async with host_of(own_cluster.address, front) as host:
        await front.hello()
        driver = host.driver_pid
        assert driver is not None
        ended = os.pidfd_open(driver)
        own_cluster.do("kill_gcs")
        await gone(ended)
        await until(lambda: "driver ended" in host.error)


async def test_a_cluster_of_our_own_is_reached_from_nowhere_and_ends_with_us(
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
        ray = [os.pidfd_open(pid) for pid in ray_processes()]
        assert ray
    for process in ray:
        await gone(process)


async def test_a_cluster_of_our_own_ends_with_its_driver_and_is_started_again(front: Front):
    async with host_of(None, front) as host:
        await front.hello()
        ray = [os.pidfd_open(pid) for pid in ray_processes()]
        assert ray and host.driver_pid is not None
        os.kill(host.driver_pid, signal.SIGKILL)
        for process in ray:
            await gone(process)
        await front.hello()
        await until(lambda: host.error == "")


def ray_processes() -> list[int]:
    """Raylets, the GCS, and nodes: all programs of Ray's in this PID namespace."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if any(word in words for word in (b"/raylet/raylet", b"gcs_server", b"ray::NodeActor")):
            found.append(int(folder.name))
    return found
