"""A service run as root: no process in its sandboxes is root on the host, and each sandbox has its own files."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rollyard.core.failure import SandboxStartFailed
from rollyard.sandbox import ApptainerRuntime, Bind, BubblewrapRuntime, Sandbox, SandboxSpec
from rollyard.sandbox.launched_sandbox import LaunchedSandbox
from rollyard.sandbox.runtimes.namespaced import UIDS
from rollyard.testing.sandbox_conformance import started
from rollyard.tools.shell import Shell
from tests.sandbox.runtimes import image

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only a service run as root can use other uids")

KINDS = pytest.mark.parametrize("kind", [BubblewrapRuntime, ApptainerRuntime], ids=lambda kind: kind.name)


def uids_below(pid: int) -> set[int]:
    """Returns the uids on the host of all processes of a sandbox, including the init process."""
    parents: dict[int, tuple[int, set[int]]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            lines = dict(line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        parents[int(entry.name)] = (int(lines["PPid"]), {int(word) for word in lines["Uid"].split()})
    uids, level = set[int](), {pid}
    while level:
        for each in level:
            uids |= parents[each][1] if each in parents else set()
        level = {each for each, (parent, _) in parents.items() if parent in level}
    return uids


def init_client(sandbox: Sandbox) -> int:
    assert isinstance(sandbox, LaunchedSandbox)
    return sandbox.pid


@KINDS
async def test_each_sandbox_has_its_own_unprivileged_uid(
    tmp_path: Path, kind: type[BubblewrapRuntime] | type[ApptainerRuntime]
) -> None:
    async with kind(root=tmp_path) as runtime, started(runtime) as one, started(runtime) as two:
        await Shell.open(one)
        await Shell.open(two)
        (first,), (second,) = uids_below(init_client(one)), uids_below(init_client(two))
        assert first != second and first in UIDS and second in UIDS
        assert one.limits_in_force["user"] == "own"
        await one.exec("echo mine > file", timeout_s=60.0)
        (written,) = tmp_path.glob("sbx_*/own/upper/workspace/file")
        assert written.stat().st_uid == 0  # on disk; the mount shows it as the sandbox's


@KINDS
async def test_a_layer_of_one_uid_is_usable_by_another(
    tmp_path: Path, kind: type[BubblewrapRuntime] | type[ApptainerRuntime]
) -> None:
    async with kind(root=tmp_path) as runtime:
        spec = SandboxSpec(image=image(is_sif=False))
        sandbox = await runtime.start(spec, lease_s=60.0)
        await sandbox.exec("echo one > file; mkdir folder; chmod 700 folder; echo x > folder/x", timeout_s=60.0)
        layer = runtime.layer_root / "layer"
        await sandbox.freeze(layer)
        async with (
            started(runtime) as _,  # takes the uid that was released
            started(runtime, SandboxSpec(image=spec.image, layers=(layer,))) as fork,
        ):
            result = await fork.exec(
                "cat file folder/x; echo two >> file; rm -r folder; ls /etc/shadow-", timeout_s=60.0
            )
            assert result.stdout == b"one\nx\n", result
            assert (await fork.exec("cat file; ls", timeout_s=60.0)).stdout == b"one\ntwo\nfile\n"
        assert (layer / "upper" / "workspace" / "file").read_text() == "one\n"


async def test_a_file_that_only_root_can_read_can_be_bound(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("for this sandbox")
    secret.chmod(0o600)
    async with BubblewrapRuntime(root=tmp_path / "root") as runtime:
        spec = SandboxSpec(binds=(Bind(secret, "/given/secret"),))
        async with started(runtime, spec) as sandbox, started(runtime) as other:
            assert (await sandbox.exec("cat /given/secret", timeout_s=60.0)).stdout == b"for this sandbox"
            assert (await sandbox.exec("echo x > /given/secret", timeout_s=60.0)).status != 0
            assert (await other.exec("ls /given", timeout_s=60.0)).status != 0


async def test_uids_are_released_and_their_exhaustion_is_reported(tmp_path: Path) -> None:
    async with BubblewrapRuntime(root=tmp_path, uids=range(UIDS.start, UIDS.start + 2)) as runtime:
        sandboxes = await asyncio.gather(*[runtime.start(SandboxSpec(), lease_s=60.0) for _ in range(2)])
        with pytest.raises(SandboxStartFailed, match="all uids"):
            await runtime.start(SandboxSpec(), lease_s=60.0)
        await sandboxes[0].kill()
        async with started(runtime):
            pass


async def test_without_uids_sandboxes_run_as_the_services_user(tmp_path: Path) -> None:
    async with BubblewrapRuntime(root=tmp_path, uids=None) as runtime, started(runtime) as sandbox:
        assert sandbox.limits_in_force["user"] == "the service's"
        assert (await runtime.probe())["uids"] != "ok"
