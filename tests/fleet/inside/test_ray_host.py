"""Nodes on a real Ray cluster, which all tests share but those that break it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.fleet.ray_host import RayUnavailable
from tests.fleet.inside.ray_parts import ENTRY, RAY_TOKEN, Cluster, Front, alive, gone, host_of, until

pytestmark = pytest.mark.timeout(100)


async def test_every_ray_node_has_one_node_and_they_come_and_go_with_it(cluster: Cluster, front: Front):
    second = cluster.do("add", cpus=2)["ray_id"]
    async with host_of(cluster.address, front) as host:
        hellos = [await front.hello(), await front.hello()]
        assert len({hello["pid"] for hello in hellos}) == len({hello["folder"] for hello in hellos}) == 2
        await until(lambda: alive(host) == {hello["name"] for hello in hellos})
        assert {hello["run_slots"] for hello in hellos} == {32, 64}

        third = cluster.do("add")["ray_id"]
        hello = await front.hello()
        await until(lambda: hello["name"] in alive(host))
        assert len(alive(host)) == 3
        assert {third, second} < {node.ray_id for node in host.nodes()}

        pids = [os.pidfd_open(hello["pid"]) for hello in hellos if hello["name"].endswith(second[:8])]
        cluster.do("remove", ray_id=second)
        await gone(*pids)
        await until(lambda: len(host.nodes()) == 2)
        assert second not in {node.ray_id for node in host.nodes()}
        assert len(alive(host)) == 2
        assert front.hellos.empty()


async def test_a_ray_node_without_cpus_gets_no_node_and_the_host_says_so(cluster: Cluster, front: Front):
    idle = cluster.do("add", cpus=0)["ray_id"]
    async with host_of(cluster.address, front, run_slots=7) as host:
        assert (await front.hello())["run_slots"] == 7
        await until(lambda: len(alive(host)) == 1)
        (node,) = [node for node in host.nodes() if node.ray_id == idle]
        assert not node.is_alive and "no CPU" in node.error


async def test_a_driver_that_is_killed_is_replaced_and_finds_the_same_nodes(cluster: Cluster, front: Front):
    cluster.do("add")
    async with host_of(cluster.address, front) as host:
        for _ in range(2):
            await front.hello()
        await until(lambda: len(alive(host)) == 2)
        before, killed = set(host.nodes()), host.driver_pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await until(lambda: bool(host.error))
        await until(lambda: host.error == "" and len(alive(host)) == 2)
        assert host.driver_pid not in {None, killed}
        assert set(host.nodes()) == before
        assert front.hellos.empty(), "a node was started again"


async def test_a_new_head_finds_the_nodes_of_one_that_was_killed(cluster: Cluster, front: Front):
    cluster.do("add")
    code = """
import asyncio, sys
from rollyard.fleet.ray_host import RayHost
async def main():
    async with RayHost(*sys.argv[1:4], entry=sys.argv[4]) as host:
        print(host.driver_pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    argv = [sys.executable, "-c", code, cluster.address, front.url, front.token, ENTRY]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        driver = os.pidfd_open(int(head.stdout.readline()))
        before = [await front.hello(), await front.hello()]
        head.kill()
    await gone(driver)
    async with Front("second") as new:
        async with host_of(cluster.address, new) as host:
            await front.__aexit__(None, None, None)
            after = [await new.hello(), await new.hello()]
            await until(lambda: len(alive(host)) == 2)
        assert sorted(hello["pid"] for hello in after) == sorted(hello["pid"] for hello in before)
        assert new.hellos.empty()


async def test_a_head_that_was_superseded_lets_go(cluster: Cluster, front: Front):
    async with host_of(cluster.address, front) as old:
        hello = await front.hello()
        async with Front("second") as newer, host_of(cluster.address, newer) as host:
            await until(lambda: "another head" in old.error)
            await front.__aexit__(None, None, None)
            assert (await newer.hello())["pid"] == hello["pid"]
            await until(lambda: len(alive(host)) == 1)
            assert host.error == ""


async def test_ray_restarts_a_node_whose_process_is_killed(cluster: Cluster, front: Front):
    async with host_of(cluster.address, front) as host:
        first = await front.hello()
        os.kill(first["pid"], signal.SIGKILL)
        again = await front.hello()
        assert again["name"] == first["name"] and again["pid"] != first["pid"]
        assert again["folder"] == first["folder"]
        await until(lambda: alive(host) == {first["name"]})


async def test_a_node_that_crashes_says_why_and_is_started_again(cluster: Cluster, front: Front):
    async with host_of(cluster.address, front) as host:
        first = await front.hello()
        front.breaks.set()
        await until(lambda: [node.error for node in host.nodes()] == ["RuntimeError: break, said the head"])
        assert not alive(host)
        front.breaks.clear()
        assert (await front.hello())["pid"] != first["pid"]
        await until(lambda: alive(host) == {first["name"]})


async def test_closing_leaves_the_nodes_and_stopping_ends_them(cluster: Cluster, front: Front):
    async with host_of(cluster.address, front):
        first = await front.hello()
    async with host_of(cluster.address, front) as host:
        await until(lambda: len(alive(host)) == 1)
        assert front.hellos.empty(), "a node was started again"
        ended = os.pidfd_open(first["pid"])
        await host.stop_nodes(20)
        await gone(ended)
        assert (Path(first["folder"]) / "ended in good order").exists()
        assert host.nodes() == []
    assert front.hellos.empty()
    async with host_of(cluster.address, front):
        assert (await front.hello())["pid"] != first["pid"]


async def test_ray_wants_its_token(cluster: Cluster, front: Front, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", RAY_TOKEN[::-1])
    with pytest.raises(RayUnavailable, match="refused this process's token"):
        async with host_of(cluster.address, front):
            pass
    assert front.hellos.empty()
