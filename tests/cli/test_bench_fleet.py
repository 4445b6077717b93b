"""The bench of a fleet, with small sizes: hollow nodes with a real head, and Ray with two nodes."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import _fleet_place, fleet
from bench._fleet_head import Load, at_saturation, hollow_nodes, idle, open_head
from bench._fleet_parts import NAME, TOKENS, write_entry_points
from bench._fleet_ray import RayPlan, Throughput, waits
from bench.processes import CHECKOUT
from rollyard.cli._console import CommandError
from rollyard.client import AsyncClient

pytestmark = pytest.mark.slow


async def test_the_head_stores_all_results_of_hollow_nodes() -> None:
    async with (
        asyncio.timeout(90),
        open_head(40) as head,
        hollow_nodes(head, Load(nodes=3, slots=2)) as nodes,
        AsyncClient(head.served.url, head.served.token) as client,
    ):
        await nodes.until(lambda: nodes.ended == 40)
        assert (await client.status())["states"]["ended"] == 40
        page = await client.list(state="ended", limit=1)
        (rollout,) = page.rollouts
        assert (rollout.reward, rollout.state) == (1.0, "ended")
        (trace,) = await client.traces(rollout.id)
        assert len(trace.token_ids) == TOKENS and int(trace.mask.astype(int).sum()) == TOKENS // 2


async def test_a_hollow_node_gets_no_more_leases_than_it_has_room_for() -> None:
    """The nodes never end a rollout, so the leases show how many the head assumes to fit."""
    load = Load(nodes=2, slots=3, ahead=2, hold_s=1e9)
    async with (
        asyncio.timeout(90),
        open_head(40) as head,
        hollow_nodes(head, load),
        AsyncClient(head.served.url, head.served.token) as client,
    ):
        while (states := (await client.status())["states"])["run"] < 6 or states["queued"] > 30:
            await asyncio.sleep(0.05)
        assert states == {**states, "run": 6, "init": 4, "queued": 30}


async def test_the_head_is_measured_from_outside() -> None:
    window, head = await at_saturation(1_500, Load(nodes=4, slots=8))
    assert window.ended > 0 and window.calls > 0 and window.took_s > 0
    assert window.bytes / window.ended > 9 * TOKENS, "ids, logprobs, mask and more, per token"
    assert head.meter.pid == head.served.process.pid


async def test_idle_polls_are_measured_separately() -> None:
    polled = await idle(nodes=2, window_s=0.3)
    assert polled.ended == 0 and polled.calls > 2 and polled.bytes > 0


def test_the_waiting_agent_is_found_by_its_entry_point(tmp_path: Path) -> None:
    write_entry_points(tmp_path / "package")
    code = f"""
from rollyard.agents.registry import Agents
from rollyard.envs.registry import Environments
print(type(Environments().get({NAME!r})).__name__, type(Agents().get({NAME!r})).__name__)
"""
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path / 'package'}{os.pathsep}{CHECKOUT}"}
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=50, check=True
    )
    assert completed.stdout.split() == ["WaitEnvironment", "WaitAgent"]


def test_rollouts_end_at_a_constant_rate_from_the_start() -> None:
    plan = RayPlan(nodes=(3,), slots=10, wait_s=4.0, warm_s=4.0, window_s=8.0)
    seconds = [float(str(dict(task["data"])["seconds"])) for task in waits(plan, 3)]  # type: ignore[arg-type]
    first, later = sorted(seconds[:30]), seconds[30:]
    assert all(abs(one - 4.0 * (index + 0.5) / 30) < 0.01 for index, one in enumerate(first))
    assert all(3.6 <= one <= 4.4 for one in later)
    assert len(later) > 30 * (4.0 + 8.0) / 3.6, "more than could end if all were as short as the shortest"


def test_efficiency_is_throughput_per_node_relative_to_one_node() -> None:
    figures = fleet._ray_figures([Throughput(1, 8.0, 8.0, 0.2), Throughput(8, 7.8, 7.0, 0.6)])
    assert (figures["efficiency_8"], figures["least_node_efficiency_8"]) == (0.975, 0.875)
    assert fleet.nodes_fed(100.0) == 23


def test_without_namespaces_ray_is_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match="no program `unshare`"):
        _fleet_place.inside(["true"])
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    with pytest.raises(CommandError, match="Operation not permitted"):
        _fleet_place.inside(["true"])


@pytest.mark.timeout(180)
async def test_two_ray_nodes_are_measured_in_their_own_namespace() -> None:
    try:
        _fleet_place.inside(["true"])
    except CommandError as trouble:
        pytest.skip(trouble.what)
    plan = RayPlan(nodes=(1, 2), slots=4, wait_s=0.5, warm_s=0.5, window_s=2.0)
    one, two = await fleet._on_ray(plan)
    assert (one.nodes, two.nodes) == (1, 2)
    assert one.per_node_s > 0 and two.least_node_s > 0
