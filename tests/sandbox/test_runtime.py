"""Tests of the runtimes beyond the conformance suite: failures, bad images, sweeps, many sandboxes at once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path

import pytest
import uvloop

from rollyard.core.failure import (
    MemoryLimit,
    ProcessLimit,
    RollyardError,
    SandboxEndedByPolicy,
    SandboxLost,
    SandboxStartFailed,
    SandboxStuck,
)
from rollyard.sandbox import (
    Bind,
    BubblewrapRuntime,
    LocalRuntime,
    Runtime,
    Sandbox,
    SandboxLimits,
    SandboxSpec,
)
from rollyard.sandbox.base import SandboxEnd
from rollyard.sandbox.launched_sandbox import LaunchedSandbox, SandboxPaths
from rollyard.sandbox.launcher import file_jobs, kernel, sandbox_init
from rollyard.sandbox.limits.limiter import Limiter
from rollyard.testing.sandbox_conformance import CHECKS, alive, eventually, marked, started
from rollyard.tools.shell import Shell
from tests.sandbox.runtimes import RUNTIMES

pytestmark = pytest.mark.slow

SPEC = SandboxSpec(owner="test")


def sandbox_folders(root: Path) -> list[str]:
    return [entry.name for entry in root.glob("sbx_*")]


def in_session(leader: int) -> list[str]:
    """Returns the live processes of that session, and where in the kernel they wait. The launcher and all its
    descendants stay in its session."""
    processes: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] not in "ZX":
                processes.append(f"{entry.name} {fields[0]}")
        with contextlib.suppress(OSError):  # separate: not every kernel has it
            if processes and processes[-1].startswith(f"{entry.name} "):
                processes[-1] += f" in {(entry / 'wchan').read_text()}"
    return processes


def test_runtimes_implement_the_interface() -> None:
    def takes(_: Runtime) -> None: ...

    takes(BubblewrapRuntime(root=Path("unused")))
    takes(LocalRuntime(root=Path("unused")))


async def test_a_sandbox_implements_the_interface(local: LocalRuntime) -> None:
    async with started(local) as sandbox:
        assert isinstance(sandbox, Sandbox)


def test_it_works_on_uvloop(tmp_path: Path) -> None:
    """The whole suite runs on asyncio; here only the checks that use the loop most."""
    names = {"a_timeout_kills_every_process_of_the_command", "fifty_mebibytes_are_copied_in_and_out_unchanged"}
    names |= {
        "kill_returns_when_every_process_has_ended",
        "stdin_is_sent_and_closed",
        "output_is_capped_and_the_excess_counted",
    }

    async def main() -> None:
        async with BubblewrapRuntime(root=tmp_path) as runtime:
            for check in CHECKS:
                if check.name in names:
                    await check.run(runtime)

    uvloop.run(main())


# --- starting -----------------------------------------------------------------------------------------


async def test_two_hundred_start_at_once(bubblewrap: BubblewrapRuntime, tmp_path: Path) -> None:
    sandboxes = await asyncio.gather(*[bubblewrap.start(SPEC, lease_s=60.0) for _ in range(200)])
    results = await asyncio.gather(*[sandbox.exec(["pwd"], timeout_s=30.0) for sandbox in sandboxes])
    assert {result.stdout for result in results} == {b"/workspace\n"}
    await asyncio.gather(*[sandbox.kill() for sandbox in sandboxes])
    assert not sandbox_folders(tmp_path / "bubblewrap")


async def test_descriptors_do_not_grow(bubblewrap: BubblewrapRuntime) -> None:
    async def round_trip() -> None:
        async with started(bubblewrap) as sandbox:
            await sandbox.exec("cat", timeout_s=60.0, stdin=b"x")
            await sandbox.write("f", b"x")
            await sandbox.read("f", limit_bytes=10)

    await round_trip()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        await round_trip()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_a_missing_bwrap_is_reported_with_a_remedy(tmp_path: Path) -> None:
    async with BubblewrapRuntime(root=tmp_path, program="no-such-bwrap") as runtime:
        with pytest.raises(SandboxStartFailed, match="apt-get install bubblewrap"):
            await runtime.start(SPEC, lease_s=60.0)
        assert "apt-get install bubblewrap" in (await runtime.probe())["bubblewrap"]


async def test_the_error_contains_the_output_of_bwrap(tmp_path: Path) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    program.chmod(0o755)
    async with BubblewrapRuntime(root=tmp_path / "root", program=str(program), uids=None) as runtime:
        with pytest.raises(
            SandboxStartFailed,
            match=r"apparmor_restrict_unprivileged_userns(.|\n)*No permissions to create new namespace",
        ):
            await runtime.start(SPEC, lease_s=60.0)
        assert not sandbox_folders(tmp_path / "root")


async def test_a_start_that_hangs_times_out_and_is_cleaned_up(tmp_path: Path) -> None:
    mark = marked()
    program = tmp_path / "bwrap"
    program.write_text(f"#!/bin/sh\nexec sleep {mark}\n")
    program.chmod(0o755)
    async with BubblewrapRuntime(root=tmp_path / "root", program=str(program), uids=None, start_s=0.5) as runtime:
        with pytest.raises(SandboxStartFailed, match=re.escape("0.5 s")):
            await runtime.start(SPEC, lease_s=60.0)
        assert not alive(mark)
        assert not sandbox_folders(tmp_path / "root")


async def test_a_dead_launcher_is_replaced_and_ends_no_sandbox(bubblewrap: BubblewrapRuntime) -> None:
    async with started(bubblewrap) as old:
        pid = bubblewrap._fork_server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        async with started(bubblewrap) as new:
            for sandbox in (old, new):
                assert (await sandbox.exec(["echo", "on"], timeout_s=60.0)).stdout == b"on\n"
        assert bubblewrap._fork_server.pid not in (None, pid)


async def test_a_closed_runtime_starts_nothing(tmp_path: Path) -> None:
    async with LocalRuntime(root=tmp_path) as runtime:
        pass
    with pytest.raises(SandboxStartFailed, match="closed"):
        await runtime.start(SPEC, lease_s=60.0)


async def test_close_ends_running_and_starting_sandboxes(tmp_path: Path) -> None:
    async with BubblewrapRuntime(root=tmp_path) as runtime:
        running = await runtime.start(SPEC, lease_s=60.0)
        starting = [asyncio.ensure_future(runtime.start(SPEC, lease_s=60.0)) for _ in range(5)]
        await asyncio.sleep(0)
    assert (await running.ended()).reason == "killed"
    await asyncio.wait(starting, timeout=20.0)
    for task in starting:  # one that was ready before `close` was ended like any other
        error = task.exception()
        assert isinstance(error, SandboxStartFailed) or (error is None and task.result().end is not None)
    assert not sandbox_folders(tmp_path)


async def test_close_waits_for_a_kill_whose_caller_was_cancelled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise its files stay, and deleting them may start a launcher that is never ended."""
    async with BubblewrapRuntime(root=tmp_path) as runtime:
        sandbox = await runtime.start(SPEC, lease_s=60.0)
        await sandbox.exec("touch $(seq 50)", timeout_s=20.0)
        fork_server = runtime._fork_server.pid
        assert fork_server is not None
        os.kill(fork_server, signal.SIGSTOP)  # delays the deletion
        try:
            killing = asyncio.ensure_future(sandbox.kill())
            await eventually(lambda: not runtime._live, "it was not ended")
            killing.cancel()
            closing = asyncio.ensure_future(runtime.close())
            await asyncio.wait([closing], timeout=0.1)
        finally:
            os.kill(fork_server, signal.SIGCONT)
        await closing
    assert not runtime._endings and not sandbox_folders(tmp_path)
    assert runtime._fork_server.pid is None
    assert "could not be deleted" not in caplog.text


async def test_close_ends_the_wait_for_room(tmp_path: Path) -> None:
    limiter = Limiter(memory_reserve_bytes=1 << 60)  # no machine has that much
    async with BubblewrapRuntime(root=tmp_path, limiter=limiter) as runtime:
        await eventually(lambda: not limiter._has_room.is_set(), "low memory was not reported")
        starting = asyncio.ensure_future(runtime.start(SPEC, lease_s=60.0))
        await asyncio.wait([starting], timeout=0.1)
        assert not starting.done() and not runtime._live
    with pytest.raises(SandboxStartFailed, match="closed"):
        await starting
    assert runtime._fork_server.pid is None
    assert not sandbox_folders(tmp_path)


async def test_a_failure_after_the_start_leaves_nothing(tmp_path: Path) -> None:
    class Unlucky(BubblewrapRuntime):
        def _on_started(self, sandbox: LaunchedSandbox, place: SandboxPaths) -> None:
            super()._on_started(sandbox, place)
            raise OSError("no descriptor left")

    async with Unlucky(root=tmp_path) as runtime:
        with pytest.raises(OSError, match="no descriptor"):
            await runtime.start(SPEC, lease_s=60.0)
        assert not runtime._live
        assert not sandbox_folders(tmp_path)


async def test_a_failed_open_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("a file where a folder is to be")
    runtime = BubblewrapRuntime(root=tmp_path)
    with pytest.raises(OSError, match="etc"):
        await runtime.__aenter__()
    assert runtime._limiter._monitor is not None and runtime._limiter._monitor.pid is None
    (tmp_path / "etc").unlink()
    async with runtime, started(runtime):  # its folder is not locked any more
        pass


async def test_a_start_cancelled_while_copying_a_layer_leaves_nothing(tmp_path: Path) -> None:
    upper = tmp_path / "layer" / "upper"
    for number in range(500):
        (upper / f"folder{number}").mkdir(parents=True)
        (upper / f"folder{number}" / "file").write_text("x")
    async with LocalRuntime(root=tmp_path / "root") as runtime:
        starting = asyncio.ensure_future(runtime.start(SandboxSpec(layers=(tmp_path / "layer",)), lease_s=60.0))
        copied = (tmp_path / "root").glob
        await eventually(lambda: any(copied("sbx_*/upper/folder*")), "no copy began")
        starting.cancel()
        await asyncio.wait([starting])
    assert not sandbox_folders(tmp_path / "root")


async def test_a_root_belongs_to_one_process(tmp_path: Path) -> None:
    async with LocalRuntime(root=tmp_path):
        with pytest.raises(RuntimeError, match="in use"):
            async with LocalRuntime(root=tmp_path):
                pass


# --- images, binds, limits ----------------------------------------------------------------------------


def small_image(folder: Path, programs: tuple[str, ...] = ("sh", "sleep", "cat", "ls", "touch")) -> Path:
    """Makes a root with a few programs and their libraries, without bash."""
    for name in programs:
        program = shutil.which(name)
        assert program is not None
        files = [
            program,
            *re.findall(r"(/\S+) \(0x", subprocess.run(["ldd", program], capture_output=True, text=True).stdout),
        ]
        for path in files:
            target = folder / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    for name in ("bin", "lib", "lib64"):
        if Path("/", name).is_symlink() and not (folder / name).exists():
            (folder / name).symlink_to(f"usr/{name}")
    return folder


async def test_writes_to_an_image_are_private(bubblewrap: BubblewrapRuntime, tmp_path: Path) -> None:
    image = small_image(tmp_path / "image")
    (image / "data").mkdir()
    (image / "data" / "given").write_text("given")
    spec = SandboxSpec(image=str(image))
    async with started(bubblewrap, spec) as one, started(bubblewrap, spec) as two:
        assert (await one.exec("cat /data/given; touch /data/mine; echo new > /data/given", timeout_s=60.0)).status == 0
        assert (await one.read("/data/given", limit_bytes=100)) == b"new\n"
        assert (await two.exec("ls /data; cat /data/given", timeout_s=60.0)).stdout == b"given\ngiven"
        assert (await one.exec(["python3"], timeout_s=60.0)).status == 127
        await one.write("/etc/made", b"x")
    assert (image / "data" / "given").read_text() == "given"
    assert not (image / "etc").exists()


@pytest.mark.parametrize("name", ["missing", "with,comma", "empty"])
async def test_a_bad_image_is_refused(bubblewrap: BubblewrapRuntime, tmp_path: Path, name: str) -> None:
    (tmp_path / "with,comma").mkdir()
    (tmp_path / "empty").mkdir()
    with pytest.raises(SandboxStartFailed, match="cat: No such file" if name == "empty" else name):
        await bubblewrap.start(SandboxSpec(image=str(tmp_path / name)), lease_s=60.0)
    assert not sandbox_folders(tmp_path / "bubblewrap")


async def test_binds_mount_host_paths(bubblewrap: BubblewrapRuntime, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "f").write_text("shown")
    binds = (Bind(tmp_path / "in", "/tests"), Bind(tmp_path / "out", "/out", is_read_only=False))
    async with started(bubblewrap, SandboxSpec(binds=binds)) as sandbox:
        result = await sandbox.exec("cat /tests/f > /out/f; touch /tests/no", timeout_s=60.0)
        assert result.status != 0
    assert (tmp_path / "out" / "f").read_text() == "shown"
    assert not (tmp_path / "in" / "no").exists()


async def test_replacing_a_folder_deletes_nothing_that_is_mounted_below_it(
    bubblewrap: BubblewrapRuntime, tmp_path: Path
) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "f").write_text("host")
    bind = Bind(tmp_path / "a b", "/workspace/d/in/a b", is_read_only=False)
    async with started(bubblewrap, SandboxSpec(binds=(bind,))) as sandbox:
        await sandbox.exec("mkdir -p e d/old/x; touch e/new d/old/x/f; chmod 500 d/old", timeout_s=60.0)
        await sandbox.download("e", tmp_path / "e.tar", limit_bytes=1 << 20)
        await sandbox.unpack(tmp_path / "e.tar", "d", is_replaced=True)
        result = await sandbox.exec("find d -type f; find d -name old", timeout_s=60.0)
    assert sorted(result.stdout.decode().splitlines()) == ["d/in/a b/f", "d/new"]
    assert (tmp_path / "a b" / "f").read_text() == "host"


async def test_local_replaces_only_folders_of_its_workspace(local: LocalRuntime, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "old").touch()
    async with started(local, SandboxSpec()) as sandbox:
        await sandbox.exec("mkdir e d; touch e/new d/old", timeout_s=60.0)
        await sandbox.download("e", tmp_path / "e.tar", limit_bytes=1 << 20)
        for folder in ("d", str(tmp_path / "host")):
            await sandbox.unpack(tmp_path / "e.tar", folder, is_replaced=True)
        assert (await sandbox.exec("ls d", timeout_s=60.0)).stdout == b"new\n"
    assert {path.name for path in (tmp_path / "host").iterdir()} == {"old", "new"}


async def test_local_refuses_images_and_binds(local: LocalRuntime, tmp_path: Path) -> None:
    for spec in (SandboxSpec(image="/"), SandboxSpec(binds=(Bind(tmp_path, "/x"),))):
        with pytest.raises(SandboxStartFailed, match="use bubblewrap"):
            await local.start(spec, lease_s=60.0)


async def test_limits_are_enforced_and_their_mechanisms_reported(bubblewrap: BubblewrapRuntime) -> None:
    limits = SandboxLimits(memory_bytes=1 << 30, open_files=64)
    async with started(bubblewrap, SandboxSpec(limits=limits)) as sandbox:
        assert sandbox.limits_in_force["memory"] in ("cgroup v1", "cgroup v2", "systemd", "watchdog")
        assert sandbox.limits_in_force["processes"] in ("cgroup v1", "cgroup v2", "systemd", "rlimit")
        assert sandbox.limits_in_force["open_files"] == "rlimit"
        assert (await sandbox.exec("ulimit -n; ulimit -Hn; ulimit -c", timeout_s=60.0)).stdout == b"64\n64\n0\n"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64


async def test_the_idle_program_has_the_seccomp_filter(bubblewrap: BubblewrapRuntime) -> None:
    async with started(bubblewrap) as sandbox:
        script = "for p in /proc/[0-9]*; do read name < $p/comm; [ $name != cat ] || grep Seccomp: $p/status; done"
        result = await sandbox.exec(script, timeout_s=20.0)
        assert result.stdout.split() == [b"Seccomp:", b"2"], result


FULL = """
import os, time
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
except OSError:
    print("full", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("what", ["exec", "read"])
async def test_a_command_without_a_free_process_fails_with_process_limit(
    bubblewrap: BubblewrapRuntime, what: str
) -> None:
    """The init process forks within the sandbox's limit. If it cannot, that is not a loss, which would be retried."""
    async with started(bubblewrap, SandboxSpec(limits=SandboxLimits(processes=32))) as sandbox:
        if sandbox.limits_in_force["processes"] == "rlimit":
            pytest.skip("the limit does not apply to the init process here")
        reader, writer = os.pipe2(os.O_CLOEXEC)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            await sandbox.spawn(["python3", "-c", FULL], fds={0: null, 1: writer, 2: null})
            assert await asyncio.to_thread(os.read, reader, 4) == b"full"
            with pytest.raises(ProcessLimit):
                if what == "exec":
                    await sandbox.exec("true", timeout_s=20.0)
                else:
                    await sandbox.read("/etc/passwd", limit_bytes=1 << 20)
        finally:
            for fd in (reader, writer, null):
                os.close(fd)


async def test_a_download_without_free_memory_fails_with_memory_limit(disk_path: Path) -> None:
    names = disk_path / "names"  # made here: new entries of a folder count as memory of the sandbox that makes them
    names.mkdir()
    (names / "a").touch()
    for number in range(50_000):
        (names / f"a{number:0100}").hardlink_to(names / "a")
    spec = SandboxSpec(limits=SandboxLimits(memory_bytes=64 << 20), binds=(Bind(names, "/names"),))
    async with BubblewrapRuntime(root=disk_path / "root") as runtime, started(runtime, spec) as sandbox:
        if sandbox.limits_in_force["memory"] == "watchdog":
            pytest.skip("only a cgroup counts files in memory")
        result = await sandbox.exec("dd if=/dev/zero of=/dev/shm/x bs=1M count=40", timeout_s=60.0)
        assert result.status == 0, result
        with pytest.raises(MemoryLimit):
            await sandbox.download("/names", disk_path / "d", limit_bytes=1 << 30)


async def test_the_probe_reports_ok(bubblewrap: BubblewrapRuntime, local: LocalRuntime) -> None:
    probed = dict(await bubblewrap.probe())
    assert {probed[name] for name in ("bubblewrap", "start", "overlay")} == {"ok"}
    assert await local.probe() == {"start": "ok"}


# --- no descriptors left ------------------------------------------------------------------------------


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def room_for(descriptors: int) -> Generator[None, None, None]:
    """Limits the descriptors that this process can still open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 25, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(descriptors):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("what", ["exec", "write", "read", "download", "shell", "start"])
async def test_calls_without_free_descriptors_leak_none(
    bubblewrap: BubblewrapRuntime, tmp_path: Path, what: str
) -> None:
    """Otherwise a service that ran out of them once would never recover."""
    async with started(bubblewrap) as sandbox:
        await sandbox.write("f", b"x")

        async def shell() -> None:
            await (await Shell.open(sandbox)).close()

        async def start() -> None:
            await (await bubblewrap.start(SPEC, lease_s=60.0)).kill()

        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "exec": lambda: sandbox.exec("cat", timeout_s=20.0, stdin=b"x"),
            "write": lambda: sandbox.write("f", b"y"),
            "read": lambda: sandbox.read("f", limit_bytes=10),
            "download": lambda: sandbox.download("f", tmp_path / "target", limit_bytes=100),
            "shell": shell,
            "start": start,
        }
        for room in range(12):
            before = open_descriptors()
            with room_for(room), contextlib.suppress(OSError, RollyardError):
                await calls[what]()
            await eventually(lambda before=before: open_descriptors() == before, f"all are closed ({room})")


@pytest.mark.skipif(os.geteuid() != 0, reason="only a service run as root can use other uids")
async def test_starts_without_free_descriptors_leak_no_uid(tmp_path: Path) -> None:
    async with BubblewrapRuntime(root=tmp_path, uids=range(200_000, 200_002)) as runtime:
        async with started(runtime):
            pass
        for _ in range(3):
            with room_for(0), pytest.raises(OSError, match="Too many open files"):
                await runtime.start(SPEC, lease_s=60.0)
        async with started(runtime), started(runtime):
            pass


async def test_a_kill_needs_no_descriptor(bubblewrap: BubblewrapRuntime) -> None:
    sandbox = await bubblewrap.start(SPEC, lease_s=60.0)
    with room_for(0):
        await sandbox.kill()
    assert (await sandbox.ended()).reason == "killed"


# --- files that change meanwhile ---------------------------------------------------------------------


async def test_a_file_that_vanishes_during_a_download_is_left_out(
    bubblewrap: BubblewrapRuntime, tmp_path: Path
) -> None:
    """A server that the agent left running creates and deletes files all the time."""
    async with started(bubblewrap) as sandbox:
        await sandbox.write("kept", b"kept")
        await sandbox.exec("mkdir busy", timeout_s=60.0)
        churn = "while :; do for i in 0 1 2 3 4 5 6 7 8 9; do : > $i; done; rm -f *; done"
        await sandbox.exec(f"({churn}) > /dev/null 2>&1 &", timeout_s=60.0, cwd="busy")
        for _ in range(100):
            assert await sandbox.download(".", tmp_path / "tar", limit_bytes=1 << 20) == "tar"
            with tarfile.open(tmp_path / "tar") as archive:
                assert archive.getmember("kept").size == 4


def test_a_full_disk_of_the_host_is_not_blamed_on_the_agent(tmp_path: Path) -> None:
    """Refused would leave the files out and lead to a reward of 0."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "f").write_bytes(bytes(1 << 20))
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        for path in (tmp_path / "folder", tmp_path / "folder" / "f"):
            with pytest.raises(file_jobs.Unwritten):
                file_jobs.do_download({"path": str(path), "limit": 1 << 30}, [full])
    finally:
        os.close(full)


# --- ends ---------------------------------------------------------------------------------------------


async def test_an_init_process_killed_from_outside_is_a_loss(bubblewrap: BubblewrapRuntime) -> None:
    mark = marked()
    sandbox = await bubblewrap.start(SPEC, lease_s=60.0)
    task = asyncio.ensure_future(sandbox.exec(["sleep", mark], timeout_s=60.0))
    await eventually(lambda: bool(alive(mark)), "the command runs")
    os.kill(sandbox.pid, signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await task
    assert (await sandbox.ended()).reason == "lost"
    assert not alive(mark)
    await sandbox.kill()


async def test_a_first_process_killed_from_outside_is_a_loss(bubblewrap: BubblewrapRuntime) -> None:
    """No process inside can kill PID 1 of its own namespace."""
    sandbox = await bubblewrap.start(SPEC, lease_s=60.0)
    (first,) = Path(f"/proc/{sandbox.pid}/task/{sandbox.pid}/children").read_text().split()
    assert f"NSpid:\t{first}" in (status := Path(f"/proc/{first}/status").read_text()) and "\t1\n" in status
    os.kill(int(first), signal.SIGKILL)
    assert (await sandbox.ended()).reason == "lost"
    await sandbox.kill()


async def test_an_idle_process_killed_inside_is_not_a_loss(bubblewrap: BubblewrapRuntime) -> None:
    """bwrap's status is 137 in both cases."""
    sandbox = await bubblewrap.start(SPEC, lease_s=60.0)
    with contextlib.suppress(SandboxEndedByPolicy):
        await sandbox.exec("kill -9 2", timeout_s=10.0)
    assert await sandbox.ended() == SandboxEnd("ended_inside", "its first process ended with status 137")
    await sandbox.kill()


async def test_a_status_after_a_failed_request_is_ignored(bubblewrap: BubblewrapRuntime) -> None:
    async with started(bubblewrap) as sandbox:
        init_client = bubblewrap._init_clients[sandbox.id]
        job = init_client.request({"op": "stat"})  # an unknown request, which is never answered
        init_client._on_message(
            {"n": job.number, "broken": "entering the sandbox: no memory", "errno": errno.ENOMEM}, []
        )
        init_client._on_message({"n": job.number, "status": 255}, [])
        with pytest.raises(SandboxLost, match="no memory"):
            await job.done


@pytest.mark.parametrize(
    ("number", "answer"),
    [(errno.ENOMEM, {"broken": "prog: [Errno 12] Cannot allocate memory", "errno": errno.ENOMEM}), (errno.ENOENT, 127)],
    ids=["the machine's", "the command's"],
)
def test_a_program_that_the_machine_cannot_start_has_no_status(
    monkeypatch: pytest.MonkeyPatch, number: int, answer: int | dict[str, object]
) -> None:
    def run_program(argv: list[str], env: dict[bytes, bytes]) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sandbox_init, "run_program", run_program)
    own_end, init_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifeline, lifeline_in = os.pipe()
    request = {"n": 7, "tty": False, "limits": {}, "reaps": False, "slots": [], "cwd": "/", "argv": ["prog"], "env": {}}
    pid = os.fork()
    if pid == 0:
        sandbox_init.SandboxInit(init_end, lifeline, -1, sandbox_init.ProcessSpace(), b"").execute(request, [])
    if isinstance(answer, int):
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == answer
    else:
        assert kernel.receive(own_end)[0] == {"n": 7, **answer}
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for end in (own_end, init_end):
        end.close()
    for fd in (lifeline, lifeline_in):
        os.close(fd)


async def test_orphans_of_a_killed_local_init_process_are_killed(local: LocalRuntime) -> None:
    mark = marked()
    sandbox = await local.start(SPEC, lease_s=60.0)
    await sandbox.exec(f"setsid sleep {mark} >/dev/null 2>&1 & sleep 0", timeout_s=60.0)
    await eventually(lambda: bool(alive(mark)), "the daemon runs")
    async with started(local) as other:
        os.kill(sandbox.pid, signal.SIGKILL)
        assert (await sandbox.ended()).reason == "lost"
        await eventually(lambda: not alive(mark), "its orphan is gone")
        assert (await other.exec(["echo", "on"], timeout_s=60.0)).stdout == b"on\n"
    await sandbox.kill()


async def test_a_sandbox_whose_end_is_not_proven_is_stuck_and_its_folder_kept(tmp_path: Path) -> None:
    async with LocalRuntime(root=tmp_path, kill_s=0.2) as runtime:
        sandbox = await runtime.start(SPEC, lease_s=60.0)
        os.kill(sandbox.pid, signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(SandboxStuck):
                await sandbox.kill()
        assert sandbox_folders(tmp_path) == [sandbox.id]
        os.kill(sandbox.pid, signal.SIGCONT)
        assert (await sandbox.ended()).reason == "killed"


async def test_close_closes_the_descriptors_of_stuck_sandboxes(tmp_path: Path) -> None:
    async with LocalRuntime(root=tmp_path, kill_s=0.2) as runtime:
        sandbox = await runtime.start(SPEC, lease_s=60.0)
        (init_client,) = runtime._init_clients.values()
        os.kill(sandbox.pid, signal.SIGSTOP)
        with pytest.raises(SandboxStuck):
            await sandbox.kill()
        assert init_client._wire._sock.fileno() >= 0, "it may still end and report it"
    assert init_client._wire._sock.fileno() == init_client._pidfd == -1
    os.kill(sandbox.pid, signal.SIGKILL)


async def test_files_are_deleted_although_the_launcher_dies(bubblewrap: BubblewrapRuntime, tmp_path: Path) -> None:
    folder = tmp_path / "much"
    folder.mkdir()
    async with started(bubblewrap):  # starts the launcher
        pass
    pid = bubblewrap._fork_server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # so that it is killed before it answers
    removing = asyncio.ensure_future(bubblewrap.remove([folder]))
    await asyncio.wait([removing], timeout=0.1)
    os.kill(pid, signal.SIGKILL)
    assert await removing
    assert not folder.exists()


async def test_deep_and_forbidden_folders_are_deleted(bubblewrap: BubblewrapRuntime, tmp_path: Path) -> None:
    async with started(bubblewrap) as sandbox:
        deep = "import os\nfor _ in range(300):\n os.mkdir('d' * 100); os.chdir('d' * 100)"
        assert (await sandbox.exec(["python3", "-c", deep], timeout_s=10.0)).status == 0
        assert (await sandbox.exec("mkdir -p no/way; chmod 0 no", timeout_s=60.0)).status == 0
    assert not sandbox_folders(tmp_path / "bubblewrap")


_STARTER = """
import asyncio, sys
from pathlib import Path
from rollyard.sandbox import BubblewrapRuntime, SandboxSpec
async def main():
    async with BubblewrapRuntime(root=Path(sys.argv[1])) as runtime:
        while True:
            starts = [asyncio.ensure_future(runtime.start(SandboxSpec(), lease_s=60)) for _ in range(8)]
            await asyncio.wait(starts[:1])
            print(runtime._fork_server.pid, flush=True)
            await asyncio.gather(*starts)
asyncio.run(main())
"""


@pytest.mark.parametrize("rounds", [1, 2, 4])
async def test_kill_9_during_starts_leaves_nothing(tmp_path: Path, rounds: int) -> None:
    with subprocess.Popen([sys.executable, "-c", _STARTER, str(tmp_path)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        leader = 0
        for _ in range(rounds):
            leader = int(await asyncio.to_thread(server.stdout.readline))
        server.kill()
        server.wait()
    await eventually(lambda: not in_session(leader), "nothing is left of the starts", lambda: in_session(leader))
    async with BubblewrapRuntime(root=tmp_path):
        assert not sandbox_folders(tmp_path)


# --- the sweep ----------------------------------------------------------------------------------------


def record_of(pid: int, **changes: object) -> dict[str, object]:
    start_time = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    inode = Path(f"/proc/{pid}/ns/pid").stat().st_ino
    return {"pid": pid, "start_time": start_time, "pid_namespace": inode, **changes}


@pytest.mark.parametrize("changes", [{}, {"start_time": "1"}, {"pid_namespace": 1}])
async def test_the_sweep_ends_the_recorded_process_and_no_other(tmp_path: Path, changes: dict[str, object]) -> None:
    with subprocess.Popen(["sleep", "1000"]) as victim:
        try:
            folder = tmp_path / "sbx_left"
            folder.mkdir()
            (folder / "record.json").write_text(json.dumps(record_of(victim.pid, **changes)))
            async with BubblewrapRuntime(root=tmp_path):
                assert not sandbox_folders(tmp_path)
            assert victim.poll() == (None if changes else -signal.SIGKILL)
        finally:
            victim.kill()


async def test_a_corrupt_record_does_not_prevent_opening(tmp_path: Path) -> None:
    (tmp_path / "sbx_left").mkdir()
    (tmp_path / "sbx_left" / "record.json").write_text("{")
    async with LocalRuntime(root=tmp_path):
        assert not sandbox_folders(tmp_path)


async def test_a_foreign_control_folder_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / f"rollyard-{os.geteuid()}"
    foreign.mkdir(mode=0o777)
    foreign.chmod(0o777)
    with pytest.raises(RuntimeError, match="mode 0700"):
        async with LocalRuntime(root=tmp_path / "root", control_root=tmp_path):
            pass


async def test_only_abandoned_control_folders_are_removed(tmp_path: Path) -> None:
    """They are in memory: a killed service that is never restarted must not occupy it for ever."""
    async with LocalRuntime(root=tmp_path / "a", control_root=tmp_path) as living:
        folder = living._control.parent
        (folder / "abandoned" / "sbx_x").mkdir(parents=True)
        for path in (folder / "abandoned", living._control):
            os.utime(path, (1, 1))
        (folder / "new").mkdir()
        async with LocalRuntime(root=tmp_path / "b", control_root=tmp_path):
            assert not (folder / "abandoned").exists()
            assert living._control.exists() and (folder / "new").exists()


@pytest.mark.parametrize("name", ["bubblewrap", "apptainer", "local"])
async def test_a_service_can_run_in_a_folder_that_only_its_user_may_enter(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root's home is such a folder: the sandboxes' users cannot enter it, and need not."""
    if name == "apptainer" and shutil.which("apptainer") is None:
        pytest.skip("apptainer is not installed")
    (tmp_path / "private").mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path / "private")
    async with RUNTIMES[name](root=tmp_path / "root") as runtime:
        sandbox = await runtime.start(SPEC, lease_s=60.0)
        assert (await sandbox.exec(["echo", "ok"], timeout_s=10.0)).stdout == b"ok\n"
        await sandbox.kill()


async def test_paths_below_a_forbidden_folder_are_left_out_of_a_layer(tmp_path: Path) -> None:
    """Meaningful only as an ordinary user: root is never refused."""
    async with BubblewrapRuntime(root=tmp_path) as runtime:
        sandbox = await runtime.start(SandboxSpec(), lease_s=60.0)
        await sandbox.exec("echo x > ~/.profile; echo y > ~/kept; chmod 0 ~", timeout_s=60.0)
        layer = runtime.layer_root / "layer"
        await sandbox.freeze(layer, without=["/home/agent/.profile", "/home/agent/.local/bin"])
        assert [path.name for path in (layer / "upper/home/agent").iterdir()] == ["kept"]


async def test_files_that_could_not_be_deleted_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalRuntime(root=tmp_path) as runtime:
        real, tries = runtime._fork_server.remove, list[list[str]]()

        async def short(paths: list[str], groups: tuple[str, ...] = ()) -> bool:
            tries.append(paths)
            if len(tries) <= 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return await real(paths, groups)

        monkeypatch.setattr(runtime._fork_server, "remove", short)
        for remaining in (1, 2, 1):  # the third deletes its own files and those of one other
            async with started(runtime, SPEC):
                pass
            assert len(sandbox_folders(tmp_path)) == remaining
    assert sandbox_folders(tmp_path) == [], "close deletes the rest"


async def test_a_lease_does_not_expire_while_the_process_is_suspended(tmp_path: Path) -> None:
    async with LocalRuntime(root=tmp_path) as runtime:
        sandbox = await runtime.start(SPEC, lease_s=0.5)
        time.sleep(2.0)
        await asyncio.sleep(0.1)
        assert sandbox.end is None and (await sandbox.exec("echo ok", timeout_s=20.0)).stdout == b"ok\n"
        await sandbox.kill()
