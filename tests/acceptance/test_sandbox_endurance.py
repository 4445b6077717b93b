"""Sandboxes leave nothing behind, neither when the service is killed during starts nor after many of them.

Small forms of `rollyard bench survive`, `endurance` and `sandbox` (`make soak` runs the first two at full size), and
tests that their census finds a survivor.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench._census import Census, adopting, control_of
from bench.endurance import bench_endurance
from bench.sandbox import bench_sandbox
from bench.survive import bench_survive

pytestmark = pytest.mark.slow

KILLS = 2
SANDBOXES = {"bubblewrap": 60, "apptainer": 30}
"""A leak would occur with each sandbox. One of Apptainer takes four times as long."""

PROGRAMS = {"bubblewrap": "bwrap", "apptainer": "apptainer"}

OUTLIVES = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        os.close(1)
        import signal
        signal.pause()
"""


@pytest.fixture(params=PROGRAMS)
def runtime(request: pytest.FixtureRequest) -> str:
    if shutil.which(PROGRAMS[request.param]) is None:
        pytest.skip(f"{PROGRAMS[request.param]} is not installed")
    return request.param


@pytest.mark.timeout(300)
async def test_a_killed_service_leaves_no_survivor(runtime: str):
    metrics = (await bench_survive(runtime=runtime, kills=KILLS))["metrics"]
    assert isinstance(metrics, dict)
    assert (metrics["survivors"], metrics["left_after_sweep"]) == (0, 0)
    assert metrics["kills"] == KILLS
    assert isinstance(starting := metrics["starting_min"], int) and starting > 0, "a kill interrupted no start"
    assert isinstance(swept := metrics["swept"], int) and swept > 0, "nothing was left, so the sweep was not tried"


@pytest.mark.timeout(300)
async def test_sandboxes_that_ended_leave_nothing(runtime: str):
    metrics = (await bench_endurance(runtime=runtime, sandboxes=SANDBOXES[runtime]))["metrics"]
    assert isinstance(metrics, dict)
    assert {name: value for name, value in metrics.items() if name.endswith("_more") and value} == {}
    assert metrics["sandboxes"] == SANDBOXES[runtime]


@pytest.mark.timeout(300)
async def test_two_hundred_sandboxes_answer_and_every_metric_is_set_or_explained():
    metrics = (await bench_sandbox(quick=True, peers=False))["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["concurrent_200_ok"] is True
    starts = ("bubblewrap", "bubblewrap_dir", "apptainer_dir", "apptainer_sif", "oci")
    others = ("fork16_s", "concurrent_200_s", "rss_mb_per_sandbox", "doorway_p50_ms", "doorway_new_p50_ms")
    for name in (*(f"{start}_start_p50_ms" for start in starts), *others):
        assert isinstance(metrics[name], float) or metrics[f"{name}_null"], name
    for part, program in (("bubblewrap", "bwrap"), ("apptainer_dir", "apptainer"), ("apptainer_sif", "apptainer")):
        assert metrics[f"{part}_start_p50_ms"] is not None or shutil.which(program) is None, metrics
    assert isinstance(fork_s := metrics["fork16_s"], float) and fork_s > 2, "the set-up alone takes two seconds"


async def test_the_census_finds_a_daemon_that_outlives_its_parent(tmp_path: Path):
    census = Census("bubblewrap", tmp_path)
    with adopting():
        before = await asyncio.to_thread(census.take)
        completed = subprocess.run([sys.executable, "-c", OUTLIVES], stdout=subprocess.PIPE, check=True)
        pid = int(completed.stdout)
        after, _ = await asyncio.to_thread(census.settle, lambda count: count.more(before)["processes"] == 1, 10.0)
        assert [name.split()[0] for name in after.processes - before.processes] == [str(pid)]
        os.kill(pid, signal.SIGKILL)
        settled, _ = await asyncio.to_thread(census.settle, lambda count: not count.more(before)["processes"], 10.0)
        assert settled.more(before)["processes"] == 0


async def test_the_census_finds_folders_and_descriptors(tmp_path: Path):
    census = Census("bubblewrap", tmp_path)
    before = census.take()
    (tmp_path / "sbx_1").mkdir()
    (control_of(tmp_path) / "rollyard-0" / "mark" / "sbx_1").mkdir(parents=True)
    reader, writer = os.pipe()
    more = census.take().more(before)
    os.close(reader)
    os.close(writer)
    assert (more["folders"], more["descriptors"]) == (2, 2)
    assert more["processes"] == more["cgroups"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_mounts_of_other_programs_in_temporary_folders_are_not_counted(tmp_path: Path):
    place, other = tmp_path / "place", tmp_path / "other"
    own = place / "root" / "sbx_1"
    own.mkdir(parents=True)
    other.mkdir()
    census = Census("bubblewrap", place / "root")
    before = census.take()
    with contextlib.ExitStack() as stack:
        for folder in (own, other):
            subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
            stack.callback(subprocess.run, ["umount", folder], check=True)
        assert [name.split()[-1] for name in census.take().mounts - before.mounts] == [str(own)]
