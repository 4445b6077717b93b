"""Signals that the service ignores are not ignored inside; a signal to the whole job is not blamed on the policy."""

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from rollyard.core.failure import SandboxEndedByPolicy
from rollyard.sandbox import ApptainerRuntime, BubblewrapRuntime, LocalRuntime, SandboxSpec
from rollyard.sandbox.launcher import kernel

IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


@pytest.mark.parametrize("kind", [BubblewrapRuntime, LocalRuntime])
async def test_no_signal_is_ignored_inside_if_the_service_runs_in_the_background(
    kind: type[BubblewrapRuntime] | type[LocalRuntime], tmp_path: Path
):
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
    try:
        async with kind(root=tmp_path / "root") as runtime:
            sandbox = await runtime.start(SandboxSpec(), lease_s=60)
            result = await sandbox.exec(["grep", "SigIgn", "/proc/self/status"], timeout_s=10)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert int(result.stdout.split()[1], 16) & sum(1 << (number - 1) for number in IGNORED) == 0


@pytest.mark.parametrize("kind", [BubblewrapRuntime, ApptainerRuntime])
async def test_a_signal_to_the_whole_job_is_a_loss(
    kind: type[BubblewrapRuntime] | type[ApptainerRuntime], tmp_path: Path
):
    """A batch system sends SIGTERM to every process of a job that it ends, including those of the runtimes."""
    if kind is ApptainerRuntime and shutil.which("apptainer") is None:
        pytest.skip("apptainer is not installed")
    async with kind(root=tmp_path / "root") as runtime:
        sandbox = await runtime.start(SandboxSpec(), lease_s=60)
        for pid in kernel.descendants({sandbox.pid}, kernel.running_processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(0.5)  # on a busy machine the init process, which is the last, gets it later
        with contextlib.suppress(ProcessLookupError):
            os.kill(sandbox.pid, signal.SIGTERM)
        assert (await sandbox.ended()).reason == "lost"
        await sandbox.kill()


async def test_an_agent_that_signals_itself_ends_the_sandbox_from_inside(tmp_path: Path):
    async with BubblewrapRuntime(root=tmp_path / "root") as runtime:
        sandbox = await runtime.start(SandboxSpec(), lease_s=60)
        with contextlib.suppress(SandboxEndedByPolicy):  # it may end before the answer
            await sandbox.exec("kill -TERM -1", timeout_s=10)
        assert (await sandbox.ended()).reason == "ended_inside"
        await sandbox.kill()
