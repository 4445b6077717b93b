"""Attacks on ends: on the sandbox's own, on what comes after it, and on everything that it can reach."""

# Small files of the host: blocking calls are short.

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from pathlib import Path

from rollyard.core.failure import PolicyFailure
from rollyard.sandbox.base import Bind, Runtime, SandboxSpec
from rollyard.testing.sandbox_conformance import alive, eventually, marked
from tests.sandbox.hostile.cases import LONG_S, SECONDS, answers, hostile, lives_or_was_ended_by_its_owner, started

_DAEMON = "setsid sh -c 'trap \"\" TERM HUP INT; while :; do sleep {mark}; done' </dev/null >/dev/null 2>&1 & sleep 0"


@hostile
async def kill_9_of_everything(runtime: Runtime) -> None:
    """The PID namespace: `kill -9 -1` reaches only the sandbox's own, and its end is its owner's doing."""
    async with started(runtime) as sandbox, started(runtime) as neighbour:
        pid_namespace = await sandbox.exec(["readlink", "/proc/self/ns/pid"], timeout_s=SECONDS)
        assert pid_namespace.stdout.decode().strip() not in ("", str(Path("/proc/self/ns/pid").readlink())), (
            "it is the host's"
        )
        with contextlib.suppress(PolicyFailure):
            await sandbox.exec("kill -9 -1", timeout_s=SECONDS)
        await lives_or_was_ended_by_its_owner(sandbox)
        await answers(neighbour)


@hostile
async def a_daemon_that_would_outlive_its_sandbox(runtime: Runtime) -> None:
    """The end of PID 1 ends every process, also those with their own session, ignored signals or a dead parent."""
    mark = marked()
    async with started(runtime) as sandbox:
        await sandbox.exec(_DAEMON.format(mark=mark), timeout_s=SECONDS)
        await eventually(lambda: bool(alive(mark)), "the daemon runs")
    assert not alive(mark)


@hostile
async def a_daemon_that_would_live_on_into_the_next_sandbox(runtime: Runtime) -> None:
    """`freeze` proves the end of all processes before it keeps a file: what is judged on a layer is judged alone."""
    mark, target = marked(), runtime.layer_root / f"hostile-{marked()}"
    try:
        async with started(runtime) as sandbox:
            await sandbox.write("left", b"behind")
            await sandbox.exec(_DAEMON.format(mark=mark), timeout_s=SECONDS)
            await eventually(lambda: bool(alive(mark)), "the daemon runs")
            await sandbox.freeze(target)
            assert not alive(mark)
        async with started(runtime, SandboxSpec(layers=(target,))) as later:
            assert await later.read("left", limit_bytes=100) == b"behind"
            commands = await later.exec("cat /proc/[0-9]*/cmdline", timeout_s=SECONDS)
            assert mark.encode() not in commands.stdout
        assert not alive(mark)
    finally:
        for argv in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*argv, "--", str(target)], check=False, capture_output=True)


@hostile
async def rm_of_everything(runtime: Runtime) -> None:
    """Nothing of the host is mounted writable, and images lie under an overlay. The kill needs nothing from inside."""
    mark = marked()
    with tempfile.TemporaryDirectory() as name:
        shown, unseen = Path(name, "shown"), Path(name, "unseen")
        for folder in (shown, unseen):
            folder.mkdir()
            (folder / "kept").write_text("kept")
        spec = SandboxSpec(binds=(Bind(shown, "/shown"),))
        async with started(runtime, spec) as sandbox, started(runtime) as neighbour:
            # First make sure that it is not the host: where a control is missing, nothing may be lost by trying.
            await sandbox.exec(["touch", f"/usr/{mark}", f"/tmp/{mark}"], timeout_s=SECONDS)
            roots = [Path("/"), *([Path(sandbox.spec.image)] if sandbox.spec.image else [])]
            for root in roots:
                assert not (root / "usr" / mark).exists() and not (root / "tmp" / mark).exists()
            result = await sandbox.exec(["cat", str(unseen / "kept")], timeout_s=SECONDS)
            assert result.status != 0
            (sandbox.control_dir / "kept").write_text("kept")
            with contextlib.suppress(PolicyFailure):
                await sandbox.exec("rm -rf --no-preserve-root /* /.[!.]* 2>/dev/null; :", timeout_s=LONG_S)
            await lives_or_was_ended_by_its_owner(sandbox)
            for untouched in (shown, unseen, sandbox.control_dir):
                assert (untouched / "kept").read_text() == "kept"
            await answers(neighbour)
            async with asyncio.timeout(LONG_S):
                await sandbox.kill()
        async with started(runtime) as fresh:
            await answers(fresh)
