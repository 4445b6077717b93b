"""Tests of containers beyond the conformance suite: the blame for their end, and leftovers of a start."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

from rollyard.core.failure import DiskLimit, PolicyFailure, TaskInvalid
from rollyard.sandbox import OciRuntime, SandboxLimits, SandboxSpec
from rollyard.sandbox.launched_sandbox import LaunchedSandbox
from rollyard.sandbox.runtimes import oci
from rollyard.testing.sandbox_conformance import eventually, started
from tests.sandbox.runtimes import OciByPodman

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed"),
    pytest.mark.xdist_group("podman"),
]

SPEC = SandboxSpec(owner="test")


async def test_no_signal_from_inside_ends_its_first_process(tmp_path: Path) -> None:
    """Python has a handler for SIGINT, and the kernel protects PID 1 only from signals without a handler."""
    async with OciByPodman(root=tmp_path) as runtime, started(runtime, SPEC) as sandbox:
        await sandbox.exec("for n in $(seq 1 31) $(seq 34 64); do kill -$n 1; done", timeout_s=20.0)
        assert (await sandbox.exec(["echo", "on"], timeout_s=20.0)).stdout == b"on\n"
        assert sandbox.end is None


async def test_a_sandbox_killed_at_its_memory_limit_is_a_policy_failure(tmp_path: Path) -> None:
    """Files on a tmpfs belong to no process: the kernel kills all processes, including PID 1."""
    spec = SandboxSpec(limits=SandboxLimits(memory_bytes=48 << 20))
    async with OciByPodman(root=tmp_path) as runtime, started(runtime, spec) as sandbox:
        if sandbox.limits_in_force["memory"] == "none":
            pytest.skip("the engine does not limit memory here")
        with pytest.raises(PolicyFailure):
            for _ in range(50):
                await sandbox.exec("cat /dev/zero >> /dev/shm/x", timeout_s=20.0)
        assert sandbox.end is None or sandbox.end.reason == "memory"


async def test_a_command_killed_at_the_memory_limit_is_marked(tmp_path: Path) -> None:
    spec = SandboxSpec(limits=SandboxLimits(memory_bytes=64 << 20))
    async with OciByPodman(root=tmp_path) as runtime, started(runtime, spec) as sandbox:
        code = "x = b'x' * (256 << 20)"
        result = await sandbox.exec(["python3", "-c", code], timeout_s=20.0)
        assert result.is_out_of_memory, result
        assert sandbox.oom_kills


async def test_an_import_continues_after_its_caller_is_cancelled(tmp_path: Path) -> None:
    """A large image takes minutes: each start that timed out would begin another import of it."""
    (tmp_path / "image" / "tmp").mkdir(parents=True)
    program, log, go = tmp_path / "podman-slow", tmp_path / "log", tmp_path / "go"
    wait = f"echo once >> {log}; until [ -e {go} ]; do sleep 0.05; done"
    program.write_text(f'#!/bin/sh\ncase "$*" in *" import "*) {wait};; esac\nexec podman "$@"\n')
    program.chmod(0o755)
    command = f"{program} --runtime {shutil.which('runc') or 'crun'}"
    spec = SandboxSpec(image=str(tmp_path / "image"))
    async with OciRuntime(root=tmp_path / "root", command=command) as runtime:
        first = asyncio.ensure_future(runtime.start(spec, lease_s=60.0))
        await eventually(log.exists, "no import began")
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.ensure_future(runtime.start(spec, lease_s=60.0))
        await asyncio.wait([second], timeout=1.0)  # time for a wrong second import; the exact length does not matter
        go.touch()
        await (await second).kill()
        await runtime.forget(str(tmp_path / "image"))
    assert log.read_text() == "once\n"


async def test_a_stopped_first_process_is_killed(tmp_path: Path) -> None:
    async with OciByPodman(root=tmp_path) as runtime:
        sandbox = await runtime.start(SPEC, lease_s=60.0)
        os.kill(sandbox.pid, signal.SIGSTOP)
        await sandbox.kill()
        assert (await sandbox.ended()).reason == "killed"
        listing = await runtime._call("ps", "--all", "--quiet", "--filter", f"name=rollyard-{sandbox.id}")
        assert not listing.stdout


async def test_a_sandbox_above_its_disk_limit_is_ended(tmp_path: Path) -> None:
    spec = SandboxSpec(limits=SandboxLimits(disk_bytes=64 << 20))
    async with OciByPodman(root=tmp_path) as runtime, started(runtime, spec) as sandbox:
        assert sandbox.limits_in_force["disk"] == "watchdog"
        with pytest.raises(DiskLimit):
            await sandbox.exec("head -c 300000000 /dev/zero > /big; sleep 60", timeout_s=60.0)
        assert (await sandbox.ended()).reason == "disk"


async def test_an_unenforceable_disk_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci, "upper_folder", lambda pid: None)
    async with OciByPodman(root=tmp_path) as runtime:
        with pytest.raises(TaskInvalid, match=r"sandbox\.disk_bytes: .* cannot be monitored"):
            await runtime.start(SandboxSpec(limits=SandboxLimits(disk_bytes=64 << 20)), lease_s=60.0)
        async with started(runtime, SPEC) as sandbox:
            assert sandbox.limits_in_force["disk"] == "none"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has uids to give")
async def test_each_container_has_its_own_uids(tmp_path: Path) -> None:
    async with OciByPodman(root=tmp_path) as runtime, started(runtime, SPEC) as one, started(runtime, SPEC) as other:
        assert isinstance(one, LaunchedSandbox) and isinstance(other, LaunchedSandbox)
        owners = {Path(f"/proc/{sandbox.pid}").stat().st_uid for sandbox in (one, other)}
        assert len(owners) == 2 and min(owners) >= oci.UIDS.start
        assert (await one.exec("id -u; touch /mine && stat -c %u /mine", timeout_s=20.0)).stdout == b"0\n0\n"
