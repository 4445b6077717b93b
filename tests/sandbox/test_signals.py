"""What a service ignores, because of how it was started, is not ignored inside."""

import signal
from pathlib import Path

import pytest

from rollyard.sandbox import BubblewrapRuntime, LocalRuntime, SandboxSpec

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
