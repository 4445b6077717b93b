"""Conformance checks for sandbox runtimes: run them against your own.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
    async def test_conformance(check, runtime):
        await check.run(runtime)

A check takes an open runtime and leaves nothing behind; all checks may share one runtime. It raises AssertionError, or
the runtime's own error. A check with `needs_isolation` is for runtimes with `is_isolated`. `decided_by` is the part of
a runtime that can change the outcome. Two checks start a second process, which creates a runtime of the same kind by
`type(runtime)(root=FOLDER)`. Commands use file names relative to their directory: a runtime without mounts has no
/workspace. No check names an image: for a runtime that needs one, pass a subclass whose `start` fills it in. The file
is long because it is one list of short checks.
"""

# Blocking calls are acceptable here: they access small files of the host.
# ruff: noqa: ASYNC220, ASYNC240

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from rollyard.core.failure import SandboxEndedByPolicy, SandboxLost
from rollyard.sandbox.base import WORKDIR, Runtime, Sandbox, SandboxSpec

SECONDS = 20.0
"""The limit for everything that should be quick."""
LOOKS = 300


class RuntimePart(IntEnum):
    """The part of a runtime that decides a check. A runtime that shares a part with another conforming runtime needs
    only the checks that are decided by later parts."""

    LAUNCHER = 1  # exec, spawn and leases: the launcher, shared by all runtimes of this package
    PROGRAM = 2  # creates namespaces and enters the root: bubblewrap, Apptainer, a container engine, nothing
    ROOT = 3  # the content of the root: the host's /usr, an image's folder, a SIF file


@dataclass(frozen=True, slots=True)
class SandboxCheck:
    """One requirement of a runtime. `run` raises if it is not met."""

    name: str
    run: Callable[[Runtime], Awaitable[None]]
    decided_by: RuntimePart
    needs_isolation: bool = False


CHECKS: list[SandboxCheck] = []

Function = Callable[[Runtime], Awaitable[None]]


def check(decided_by: RuntimePart, *, needs_isolation: bool = False) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        CHECKS.append(SandboxCheck(function.__name__, function, decided_by, needs_isolation))
        return function

    return register


def isolated(decided_by: RuntimePart) -> Callable[[Function], Function]:
    return check(decided_by, needs_isolation=True)


@asynccontextmanager
async def started(runtime: Runtime, spec: SandboxSpec | None = None) -> AsyncGenerator[Sandbox, None]:
    sandbox = await runtime.start(spec or SandboxSpec(owner="conformance"), lease_s=60.0)
    try:
        yield sandbox
    finally:
        await sandbox.kill()


async def output(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.exec(command, timeout_s=SECONDS)
    assert result.status == 0, result
    return result.stdout.decode()


def marked() -> str:
    """Returns a unique number of seconds to sleep, by which a process can be found."""
    return f"{1_000_000 + int.from_bytes(os.urandom(4), 'big')}"


def alive(mark: str) -> list[int]:
    """Returns the live processes of this machine with that word in their command line; zombies do not count."""
    pids: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if mark.encode() in (entry / "cmdline").read_bytes().split(b"\0") and state not in "ZX":
                pids.append(int(entry.name))
    return pids


async def eventually(happened: Callable[[], bool], what: str, details: Callable[[], object] | None = None) -> None:
    """Polls until `happened`. Fails only after SECONDS and at least LOOKS polls, because on a stalled machine nothing
    had time to end. `details` returns what still exists, for the error message."""
    until, looks = time.monotonic() + SECONDS, 0
    while not happened():
        looks += 1
        if looks >= LOOKS and time.monotonic() >= until:
            raise AssertionError(f"{what}: {details()}" if details is not None else what)
        await asyncio.sleep(0.01)


# --- exec ---------------------------------------------------------------------------------------------


@check(RuntimePart.ROOT)
async def exec_returns_status_and_streams(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        result = await sandbox.exec("echo out; echo err >&2; exit 7", timeout_s=SECONDS)
        assert (result.status, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
        assert (await sandbox.exec("kill -TERM $$", timeout_s=SECONDS)).status == -signal.SIGTERM
        assert (await sandbox.exec(["printf", "%s", "a b"], timeout_s=SECONDS)).stdout == b"a b"
        assert (await sandbox.exec(["no-such-program"], timeout_s=SECONDS)).status == 127


@check(RuntimePart.LAUNCHER)
async def output_may_be_binary(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        result = await sandbox.exec(r"printf '\377\376\000x'", timeout_s=SECONDS)
        assert result.stdout == b"\xff\xfe\x00x"
        name = os.fsdecode(b"\xff\xfe")
        await sandbox.write(name, b"odd name")
        assert await sandbox.read(name, limit_bytes=100) == b"odd name"


@check(RuntimePart.LAUNCHER)
async def the_working_directory_may_be_relative(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        await sandbox.exec("mkdir -p a/b", timeout_s=SECONDS)
        result = await sandbox.exec("pwd", timeout_s=SECONDS, cwd="a/b")
        assert result.stdout.strip().endswith(b"/a/b")
        missing = await sandbox.exec("true", timeout_s=SECONDS, cwd="nowhere")
        assert missing.status == 126 and b"nowhere" in missing.stderr


@check(RuntimePart.ROOT)
async def the_environment_holds_only_what_was_set(runtime: Runtime) -> None:
    os.environ["ROLLYARD_CONFORMANCE"] = "leaked"
    try:
        async with started(runtime, SandboxSpec(env={"FROM_SPEC": "1"})) as sandbox:
            result = await sandbox.exec(["env"], timeout_s=SECONDS, env={"FROM_CALL": "2"})
            names = {line.partition(b"=")[0] for line in result.stdout.splitlines()}
            assert {b"FROM_SPEC", b"FROM_CALL", b"PATH", b"HOME"} <= names
            extra = names - {b"PATH", b"HOME", b"USER", b"LANG", b"TMPDIR", b"PWD", b"FROM_SPEC", b"FROM_CALL"}
            assert not extra, extra
    finally:
        del os.environ["ROLLYARD_CONFORMANCE"]


@check(RuntimePart.PROGRAM)
async def a_timeout_kills_every_process_of_the_command(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        mark = marked()
        command = f"setsid sleep {mark} & (sleep {mark} &) ; echo started; sleep {mark}"
        for timeout_s in (0.5, 5.0, SECONDS):  # on a busy machine the command may not have started in time
            result = await sandbox.exec(command, timeout_s=timeout_s)
            assert result.is_timed_out and result.status == -signal.SIGKILL
            await eventually(lambda: not alive(mark), "its processes are gone")  # a killed one may still be exiting
            if result.stdout == b"started\n":
                break
        else:
            raise AssertionError("the command did not start")
        assert await output(sandbox, "echo still here") == "still here\n"


@check(RuntimePart.LAUNCHER)
async def a_cancelled_exec_kills_its_command(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        mark = marked()
        task = asyncio.ensure_future(sandbox.exec(["sleep", mark], timeout_s=SECONDS))
        await eventually(lambda: bool(alive(mark)), "the command runs")
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await eventually(lambda: not alive(mark), "the command is gone")


@check(RuntimePart.LAUNCHER)
async def a_background_process_does_not_block_exec(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        mark = marked()
        result = await sandbox.exec(f"sleep {mark} & echo done", timeout_s=SECONDS)
        assert (result.status, result.stdout, result.is_timed_out) == (0, b"done\n", False)
        await eventually(lambda: bool(alive(mark)), "it continues to run")


@check(RuntimePart.LAUNCHER)
async def output_is_capped_and_the_excess_counted(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        result = await sandbox.exec("head -c 3000000 /dev/zero", timeout_s=SECONDS, output_bytes=1000)
        assert result.status == 0 and len(result.stdout) == 1000 and result.dropped_bytes == 2_999_000


@check(RuntimePart.LAUNCHER)
async def stdin_is_sent_and_closed(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        assert (await sandbox.exec("cat", timeout_s=SECONDS, stdin=b"a\0b")).stdout == b"a\0b"
        assert (await sandbox.exec("cat", timeout_s=SECONDS)).stdout == b""
        big = os.urandom(1 << 20) * 8
        result = await sandbox.exec("wc -c", timeout_s=SECONDS, stdin=big)
        assert int(result.stdout) == len(big)
        assert (await sandbox.exec("true", timeout_s=SECONDS, stdin=big)).status == 0  # its input is not read


@check(RuntimePart.LAUNCHER)
async def long_commands_and_environments_are_passed_whole(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        text = "x" * 100_000
        result = await sandbox.exec(f"printf %s {text} | wc -c", timeout_s=SECONDS, env={"LONG": text})
        assert int(result.stdout) == len(text)


@check(RuntimePart.LAUNCHER)
async def many_commands_run_concurrently(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        results = await asyncio.gather(*[sandbox.exec(["echo", str(n)], timeout_s=SECONDS) for n in range(30)])
        assert [int(result.stdout) for result in results] == list(range(30))


@check(RuntimePart.PROGRAM)
async def no_descriptor_of_the_host_is_inherited(runtime: Runtime) -> None:
    with tempfile.TemporaryFile() as secret:
        os.set_inheritable(secret.fileno(), True)
        async with started(runtime) as sandbox:
            listed = await output(sandbox, "exec ls /proc/self/fd")
            assert set(listed.split()) == {"0", "1", "2", "3"}, listed  # 3 is the folder that ls reads


# --- spawn --------------------------------------------------------------------------------------------


@check(RuntimePart.PROGRAM)
async def spawn_passes_exactly_the_named_descriptors(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        (reader, writer), (side, side_in), null = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDWR)
        try:
            command = "ls /proc/self/fd; echo aside >&60; exit 4"
            process = await sandbox.spawn(["bash", "-c", command], fds={0: null, 1: writer, 2: null, 60: side_in})
            os.close(writer)
            os.close(side_in)
            assert await process.wait() == 4 and await process.wait() == 4
            assert os.read(side, 100) == b"aside\n"
            assert set(os.read(reader, 1000).split()) == {b"0", b"1", b"2", b"3", b"60"}
        finally:
            for fd in (reader, side, null):
                os.close(fd)


@check(RuntimePart.PROGRAM)
async def spawn_can_allocate_a_terminal(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        master, slave = os.openpty()
        try:
            command = "test -t 0 && echo $$ > /dev/tty; exec sleep 1000"
            fds = {0: slave, 1: slave, 2: slave}
            process = await sandbox.spawn(["sh", "-c", command], fds=fds, tty=slave)
            assert (await asyncio.to_thread(os.read, master, 100)).strip().isdigit()
            assert os.tcgetpgrp(master) == process.pid
            assert Path(f"/proc/{process.pid}/comm").exists()
            process.kill(signal.SIGTERM)
            assert await process.wait() == -signal.SIGTERM
            process.kill()  # has no effect
        finally:
            os.close(master)
            os.close(slave)


# --- files --------------------------------------------------------------------------------------------


@check(RuntimePart.ROOT)
async def fifty_mebibytes_are_copied_in_and_out_unchanged(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        data = os.urandom(1 << 20) * 50
        await sandbox.write("deep/down/big.bin", data, mode=0o600)
        assert await sandbox.read("deep/down/big.bin", limit_bytes=len(data)) == data
        assert await output(sandbox, "stat -c '%s %a' deep/down/big.bin") == f"{len(data)} 600\n"


@check(RuntimePart.ROOT)
async def missing_and_special_files_are_errors(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        await sandbox.exec(
            "mkdir d; mkfifo f; truncate -s 1T s; ln -s loop loop; echo x > r; ln -s r l", timeout_s=SECONDS
        )
        expected: dict[str, type[Exception]] = {
            "nothing": FileNotFoundError,
            "d": IsADirectoryError,
            "f": ValueError,
            "s": ValueError,
            "loop": ValueError,
        }
        for name, kind in expected.items():
            try:
                await sandbox.read(name, limit_bytes=1 << 20)
            except kind:
                continue
            raise AssertionError(f"reading {name} should raise {kind.__name__}")
        assert await sandbox.read("l", limit_bytes=2) == b"x\n"  # a link is followed, within the sandbox
        try:
            await sandbox.read("r", limit_bytes=1)
        except ValueError:
            pass
        else:
            raise AssertionError("a file above the limit was read")
        with contextlib.suppress(IsADirectoryError):
            await sandbox.write("d", b"")
            raise AssertionError("a folder was overwritten")
        await sandbox.write("f", b"a file now")  # the FIFO is replaced, not written to
        assert await output(sandbox, "cat f") == "a file now"


@check(RuntimePart.ROOT)
async def folders_are_copied_in_and_out(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        with tempfile.TemporaryDirectory() as name:
            source, target = Path(name, "source"), Path(name, "target")
            (source / "sub").mkdir(parents=True)
            (source / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
            (source / "sub" / "run.sh").chmod(0o755)
            (source / "link").symlink_to("sub/run.sh")
            await sandbox.upload(source, "tree")
            await sandbox.upload(source / "sub" / "run.sh", "one.sh")
            assert await output(sandbox, "./tree/link && ./one.sh") == "ran\nran\n"
            await sandbox.exec("mkfifo tree/fifo; mkdir tree/empty", timeout_s=SECONDS)
            assert await sandbox.download("tree", target, limit_bytes=1 << 20) == "tar"
            with tarfile.open(target) as archive:
                names = {member.name for member in archive}
                assert names == {"sub", "sub/run.sh", "link", "empty"}, names
                assert archive.getmember("sub/run.sh").mode == 0o755
            await sandbox.exec("mkdir -p again/old sub; echo x > again/old/f; ln -s ../sub again/l", timeout_s=SECONDS)
            await sandbox.exec("echo kept > sub/f; mkdir again/link; touch again/link/f", timeout_s=SECONDS)
            await sandbox.unpack(target, "again", is_replaced=True)
            assert await output(sandbox, "./again/link") == "ran\n"
            assert await output(sandbox, "ls again; cat sub/f") == "empty\nlink\nsub\nkept\n", "it is replaced"
            assert await sandbox.download("one.sh", target, limit_bytes=1 << 20) == "file"
            assert target.read_text() == "#!/bin/sh\necho ran\n"
            for path in ("tree", "one.sh"):
                with contextlib.suppress(ValueError):
                    await sandbox.download(path, target, limit_bytes=5)
                    raise AssertionError("the limit was exceeded")
            assert sorted(entry.name for entry in Path(name).iterdir()) == ["source", "target"]


@check(RuntimePart.ROOT)
async def no_mode_of_a_folder_prevents_copying_it_out(runtime: Runtime) -> None:
    """A deep, unreadable or odd folder is downloaded as is, or refused. An OSError would look like a host failure."""
    async with started(runtime) as sandbox:
        deep = "import os\nfor _ in range(1200):\n os.mkdir('d'); os.chdir('d')"
        assert (await sandbox.exec(["python3", "-c", deep], timeout_s=SECONDS)).status == 0
        script = (
            "mkdir -p no/way; echo x > no/way/f; echo y > secret; chmod 0 secret no/way; chmod 400 no; ln -s secret l"
        )
        assert (await sandbox.exec(script, timeout_s=SECONDS)).status == 0
        await sandbox.exec("touch -d @99999999999999 later; chmod 0 .", timeout_s=SECONDS)
        with tempfile.TemporaryDirectory() as name:
            target = Path(name, "target")
            assert await sandbox.download(WORKDIR, target, limit_bytes=16 << 20) == "tar"
            with tarfile.open(target) as archive:
                assert archive.getmember("/".join("d" * 1200)).isdir()
                assert archive.getmember("secret").mode == 0 and archive.getmember("no/way").mode == 0
            async with started(runtime) as other:
                await other.unpack(target, ".")
                assert await output(other, "cat no/way/f; stat -c %a secret") == "x\n0\n"
                assert await other.read("secret", limit_bytes=10) == b"y\n"
                assert await output(other, "stat -c %a secret") == "0\n"


@check(RuntimePart.PROGRAM)
async def a_folder_deeper_than_the_path_limit_is_refused(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        deep = "import os\nfor _ in range(50):\n os.mkdir('d' * 200); os.chdir('d' * 200)"
        assert (await sandbox.exec(["python3", "-c", deep], timeout_s=SECONDS)).status == 0
        await sandbox.write("plain", b"")
        with tempfile.TemporaryDirectory() as name:
            for path in (".", "plain/below"):  # the second: a file in place of a folder
                with contextlib.suppress(ValueError):
                    await sandbox.download(path, Path(name, "target"), limit_bytes=16 << 20)
                    raise AssertionError(f"{path} was not refused")
            assert not list(Path(name).iterdir())


@isolated(RuntimePart.PROGRAM)
async def each_sandbox_has_its_own_namespaces(runtime: Runtime) -> None:
    kinds = ("user", "mnt", "pid", "ipc", "uts", "net")
    command = "; ".join(f"readlink /proc/self/ns/{kind}" for kind in kinds)
    async with started(runtime) as one, started(runtime) as two:
        namespaces = [(await output(sandbox, command)).split() for sandbox in (one, two)]
        namespaces.append([str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in kinds])
        for kind, *ids in zip(kinds, *namespaces, strict=True):
            assert len(set(ids)) == 3, (kind, ids)


@isolated(RuntimePart.ROOT)
async def kernel_settings_cannot_be_changed(runtime: Runtime) -> None:
    """They apply to the whole machine: if the service runs as root, a sandbox could set core_pattern and run anything
    as root. Only permissions are checked: where the check fails, a write would succeed."""
    async with started(runtime) as sandbox:
        command = (
            "find /proc -maxdepth 1 -type f -writable -exec test -f {} ';' -print; find /proc/sys -type f -writable"
        )
        result = await sandbox.exec(command, timeout_s=SECONDS)
        assert not result.stdout, result.stdout[:500]


@isolated(RuntimePart.ROOT)
async def links_do_not_lead_out_of_the_sandbox(runtime: Runtime) -> None:
    with tempfile.TemporaryDirectory() as name:
        secret = Path(name, "secret")
        secret.write_text("the host's")
        async with started(runtime) as sandbox:
            await sandbox.exec(["ln", "-s", str(secret), "way"], timeout_s=SECONDS)
            await sandbox.exec(["ln", "-s", name, "door"], timeout_s=SECONDS)
            for path in ("way", "door/secret", "/proc/1/root" + str(secret), str(secret)):
                try:
                    got = await sandbox.read(path, limit_bytes=1000)
                except (OSError, ValueError):
                    continue
                raise AssertionError(f"{path} gave {got!r}")
            with contextlib.suppress(OSError):
                await sandbox.write("door/planted", b"x")
            assert [entry.name for entry in Path(name).iterdir()] == ["secret"]


# --- lifetime -----------------------------------------------------------------------------------------


@check(RuntimePart.ROOT)
async def kill_returns_when_every_process_has_ended(runtime: Runtime) -> None:
    mark = marked()
    sandbox = await runtime.start(SandboxSpec(), lease_s=60.0)
    await sandbox.exec(f"setsid sleep {mark} </dev/null >/dev/null 2>&1 & trap '' TERM HUP; sleep 0", timeout_s=SECONDS)
    await eventually(lambda: bool(alive(mark)), "the daemon runs")
    control = sandbox.control_dir
    await asyncio.gather(sandbox.kill(), sandbox.kill())
    assert not alive(mark)
    await sandbox.kill()
    assert sandbox.end is not None and sandbox.end.reason == "killed"
    assert (await sandbox.ended()).reason == "killed"
    assert not control.exists()
    try:
        await sandbox.exec("true", timeout_s=1.0)
    except SandboxLost:
        return
    raise AssertionError("a killed sandbox ran a command")


@check(RuntimePart.PROGRAM)
async def a_running_command_fails_when_the_sandbox_is_killed(runtime: Runtime) -> None:
    sandbox = await runtime.start(SandboxSpec(), lease_s=60.0)
    mark = marked()
    task = asyncio.ensure_future(sandbox.exec(["sleep", mark], timeout_s=SECONDS))
    await eventually(lambda: bool(alive(mark)), "the command runs")
    await sandbox.kill()
    await asyncio.wait([task], timeout=SECONDS)
    assert isinstance(task.exception(), SandboxLost)


@check(RuntimePart.LAUNCHER)
async def an_expired_lease_ends_the_sandbox(runtime: Runtime) -> None:
    renewed = await runtime.start(SandboxSpec(), lease_s=0.2)
    renewed.renew(60.0)
    expired = await runtime.start(SandboxSpec(), lease_s=0.2)
    async with asyncio.timeout(3 * SECONDS):  # a runtime whose loop was late grants 30 s more
        assert (await expired.ended()).reason == "lease"
    assert renewed.end is None
    await renewed.kill()
    await expired.kill()


@isolated(RuntimePart.PROGRAM)
async def killing_every_process_inside_ends_only_that_sandbox(runtime: Runtime) -> None:
    """If the init process can be killed from inside, the sandbox ends with the reason `ended_inside`."""
    async with started(runtime) as sandbox:
        with contextlib.suppress(SandboxEndedByPolicy):
            await sandbox.exec("kill -9 -1", timeout_s=SECONDS)
            after = await sandbox.exec("echo it lives", timeout_s=SECONDS)
            if after.status == 0:
                return
            assert after.status == -signal.SIGKILL, after  # started while the init process was ending
        async with asyncio.timeout(SECONDS):
            assert (await sandbox.ended()).reason == "ended_inside"
        try:
            await sandbox.exec("true", timeout_s=1.0)
        except SandboxEndedByPolicy:
            return
    raise AssertionError("an ended sandbox ran a command")


@check(RuntimePart.ROOT)
async def a_cancelled_start_leaves_nothing(runtime: Runtime) -> None:
    before = _descendants()
    for delay_s in (0.0, 0.001, 0.003, 0.006, 0.01, 0.02):
        task = asyncio.ensure_future(runtime.start(SandboxSpec(), lease_s=60.0))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().kill()
    # The launcher itself may be new, and its helpers take a moment to exit.
    await eventually(lambda: len(_descendants() - before) <= 1, "cancelled starts leave no process")


def _descendants() -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                parents[int(entry.name)] = int(fields[1])
    descendants: set[int] = set()
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        descendants |= level
    return descendants


_SERVER = """
import asyncio, importlib, sys
from pathlib import Path
from rollyard.sandbox.base import SandboxSpec
async def main(module, name, root, mark):
    runtime = getattr(importlib.import_module(module), name)(root=Path(root))
    async with runtime:
        sandboxes = await asyncio.gather(*[runtime.start(SandboxSpec(), lease_s=600.0) for _ in range(3)])
        for sandbox in sandboxes:
            await sandbox.exec(f"setsid sleep {mark} </dev/null >/dev/null 2>&1 & sleep 0", timeout_s=10.0)
        print("up", flush=True)
        await asyncio.gather(*[sandbox.exec(["sleep", mark], timeout_s=600.0) for sandbox in sandboxes])
asyncio.run(main(*sys.argv[1:]))
"""


@check(RuntimePart.ROOT)
async def sandboxes_end_with_their_server_and_the_next_one_removes_leftovers(runtime: Runtime) -> None:
    kind, mark = type(runtime), marked()
    with tempfile.TemporaryDirectory() as root:
        argv = [sys.executable, "-c", _SERVER, kind.__module__, kind.__name__, root, mark]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            try:
                assert await asyncio.to_thread(server.stdout.readline) == b"up\n"
                # more than the server, which has the mark in its arguments; background commands start a little later
                await eventually(lambda: len(alive(mark)) > 3, "each sandbox runs something")
            finally:
                server.kill()
                server.wait()
        await eventually(lambda: not alive(mark), "a killed server's sandboxes leave no process")
        async with kind(root=Path(root)) as successor:  # type: ignore[call-arg]
            leftovers = [entry.name for entry in Path(root).glob("sbx_*")]
            assert not leftovers, leftovers
            async with started(successor) as sandbox:
                assert await output(sandbox, "echo ok") == "ok\n"


# --- layers and the doorway ---------------------------------------------------------------------------


@check(RuntimePart.ROOT)
async def forks_of_a_frozen_layer_do_not_change_it(runtime: Runtime) -> None:
    layer = runtime.layer_root / marked()
    sandbox = await runtime.start(SandboxSpec(), lease_s=60.0)
    mark = marked()
    await sandbox.exec(
        f"echo base > file; mkdir gone kept; echo x > gone/x; sleep {mark} >/dev/null 2>&1 &", timeout_s=5
    )
    await sandbox.freeze(layer)
    assert not alive(mark) and sandbox.end is not None and sandbox.end.reason == "killed"
    try:
        for number in range(2):
            async with started(runtime, SandboxSpec(layers=(layer,))) as fork:
                assert await output(fork, "cat file gone/x; ls") == "base\nx\nfile\ngone\nkept\n"
                await output(fork, f"echo {number} >> file; rm -r gone; mkdir gone; ls gone; cat file")
                assert await output(fork, "ls gone; cat file") == f"base\n{number}\n"
    finally:
        assert await runtime.remove([layer])
    assert not layer.exists()


@check(RuntimePart.PROGRAM)
async def layers_are_stored_below_the_runtimes_folder(runtime: Runtime) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        sandbox = await runtime.start(SandboxSpec(), lease_s=60.0)
        try:
            await sandbox.freeze(Path(elsewhere, "layer"))
        except ValueError:
            assert sandbox.end is not None
            return
    raise AssertionError("a layer was created outside")


_ASK = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1] + "/who", timeout=10).read().decode())
"""


@check(RuntimePart.PROGRAM)
async def each_doorway_reaches_its_own_application(runtime: Runtime) -> None:
    async def serve(sandbox: Sandbox, name: str) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": f"{name} {scope['path']}".encode()})

        assert sandbox.doorway is not None
        await sandbox.doorway.serve(app)

    async def ask(sandbox: Sandbox) -> bytes:
        assert sandbox.doorway is not None
        return (await sandbox.exec(["python3", "-c", _ASK, sandbox.doorway.url], timeout_s=SECONDS)).stdout

    spec = SandboxSpec(has_doorway=True)
    async with started(runtime, spec) as one, started(runtime, spec) as two, started(runtime) as none:
        assert none.doorway is None
        await serve(one, "one")
        await serve(two, "two")
        assert await asyncio.gather(ask(one), ask(two)) == [b"one /who\n", b"two /who\n"]


# --- isolation ----------------------------------------------------------------------------------------


@isolated(RuntimePart.ROOT)
async def the_control_folder_cannot_be_written_inside(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        (sandbox.control_dir / "command").write_text("echo")
        path = sandbox.control_path
        assert await output(sandbox, f"cat {path}/command") == "echo"
        result = await sandbox.exec(
            f"echo x > {path}/command; echo x > {path}/new; chmod 777 {path}", timeout_s=SECONDS
        )
        assert result.status != 0
        assert [entry.name for entry in sandbox.control_dir.iterdir()] == ["command"]
        assert (sandbox.control_dir / "command").read_text() == "echo"


@isolated(RuntimePart.PROGRAM)
async def only_loopback_is_reachable(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        assert (await output(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1")).split() == ["lo"]
        script = "import socket; socket.create_connection(('192.0.2.1', 80), 2)"
        assert (await sandbox.exec(["python3", "-c", script], timeout_s=SECONDS)).status != 0
        script = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
        assert (await sandbox.exec(["python3", "-c", script], timeout_s=SECONDS)).status == 0


@isolated(RuntimePart.ROOT)
async def host_and_other_sandboxes_are_invisible(runtime: Runtime) -> None:
    with tempfile.NamedTemporaryFile(prefix="host-secret-") as secret:
        async with started(runtime) as sandbox, started(runtime) as other:
            await other.write("mine", b"not yours")
            places = _HOST_PLACES if sandbox.spec.image is None else ()  # an image has its own
            listing = await sandbox.exec(["ls", secret.name, *places, str(other.control_dir)], timeout_s=SECONDS)
            assert listing.stdout == b"", listing.stdout
            assert await output(sandbox, "ls -A") == ""
            assert str(os.getpid()) not in (await output(sandbox, "ls /proc")).split() or os.getpid() < 20
            commands = await output(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; cat /proc/[0-9]*/environ; true")
            assert sys.executable not in commands and "pytest" not in commands, commands
            assert str(sandbox.control_dir) not in commands


_HOST_PLACES = ("/root", "/home/runner", "/etc/shadow", "/etc/ssh", "/run/dbus", "/sys", "/var/lib", "/etc/ssl/private")


@isolated(RuntimePart.ROOT)
async def privileges_cannot_be_gained(runtime: Runtime) -> None:
    async with started(runtime) as sandbox:
        status = dict(line.split(":\t") for line in (await output(sandbox, "cat /proc/self/status")).splitlines())
        assert {status[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"
        for command in ("unshare -U true", "unshare -m true", "mount -t tmpfs x /tmp", "ip link set lo down"):
            assert (await sandbox.exec(command, timeout_s=SECONDS)).status != 0, command
        if sandbox.spec.image is None:  # an image is writable, privately
            assert (await sandbox.exec(["touch", "/usr/x"], timeout_s=SECONDS)).status != 0
