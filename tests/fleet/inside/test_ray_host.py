"""Nodes on a real Ray cluster, which all tests share; the last one breaks it.

A driver and a node cost over a second of CPU time each, so one test follows a host, a node or a series of heads as far
as possible.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.fleet.ray_host import RayUnavailable
from tests.fleet.inside.ray_parts import ENTRY, RAY_TOKEN, Cluster, Front, alive, host_of, until, wait_for_exit

pytestmark = pytest.mark.timeout(100)


async def test_every_ray_node_with_cpus_has_one_node_that_joins_and_leaves_with_it(cluster: Cluster, front: Front):
    second = cluster.do("add", cpus=2)["ray_id"]
    idle = cluster.do("add", cpus=0)["ray_id"]
    async with host_of(cluster.address, front) as host:
        hellos = [await front.hello(), await front.hello()]
        assert len({hello["pid"] for hello in hellos}) == len({hello["folder"] for hello in hellos}) == 2
        await until(lambda: alive(host) == {hello["name"] for hello in hellos})
        assert {hello["run_slots"] for hello in hellos} == {32, 64}
        (without,) = [node for node in host.nodes() if node.ray_id == idle]
        assert not without.is_alive and "no CPU" in without.error
        cluster.do("remove", ray_id=idle)

        third = cluster.do("add")["ray_id"]
        hello = await front.hello()
        await until(lambda: hello["name"] in alive(host))
        assert len(alive(host)) == 3
        assert {third, second} < {node.ray_id for node in host.nodes()}

        pids = [os.pidfd_open(hello["pid"]) for hello in hellos if hello["name"].endswith(second[:8])]
        cluster.do("remove", ray_id=second)
        await wait_for_exit(*pids)
        await until(lambda: len(host.nodes()) == 2)
        assert second not in {node.ray_id for node in host.nodes()}
        assert len(alive(host)) == 2

        before, killed = set(host.nodes()), host.driver_pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await until(lambda: bool(host.error))
        await until(lambda: host.error == "" and len(alive(host)) == 2)
        assert host.driver_pid not in {None, killed}
        assert set(host.nodes()) == before, "a new driver finds the same nodes"
        assert front.hellos.empty(), "a node was started again"


async def test_successive_heads_use_the_same_nodes(cluster: Cluster, front: Front):
    code = """
import asyncio, sys
from rollyard.fleet.ray_host import RayHost
async def main():
    async with RayHost(*sys.argv[1:4], entry=sys.argv[4]) as host:
        print(host.driver_pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    cluster.do("add")
    argv = [sys.executable, "-c", code, cluster.address, front.url, front.token, ENTRY]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        driver = os.pidfd_open(int(head.stdout.readline()))
        before = [await front.hello(), await front.hello()]
        head.kill()
    await wait_for_exit(driver)
    async with Front("second") as second, Front("third") as third:
        async with host_of(cluster.address, second) as old:
            await front.__aexit__(None, None, None)
            assert pids([await second.hello(), await second.hello()]) == pids(before), "a killed head's nodes are found"
            await until(lambda: len(alive(old)) == 2)
            async with host_of(cluster.address, third) as newer:
                await until(lambda: "another head" in old.error)
                await second.__aexit__(None, None, None)
                assert pids([await third.hello(), await third.hello()]) == pids(before), "nodes follow the newest head"
                await until(lambda: len(alive(newer)) == 2)
                assert newer.error == ""
        ended = [os.pidfd_open(pid) for pid in pids(before)]
        async with host_of(cluster.address, third) as host:
            await until(lambda: len(alive(host)) == 2)
            assert third.hellos.empty(), "closing a head ended its nodes"
            await host.stop_nodes(20)
            for process in ended:
                await wait_for_exit(process)
            assert all((Path(hello["folder"]) / "ended in good order").exists() for hello in before)
            assert host.nodes() == []
        assert second.hellos.empty() and third.hellos.empty()


def pids(hellos: list[dict[str, int]]) -> list[int]:
    return sorted(hello["pid"] for hello in hellos)


async def test_a_node_that_was_killed_crashed_or_stopped_is_started_again(cluster: Cluster, front: Front):
    async with host_of(cluster.address, front, run_slots=7) as host:
        first = await front.hello()
        assert first["run_slots"] == 7
        os.kill(first["pid"], signal.SIGKILL)
        again = await front.hello()
        assert again["name"] == first["name"] and again["pid"] != first["pid"]
        assert again["folder"] == first["folder"]
        await until(lambda: alive(host) == {first["name"]})

        front.breaks.set()
        await until(lambda: [node.error for node in host.nodes()] == ["RuntimeError: break, said the head"])
        assert not alive(host)
        front.breaks.clear()
        assert (third := await front.hello())["pid"] != again["pid"]
        await until(lambda: alive(host) == {first["name"]})
        await host.stop_nodes(20)
    assert front.hellos.empty()
    async with host_of(cluster.address, front):
        assert (await front.hello())["pid"] != third["pid"]


async def test_ray_requires_its_token(cluster: Cluster, front: Front, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", RAY_TOKEN[::-1])
    with pytest.raises(RayUnavailable, match="refused this process's token"):
        async with host_of(cluster.address, front):
            pass
    assert front.hellos.empty()


async def test_the_head_outlives_ray(
    shared_cluster: Cluster, token: None, front: Front, monkeypatch: pytest.MonkeyPatch
):
    """The last test of this file: no other can use the cluster afterwards."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "3")  # 60 by default
    async with host_of(shared_cluster.address, front) as host:
        await front.hello()
        driver = host.driver_pid
        assert driver is not None
        ended = os.pidfd_open(driver)
        shared_cluster.do("kill_gcs")
        await wait_for_exit(ended)
        await until(lambda: "driver ended" in host.error)
