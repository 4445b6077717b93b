"""Attacks on what a machine has only so much of: processes, memory, disk, and the server's attention.

Each case shows that the limit works: the attack is refused, or its process is killed, or its sandbox ends with the
limit's own reason. Where `limits_in_force` says "none" there is nothing more to show than that it says so.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal

from rollyard.core.failure import PolicyFailure
from rollyard.sandbox.base import ExecResult, Runtime, Sandbox
from rollyard.testing.sandbox_conformance import alive, marked
from tests.sandbox.hostile.cases import (
    LIMIT_BYTES,
    LIMIT_FILES,
    LIMIT_PROCESSES,
    LONG_S,
    answers,
    hostile,
    limited,
    lives_or_was_ended_by_its_owner,
    python,
    script_output,
    started,
)

MOST_BYTES = 4 * LIMIT_BYTES

# --- processes ----------------------------------------------------------------------------------------

_FORK_BOMB = """
import os, sys, time
made = 0
try:
    while made < 256:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except OSError:
    print(made)
    sys.exit(0)
print("all", flush=True)
time.sleep(60)
"""


@hostile
async def a_fork_bomb(runtime: Runtime) -> None:
    """The process limit: no more processes than allowed, or the sandbox ends by it; the neighbours feel nothing."""
    mark = marked()
    async with started(runtime, limited(processes=True)) as sandbox, started(runtime) as neighbour:
        if sandbox.limits_in_force["processes"] == "none":
            return
        result = await _attempt(sandbox, "processes", _FORK_BOMB, mark)
        assert result is None or int(result.stdout) <= LIMIT_PROCESSES, result
        await answers(neighbour)
        await lives_or_was_ended_by_its_owner(sandbox)
    assert not alive(mark)


_CHAIN = """
import os, time
end = time.monotonic() + 30
for _ in range(4):
    if os.fork() == 0:
        os.write(60, b".")
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
        os._exit(0)
"""


@hostile
async def processes_that_are_gone_before_they_are_seen(runtime: Runtime) -> None:
    """Kill ends a PID namespace, not the processes that a look has found: each of these lives for a moment only. The
    pipe that they all hold says when the last one is gone."""
    (reader, writer), null = os.pipe(), os.open(os.devnull, os.O_RDWR)
    try:
        async with started(runtime, limited(processes=True)) as sandbox:
            process = await sandbox.spawn(["python3", "-c", _CHAIN], fds={0: null, 1: null, 2: null, 60: writer})
            assert await process.wait() == 0
            os.close(writer)
            for _ in range(4):
                assert await asyncio.to_thread(os.read, reader, 1) == b"."
        os.set_blocking(reader, False)
        assert os.read(reader, 1) == b""  # BlockingIOError: one lives
    finally:
        os.close(reader)
        os.close(null)


# --- memory -------------------------------------------------------------------------------------------

_HEAP = """
import sys, time
held = []
while len(held) < int(sys.argv[1]) >> 20:
    held.append(bytearray(b"x") * (1 << 20))
print("held", flush=True)
time.sleep(60)
"""

_MANY = """
import os, sys, time
children = []
for _ in range(16):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        held = bytearray(b"x") * (int(sys.argv[1]) // 16)
        os.write(writer, b".")
        time.sleep(60)
        os._exit(0)
    os.close(writer)
    children.append((pid, reader))
for pid, reader in children:
    if os.read(reader, 1) != b".":
        print("refused")
        sys.exit(0)
print("held", flush=True)
while True:
    _, status = os.wait()
    if os.WIFSIGNALED(status):
        print("refused")
        sys.exit(0)
"""

_PLACES = """
for line in open("/proc/mounts"):
    _, at, kind, options, *_ = line.split()
    if kind in ("tmpfs", "ramfs") and options.split(",")[0] == "rw":
        print(at)
"""

_TMPFS = """
import os, sys, time
wrote, most, place = 0, int(sys.argv[1]), sys.argv[2]
try:
    with open(os.path.join(place, "fill") if os.path.isdir(place) else place, "wb", buffering=0) as file:
        while wrote < most:
            wrote += file.write(b"x" * (1 << 20))
except OSError:
    print("refused", wrote)
    sys.exit(0)
print("held", flush=True)
time.sleep(60)
"""

_MEMFD = """
import os, sys, time
try:
    file = os.memfd_create("fill")
    for _ in range(int(sys.argv[1]) >> 20):
        os.write(file, b"x" * (1 << 20))
except OSError:
    print("refused")
    sys.exit(0)
print("held", flush=True)
time.sleep(60)
"""


@hostile
async def memory_by_one_heap(runtime: Runtime) -> None:
    """The memory limit, against the plainest use of it."""
    await _memory(runtime, _HEAP)


@hostile
async def memory_by_many_processes(runtime: Runtime) -> None:
    """The memory limit is the sandbox's, not each process's: RLIMIT_AS would let sixteen have it sixteen times."""
    await _memory(runtime, _MANY)


@hostile
async def memory_by_tmpfs(runtime: Runtime) -> None:
    """Files in memory count, wherever one can be written: no process has them, and a tmpfs may take half of the
    machine unless it is given a size."""
    async with started(runtime) as sandbox:
        places = (await script_output(sandbox, _PLACES)).split()
    for place in places:
        await _memory(runtime, _TMPFS, place)


@hostile
async def memory_by_memfd(runtime: Runtime) -> None:
    """A memfd is memory that no RSS and no mount shows: it is counted by the kernel, or refused by seccomp."""
    await _memory(runtime, _MEMFD)


async def _memory(runtime: Runtime, script: str, *arguments: str) -> None:
    async with started(runtime, limited(memory=True)) as sandbox, started(runtime) as neighbour:
        if sandbox.limits_in_force["memory"] == "none":
            return
        result = await _attempt(sandbox, "memory", script, str(MOST_BYTES), *arguments)
        if result is not None and result.status != -signal.SIGKILL:
            word, *wrote = result.stdout.split()
            assert word == b"refused" and (not wrote or int(wrote[0]) <= LIMIT_BYTES), result
        await answers(neighbour)
        await lives_or_was_ended_by_its_owner(sandbox)


# --- disk ---------------------------------------------------------------------------------------------

_FILL = """
import sys, time
wrote, most, files = 0, int(sys.argv[1]), [open("fill", "wb", buffering=0)]
try:
    files.append(open("/var/fill", "wb", buffering=0))
except OSError:
    pass  # without an image there is no other place
try:
    while wrote < most:
        wrote += files[(wrote >> 20) % len(files)].write(b"x" * (1 << 20))
except OSError:
    print("refused", wrote)
    sys.exit(0)
print("held", flush=True)
time.sleep(60)
"""

_MANY_FILES = """
import os, sys, time
try:
    for n in range(int(sys.argv[1]) >> 15):
        with open(f"fill{n}", "wb", buffering=0) as file:
            file.write(b"x" * (1 << 15))
except OSError:
    print("refused", n << 15)
    sys.exit(0)
print("held", flush=True)
time.sleep(60)
"""


@hostile
async def a_full_disk_by_one_file(runtime: Runtime) -> None:
    """The disk limit, over all of a sandbox's files: the layer over its image and its workspace."""
    await _disk(runtime, _FILL)


@hostile
async def a_full_disk_by_many_files(runtime: Runtime) -> None:
    """The disk limit is a sum: RLIMIT_FSIZE, which bounds each file, would not see this."""
    await _disk(runtime, _MANY_FILES)


async def _disk(runtime: Runtime, script: str) -> None:
    async with started(runtime, limited(disk=True)) as sandbox, started(runtime) as neighbour:
        if sandbox.limits_in_force["disk"] == "none":
            return
        result = await _attempt(sandbox, "disk", script, str(MOST_BYTES))
        if result is not None:
            word, wrote = result.stdout.split()
            assert word == b"refused" and int(wrote) <= LIMIT_BYTES, result
        await neighbour.write("mine", b"there is room")
        await lives_or_was_ended_by_its_owner(sandbox)


_EMPTY_FILES = """
import os, sys, time
for number in range(int(sys.argv[1])):
    if number % 2:
        open(f"f{number}", "w").close()
    else:
        os.mkdir(f"d{number}")
print("made", flush=True)
time.sleep(60)
"""


@hostile
async def inodes_by_empty_files_and_folders(runtime: Runtime) -> None:
    """The limit of files: they take no bytes, and a file system has so many inodes for everybody."""
    async with started(runtime, limited(files=True)) as sandbox, started(runtime) as neighbour:
        if sandbox.limits_in_force["files"] == "none":
            return
        assert await _attempt(sandbox, "files", _EMPTY_FILES, str(4 * LIMIT_FILES)) is None
        await neighbour.write("mine", b"there is an inode")


async def _attempt(sandbox: Sandbox, limit: str, script: str, *arguments: str) -> ExecResult | None:
    """What the attack came to; None where it ended its sandbox, for that reason."""
    try:
        result = await python(sandbox, script, *arguments, timeout_s=LONG_S)
    except PolicyFailure:
        async with asyncio.timeout(LONG_S):
            end = await sandbox.ended()
        assert end.reason == limit, end
        return None
    assert not result.is_timed_out, f"nothing kept it from four times its {limit}"
    return result


# --- the server's attention ---------------------------------------------------------------------------


@hostile
async def a_gigabyte_on_stdout(runtime: Runtime) -> None:
    """Output is capped as it comes, and what was cut is counted: the server never holds it."""
    async with started(runtime) as sandbox:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        command = "head -c 1000000000 /dev/zero; head -c 1000 /dev/zero >&2"
        result = await sandbox.exec(command, timeout_s=LONG_S, output_bytes=1000)
        assert len(result.stdout) <= 1000 and len(result.stderr) <= 1000
        assert result.is_timed_out or result.dropped_bytes >= 999_999_000, result.dropped_bytes
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # in KiB
        await answers(sandbox)


@hostile
async def a_command_line_of_a_megabyte(runtime: Runtime) -> None:
    """What the kernel refuses (one argument ends at 128 KiB) is an answer about that command, and no more."""
    async with started(runtime) as sandbox:
        word = "x" * (1 << 20)
        for command in (f"printf %s {word} | wc -c", ["printf", "%s", word]):
            result = await sandbox.exec(command, timeout_s=LONG_S)
            assert (result.status == 0 and result.stdout in (b"1048576\n", word.encode())) or (
                result.status in (126, 127) and b"too long" in result.stderr
            ), (result.status, result.stderr[:200])
        many = await sandbox.exec(["sh", "-c", "echo $#", "sh", *["y" * 1000] * 1000], timeout_s=LONG_S)
        assert many.stdout == b"1000\n", many
        await answers(sandbox)
