"""What a service ignores, because of how it was started, is not ignored inside; a job's end is not their doing."""

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
async def test_nothing_is_ignored_inside_though_the_service_was_started_in_the_background(
    kind: type[BubblewrapRuntime] | type[LocalRuntime], tmp_path: Path
):
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
    try:
        async with kind(root=tmp_path / "root") as runtime:
            sandbox = await runtime.start(SandboxSpec(), lease_s=60)
            done = await sandbox.exec(["grep", "SigIgn", "/proc/self/status"], timeout_s=10)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert int(done.stdout.split()[1], 16) & sum(1 << (number - 1) for number in IGNORED) == 0


@pytest.mark.parametrize("kind", [BubblewrapRuntime, ApptainerRuntime])
async def test_the_end_of_a_job_is_not_the_doing_of_what_runs_in_it(
    kind: type[BubblewrapRuntime] | type[ApptainerRuntime], tmp_path: Path
):
    """A batch system sends SIGTERM to every process of a job that it takes back, the runtimes' own among them."""
    if kind is ApptainerRuntime and shutil.which("apptainer") is None:
        pytest.skip("apptainer is not installed")
    async with kind(root=tmp_path / "root") as runtime:
        sandbox = await runtime.start(SandboxSpec(), lease_s=60)
        for pid in kernel.below({sandbox.pid}, kernel.living()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(0.5)  # on a busy machine the keeper, which is the last, gets it later
        with contextlib.suppress(ProcessLookupError):
            os.kill(sandbox.pid, signal.SIGTERM)
        assert (await sandbox.ended()).reason == "lost"
        await sandbox.kill()


async def test_an_agent_that_ends_itself_by_a_jobs_signal_did_it_where_that_can_be_told(tmp_path: Path):
    async with BubblewrapRuntime(root=tmp_path / "root") as runtime:
        sandbox = await runtime.start(SandboxSpec(), lease_s=60)
        with contextlib.suppress(SandboxEndedByPolicy):  # it may end before it has answered
            await sandbox.exec("kill -TERM -1", timeout_s=10)
        assert (await sandbox.ended()).reason == "ended_inside"
        await sandbox.kill()
