"""What containers do beyond the conformance suite: who is blamed for their end, and what a start may leave behind."""

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
    """Python has a handler for SIGINT by itself, and the kernel keeps from PID 1 only what it has no handler for."""
    async with OciByPodman(root=tmp_path) as runtime, started(runtime, SPEC) as sandbox:
        await sandbox.exec("for n in $(seq 1 31) $(seq 34 64); do kill -$n 1; done", timeout_s=20.0)
        assert (await sandbox.exec(["echo", "on"], timeout_s=20.0)).stdout == b"on\n"
        assert sandbox.end is None


async def test_memory_that_leaves_nothing_alive_is_the_policys_doing(tmp_path: Path) -> None:
    """Files in memory belong to no process: the kernel kills all there are, PID 1 among them."""
    spec = SandboxSpec(limits=SandboxLimits(memory_bytes=48 << 20))
    async with OciByPodman(root=tmp_path) as runtime, started(runtime, spec) as sandbox:
        if sandbox.limits_in_force["memory"] == "none":
            pytest.skip("the engine limits no memory here")
        with pytest.raises(PolicyFailure):
            for _ in range(50):
                await sandbox.exec("cat /dev/zero >> /dev/shm/x", timeout_s=20.0)
        assert sandbox.end is None or sandbox.end.reason == "memory"


async def test_a_command_that_is_killed_at_the_memory_limit_says_so(tmp_path: Path) -> None:
    spec = SandboxSpec(limits=SandboxLimits(memory_bytes=64 << 20))
    async with OciByPodman(root=tmp_path) as runtime, started(runtime, spec) as sandbox:
        code = "x = b'x' * (256 << 20)"
        result = await sandbox.exec(["python3", "-c", code], timeout_s=20.0)
        assert result.is_out_of_memory, result
        assert sandbox.oom_kills


async def test_an_image_is_imported_once_although_who_asked_for_it_gave_up(tmp_path: Path) -> None:
    """A large one takes minutes: each start that ran out of time would begin another import of it."""
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
        await asyncio.wait([second], timeout=1.0)  # room for the mistake: nothing depends on how long it is
        go.touch()
        await (await second).kill()
        await runtime.forget(str(tmp_path / "image"))
    assert log.read_text() == "once\n"


async def test_a_first_process_that_was_stopped_is_ended_all_the_same(tmp_path: Path) -> None:
    async with OciByPodman(root=tmp_path) as runtime:
        sandbox = await runtime.start(SPEC, lease_s=60.0)
        os.kill(sandbox.pid, signal.SIGSTOP)
        await sandbox.kill()
        assert (await sandbox.ended()).reason == "killed"
        left = await runtime._call("ps", "--all", "--quiet", "--filter", f"name=rollyard-{sandbox.id}")
        assert not left.stdout


async def test_who_fills_the_disk_is_ended(tmp_path: Path) -> None:
    spec = SandboxSpec(limits=SandboxLimits(disk_bytes=64 << 20))
    async with OciByPodman(root=tmp_path) as runtime, started(runtime, spec) as sandbox:
        assert sandbox.limits_in_force["disk"] == "watchdog"
        with pytest.raises(DiskLimit):
            await sandbox.exec("head -c 300000000 /dev/zero > /big; sleep 60", timeout_s=60.0)
        assert (await sandbox.ended()).reason == "disk"


async def test_a_disk_limit_that_nothing_would_enforce_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci, "upper_folder", lambda pid: None)
    async with OciByPodman(root=tmp_path) as runtime:
        with pytest.raises(TaskInvalid, match=r"sandbox\.disk_bytes: .* cannot be monitored"):
            await runtime.start(SandboxSpec(limits=SandboxLimits(disk_bytes=64 << 20)), lease_s=60.0)
        async with started(runtime, SPEC) as sandbox:
            assert sandbox.limits_in_force["disk"] == "none"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has uids to give")
async def test_each_container_has_uids_of_its_own(tmp_path: Path) -> None:
    async with OciByPodman(root=tmp_path) as runtime, started(runtime, SPEC) as one, started(runtime, SPEC) as other:
        assert isinstance(one, LaunchedSandbox) and isinstance(other, LaunchedSandbox)
        owners = {Path(f"/proc/{sandbox.pid}").stat().st_uid for sandbox in (one, other)}
        assert len(owners) == 2 and min(owners) >= oci.UIDS.start
        assert (await one.exec("id -u; touch /mine && stat -c %u /mine", timeout_s=20.0)).stdout == b"0\n0\n"
