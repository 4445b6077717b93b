"""The resource monitor with real load: heap, many processes, tmpfs, one large file, many files, forks.

To test that nothing is reported, a second sandbox above its limit gives a signal: it is checked after the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from pathlib import Path

import pytest

from rollyard.sandbox.limits import disk_walk, monitor_program, usage
from rollyard.sandbox.limits.cgroups import Cgroups
from rollyard.sandbox.limits.monitor import MonitorClient

pytestmark = pytest.mark.slow

MIB = 1 << 20
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user or mount")


class MonitorReports:
    """The reports of the monitor, in order."""

    def __init__(self) -> None:
        self.limits: asyncio.Queue[tuple[str, str, str]] = asyncio.Queue()
        self.ooms: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.pressure: asyncio.Queue[tuple[bool, Mapping[str, int]]] = asyncio.Queue()

    def monitor(self, **reserves: object) -> MonitorClient:
        return MonitorClient(
            lambda *report: self.limits.put_nowait(report),
            lambda *report: self.ooms.put_nowait(report),
            lambda *report: self.pressure.put_nowait(report),
            **reserves,  # pyright: ignore[reportArgumentType]
        )

    async def limit(self) -> tuple[str, str]:
        async with asyncio.timeout(90):
            return (await self.limits.get())[:2]


@pytest.fixture
def reports() -> MonitorReports:
    return MonitorReports()


@pytest.fixture
async def monitor(reports: MonitorReports) -> AsyncGenerator[MonitorClient, None]:
    monitor = reports.monitor()
    yield monitor
    await monitor.close()


@pytest.fixture
def init_client() -> Generator[Callable[..., int], None, None]:
    """Starts an init process whose child has run `code` and stays. Returns its PID."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str, *, argv: tuple[str, ...] = (), **names: object) -> int:
        source = "import os, sys\ndef stay():\n  print(flush=True)\n  sys.stdin.read()\n" + code + "\nstay()"
        inner = [*argv, sys.executable, "-I", "-S", "-c", source, *map(str, names.values())]
        outer = "import subprocess, sys; subprocess.run(sys.argv[1:])"
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", outer, *inner],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        return process.pid

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


HEAP = "x = b'x' * (100 << 20)"


async def is_silent(reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int]) -> None:
    """Checks that nothing is reported of the existing watches, although all of them are checked."""
    monitor.watch("the sign", pid=init_client(HEAP), memory_bytes=16 * MIB)
    assert await reports.limit() == ("the sign", "memory")
    assert reports.limits.empty()


# --- memory -------------------------------------------------------------------------------------------


async def test_a_heap_above_the_limit_is_reported_once(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int]
):
    monitor.watch("a", pid=init_client(HEAP), memory_bytes=64 * MIB)
    assert await reports.limit() == ("a", "memory")
    await is_silent(reports, monitor, init_client)


async def test_memory_within_the_limit_is_not_reported(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int]
):
    monitor.watch("a", pid=init_client(HEAP), memory_bytes=200 * MIB)
    await is_silent(reports, monitor, init_client)


MANY = "for _ in range(8):\n  if os.fork() == 0:\n    x = b'x' * (20 << 20); stay(); os._exit(0)\n"


async def test_many_processes_are_counted_together(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int]
):
    monitor.watch("a", pid=init_client(MANY), memory_bytes=100 * MIB)
    assert await reports.limit() == ("a", "memory")


async def test_pages_that_forks_share_count_once(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int]
):
    code = HEAP + "\nfor _ in range(5):\n  if os.fork() == 0: stay(); os._exit(0)"
    monitor.watch("a", pid=init_client(code), memory_bytes=200 * MIB)
    await is_silent(reports, monitor, init_client)


SHARED = "import mmap\nm = mmap.mmap(-1, 100 << 20)\nfor i in range(0, len(m), 4096): m[i] = 1\n"
READ_IT = "for _ in range(3):\n  if os.fork() == 0: sum(m[i] for i in range(0, len(m), 4096)); stay(); os._exit(0)\n"


async def test_shared_anonymous_memory_counts_once(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int]
):
    pid = init_client(SHARED + READ_IT)
    monitor.watch("within", pid=pid, memory_bytes=200 * MIB)
    monitor.watch("beyond", pid=init_client(SHARED), memory_bytes=64 * MIB)
    assert await reports.limit() == ("beyond", "memory")
    await is_silent(reports, monitor, init_client)


TMPFS = (
    "import subprocess; subprocess.run(['mount', '-t', 'tmpfs', 'none', sys.argv[1]], check=True)\n"
    "open(sys.argv[1] + '/f', 'wb').write(b'x' * (100 << 20))"
)
OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")


async def test_a_private_tmpfs_counts_as_memory(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int], tmp_path: Path
):
    pid = init_client(TMPFS, argv=OWN_MOUNTS, at=tmp_path)
    monitor.watch("within", pid=pid, memory_bytes=200 * MIB, tmpfs_paths=[str(tmp_path)])
    monitor.watch("beyond", pid=pid, memory_bytes=64 * MIB, tmpfs_paths=["/missing", str(tmp_path)])
    assert await reports.limit() == ("beyond", "memory")
    await is_silent(reports, monitor, init_client)


async def test_a_file_mapped_from_its_tmpfs_counts_once(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int], tmp_path: Path
):
    code = TMPFS + "\nimport mmap\nm = mmap.mmap(os.open(sys.argv[1] + '/f', os.O_RDWR), 0)\n" + READ_IT
    pid = init_client(code, argv=OWN_MOUNTS, at=tmp_path)
    monitor.watch("a", pid=pid, memory_bytes=150 * MIB, tmpfs_paths=[str(tmp_path)])
    await is_silent(reports, monitor, init_client)


async def test_a_tmpfs_of_the_host_does_not_count(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int]
):
    file = Path("/dev/shm") / f"rollyard-test-{uuid.uuid4().hex}"
    try:
        file.write_bytes(b"x" * (100 * MIB))
        monitor.watch("a", pid=init_client(""), memory_bytes=64 * MIB, tmpfs_paths=["/dev/shm", "/"])
        await is_silent(reports, monitor, init_client)
    finally:
        file.unlink(missing_ok=True)


async def test_other_process_trees_are_not_counted(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int]
):
    hog = init_client(HEAP)
    monitor.watch("a", pid=init_client(""), memory_bytes=64 * MIB, processes=4)
    await is_silent(reports, monitor, init_client)
    assert hog


async def test_a_reused_pid_is_not_taken_for_the_init_process(init_client: Callable[..., int]):
    own_end, monitor_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own_end, monitor_end:
        monitor = monitor_program.ResourceMonitor(monitor_end)
        request = {"id": "a", "pid": init_client(HEAP), "memory_bytes": 1, "processes": None, "disk_bytes": None}
        watched = monitor_program.WatchedSandbox({**request, "disk_folders": [], "tmpfs_paths": [], "event_files": []})
        assert len(monitor.trees_of([watched])[0][1]) == 1
        watched.start_time -= 1
        assert monitor.trees_of([watched]) == []


def test_a_cycle_of_reused_pids_terminates():
    process_table = {7: usage.Process(8, 1, 1, 0), 8: usage.Process(7, 1, 1, 0), 9: usage.Process(5, 1, 1, 0)}
    assert usage.trees([5], process_table) == {5: [9]}


# --- processes ----------------------------------------------------------------------------------------

BOMB = (
    "import resource\n"
    "os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))\n"
    "resource.setrlimit(resource.RLIMIT_NPROC, (20, 20))\n"
    "while True:\n"
    "  try:\n"
    "    if os.fork() == 0: sys.stdin.read(); os._exit(0)\n"
    "  except BlockingIOError: break\n"
)


@as_root
async def test_a_lasting_fork_bomb_is_reported(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int]
):
    pid = init_client(BOMB, uid=2_000_000 + os.getpid())
    monitor.watch("within", pid=pid, processes=21)
    monitor.watch("beyond", pid=init_client(BOMB, uid=3_000_000 + os.getpid()), processes=20)
    assert await reports.limit() == ("beyond", "processes")
    assert reports.limits.empty()


async def test_threads_count_as_processes(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int]
):
    code = "import threading\nfor _ in range(9): threading.Thread(target=sys.stdin.read, daemon=True).start()"
    monitor.watch("a", pid=init_client(code), processes=10)
    assert await reports.limit() == ("a", "processes")


def test_a_short_peak_is_not_reported():
    request = {"id": "a", "pid": os.getpid(), "memory_bytes": None, "processes": 5, "disk_bytes": None}
    watched = monitor_program.WatchedSandbox({**request, "disk_folders": [], "tmpfs_paths": [], "event_files": []})
    looks = [(0.0, True), (2.9, True), (3.0, False), (3.2, True), (5.0, True), (6.1, True), (6.3, True)]
    assert [watched.is_full_for_long(is_full, now) for now, is_full in looks] == [False] * 6 + [True]
    few = monitor_program.WatchedSandbox({**request, "disk_folders": [], "tmpfs_paths": [], "event_files": []})
    assert [few.is_full_for_long(True, now) for now in (0.0, 10.0, 20.0)] == [False] * 3  # slow ticks count one by one


# --- disk ---------------------------------------------------------------------------------------------


def small_files(folder: Path) -> None:
    for number in range(600):
        (folder / str(number)).write_bytes(b"x" * 8192)


def deep_files(folder: Path) -> None:
    """Makes folders that are nested deeper than the longest path."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(2500):
        os.mkdir("deeper", dir_fd=here)
        inner = os.open("deeper", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    fd = os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here)
    os.write(fd, b"x" * (4 * MIB))
    os.close(fd)
    os.close(here)


def one_file(folder: Path) -> None:
    (folder / "file").write_bytes(b"x" * (4 * MIB))


@pytest.mark.parametrize("fill", [one_file, small_files, deep_files])
async def test_use_above_the_disk_limit_is_reported(
    fill: Callable[[Path], None],
    reports: MonitorReports,
    monitor: MonitorClient,
    init_client: Callable[..., int],
    tmp_path: Path,
):
    fill(tmp_path)
    pid = init_client("")
    monitor.watch("a", pid=pid, disk_bytes=2 * MIB, disk_folders=[tmp_path / "missing", tmp_path])
    assert await reports.limit() == ("a", "disk")
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


def sparse(folder: Path) -> None:
    with (folder / "file").open("wb") as file:
        file.truncate(1 << 40)


def links(folder: Path) -> None:
    (folder / "file").write_bytes(b"x" * MIB)
    for number in range(20):
        (folder / str(number)).hardlink_to(folder / "file")
    (folder / "out").symlink_to("/usr")


@pytest.mark.parametrize("fill", [sparse, links])
async def test_sparse_files_and_links_do_not_count(
    fill: Callable[[Path], None],
    reports: MonitorReports,
    monitor: MonitorClient,
    init_client: Callable[..., int],
    tmp_path: Path,
):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    fill(tmp_path / "a")
    one_file(tmp_path / "b")
    monitor.watch("a", pid=init_client(""), disk_bytes=2 * MIB, disk_folders=[tmp_path / "a"])
    monitor.watch("b", pid=init_client(""), disk_bytes=2 * MIB, disk_folders=[tmp_path / "b"])
    assert await reports.limit() == ("b", "disk")
    assert reports.limits.empty()


async def test_a_deleted_but_open_file_counts_as_disk(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int], disk_path: Path
):
    code = "f = open(sys.argv[1], 'wb'); f.write(b'x' * (8 << 20)); f.flush(); os.unlink(sys.argv[1])"
    in_memory = "fd = os.memfd_create('x'); os.write(fd, b'x' * (8 << 20))"
    (one := disk_path / "one").mkdir()
    (two := disk_path / "two").mkdir()
    monitor.watch("memory", pid=init_client(in_memory), disk_bytes=2 * MIB, disk_folders=[one])
    monitor.watch("disk", pid=init_client(code, at=two / "file"), disk_bytes=2 * MIB, disk_folders=[two])
    assert await reports.limit() == ("disk", "disk")
    assert reports.limits.empty()


async def test_a_disk_that_fills_later_is_reported(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int], tmp_path: Path
):
    monitor.watch("a", pid=init_client(""), disk_bytes=8 * MIB, disk_folders=[tmp_path])
    await is_silent(reports, monitor, init_client)  # its first walk is done and found nothing
    for number in range(32):
        (tmp_path / str(number)).write_bytes(b"x" * MIB)
    assert await reports.limit() == ("a", "disk")


def test_a_disk_is_walked_again_after_growth_or_a_while(tmp_path: Path):
    own_end, monitor_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own_end, monitor_end:
        monitor = monitor_program.ResourceMonitor(monitor_end)
        request = {"id": "a", "pid": 1, "memory_bytes": None, "processes": None, "disk_bytes": 16 * MIB}
        watched = monitor_program.WatchedSandbox(
            {**request, "disk_folders": ["x"], "tmpfs_paths": [], "event_files": []}
        )
        assert monitor.is_walk_due(watched, 100.0, {"x": (5 * MIB, 7)}) == (True, (5 * MIB, 7))
        watched.walked_at, watched.filled_at_walk = 100.0, (5 * MIB, 7)
        assert monitor.is_walk_due(watched, 129.0, {"x": (6 * MIB, 10**6)})[0] is False
        assert monitor.is_walk_due(watched, 130.0, {"x": (6 * MIB, 7)})[0] is True
        assert monitor.is_walk_due(watched, 101.0, {"x": (6 * MIB + 1, 7)})[0] is True
        assert monitor.is_walk_due(watched, 101.0, {"x": (2 * MIB, 7)})[0] is False  # others freed space,
        assert monitor.is_walk_due(watched, 101.0, {"x": (4 * MIB, 7)})[0] is True  # which does not hide new use
        watched.disk_bytes, watched.files, watched.filled_at_walk = None, 1600, (0, 50)
        assert monitor.is_walk_due(watched, 101.0, {"x": (1 << 50, 150)})[0] is False
        assert monitor.is_walk_due(watched, 101.0, {"x": (0, 151)})[0] is True


def empty_files(folder: Path) -> None:
    for number in range(300):
        (folder / str(number)).touch()


def empty_folders(folder: Path) -> None:
    for number in range(300):
        (folder / str(number)).mkdir()


def symbolic_links(folder: Path) -> None:
    for number in range(300):
        (folder / str(number)).symlink_to("/nowhere")


@pytest.mark.parametrize("fill", [empty_files, empty_folders, symbolic_links])
async def test_too_many_files_are_reported(
    fill: Callable[[Path], None],
    reports: MonitorReports,
    monitor: MonitorClient,
    init_client: Callable[..., int],
    tmp_path: Path,
):
    (tmp_path / "few").mkdir()
    links(tmp_path / "few")  # a file with many names counts once
    monitor.watch("few", pid=init_client(""), files=200, disk_folders=[tmp_path / "few"])
    (tmp_path / "many").mkdir()
    fill(tmp_path / "many")
    monitor.watch("many", pid=init_client(""), files=200, disk_folders=[tmp_path / "many"])
    assert await reports.limit() == ("many", "files")
    assert reports.limits.empty()


async def test_deleted_but_open_files_count_as_files(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int], disk_path: Path
):
    code = "held = [open(f'{sys.argv[1]}{n}', 'w') for n in range(300)]\nfor file in held: os.unlink(file.name)"
    monitor.watch("a", pid=init_client(code, at=disk_path / "file"), files=200, disk_folders=[disk_path])
    assert await reports.limit() == ("a", "files")


def walked(folder: Path, limit: int = 1 << 50) -> disk_walk.DiskWalk:
    walk = disk_walk.DiskWalk([str(folder)], limit, list, lambda _: set())
    while not walk.is_done:
        walk.continue_until(until=0.0)  # the smallest possible slices
    return walk


def test_a_walk_in_slices_counts_what_du_counts(tmp_path: Path):
    for fill in (small_files, links, one_file):
        for name in ("x", "y", "y/z"):
            folder = tmp_path / fill.__name__ / name
            folder.mkdir(parents=True)
            fill(folder)
    expected = subprocess.run(["du", "-s", "-B1", str(tmp_path)], capture_output=True, check=True).stdout.split()[0]
    walk = walked(tmp_path)
    assert walk.used_bytes == int(expected)
    inodes = subprocess.run(["du", "-s", "--inodes", str(tmp_path)], capture_output=True, check=True).stdout.split()[0]
    assert walk.used_files == int(inodes)


def test_a_walk_leaves_no_descriptor_open(tmp_path: Path):
    deep_files(tmp_path)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    walked(tmp_path)
    unfinished = disk_walk.DiskWalk([str(tmp_path)], 1 << 50, list, lambda _: set())
    unfinished.continue_until(until=0.0)
    assert not unfinished.is_done
    unfinished.stop()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


def test_a_walk_survives_concurrent_moves_and_removals(tmp_path: Path):
    small = tmp_path / "a" / "b"
    small.mkdir(parents=True)
    small_files(small)
    (tmp_path / "z").mkdir()
    one_file(tmp_path / "z")
    walk = disk_walk.DiskWalk([str(tmp_path)], 1 << 50, list, lambda _: set())
    walk.continue_until(until=0.0)
    small.rename(tmp_path / "elsewhere")
    walk.continue_until(until=0.0)
    subprocess.run(["rm", "-rf", str(tmp_path / "elsewhere")], check=True)
    walk.continue_until(until=time.monotonic() + 30)
    assert walk.is_done
    assert walk.used_bytes >= 4 * MIB  # the folder next to the moved one was counted


def as_another(code: str, folder: Path) -> bytes:
    """Runs Python code with `disk_walk` loaded, as an ordinary user, in a folder of that user. Returns its output."""
    before = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import disk_walk\n"
        "os.chdir(sys.argv[2]); os.chown('.', 54321, 54321); os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
        "walk = disk_walk.DiskWalk(['.'], 1 << 50, lambda: [], lambda _: set())\n"
    )
    argv = [sys.executable, "-I", "-S", "-c", before + code, str(Path(disk_walk.__file__).parent), str(folder)]
    return subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout


@as_root
def test_folders_that_deny_their_owner_access_are_counted(tmp_path: Path):
    modes = {tmp_path / "hidden": 0, tmp_path / "listed": 0o400, tmp_path / "passed": 0o100}
    for folder in modes:
        folder.mkdir()
        one_file(folder)
        os.chown(folder, 54321, 54321)
    for folder, mode in modes.items():
        folder.chmod(mode)
    assert int(as_another("walk.continue_until(1e18); print(walk.used_bytes)", tmp_path)) >= 12 * MIB
    assert {folder: folder.stat().st_mode & 0o777 for folder in modes} == modes


@as_root
def test_deeply_nested_forbidden_folders_count_as_an_attack(tmp_path: Path):
    """Each must stay open, so they would use up the monitor's descriptors."""
    code = (
        "top, ways = os.open('.', os.O_RDONLY), []\n"
        "for _ in range(600):\n"
        "  os.mkdir('d'); ways.append(os.open('d', os.O_RDONLY)); os.chdir('d')\n"
        "for way in reversed(ways): os.fchmod(way, 0); os.close(way)\n"
        "os.fchdir(top); walk.continue_until(1e18); print(walk.over, len(os.listdir('/proc/self/fd')) < 10)"
    )
    assert as_another(code, tmp_path).split() == [b"disk", b"True"]
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


# --- cgroups and the machine --------------------------------------------------------------------------


@pytest.fixture
def cgroups() -> Generator[Cgroups, None, None]:
    mechanism = Cgroups.find(f"test-{uuid.uuid4().hex[:8]}")
    if mechanism is None:
        pytest.skip("control groups are not available")
    yield mechanism
    mechanism.sweep()
    mechanism.close()


ENTER = "for path in sys.argv[1].split(','): open(path, 'w').write('0')\n"


async def test_an_oom_kill_in_its_cgroup_is_reported(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int], cgroups: Cgroups
):
    group = cgroups.make("sbx_1", 32 * MIB, None, None)
    monitor.watch("a", pid=init_client(""), event_files=group.event_files)
    init_client(
        "pid = os.fork()\nif pid == 0:\n  " + ENTER + "  " + HEAP + "\nos.waitpid(pid, 0)", at=group.procs_files[0]
    )
    async with asyncio.timeout(90):
        assert await reports.ooms.get() == ("a", 1)
    os.kill(monitor.pid or 0, signal.SIGKILL)
    await is_silent(reports, monitor, init_client)
    assert reports.ooms.empty()  # the new monitor reported the same kill again


async def test_a_group_that_stays_at_its_process_limit_is_reported(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int], cgroups: Cgroups
):
    group = cgroups.make("sbx_1", None, 6, None)
    code = ENTER + "\nfor _ in range(5):\n  if os.fork() == 0: sys.stdin.read(); os._exit(0)"
    pid = init_client(code, at=group.procs_files[0])
    monitor.watch("a", pid=pid, processes=6, event_files=group.event_files)
    assert await reports.limit() == ("a", "processes")


async def test_low_memory_of_the_machine_is_reported(reports: MonitorReports):
    monitor = reports.monitor(memory_reserve_bytes=1 << 60)
    try:
        async with asyncio.timeout(90):
            is_low, free = await reports.pressure.get()
        assert is_low
        assert 0 < free["memory_available_bytes"] < 1 << 60
    finally:
        await monitor.close()


@as_root
async def test_a_full_disk_of_the_machine_and_its_recovery_are_reported(reports: MonitorReports, tmp_path: Path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16M", "none", str(tmp_path)], check=True)
    monitor = reports.monitor(disk_reserve_bytes=8 * MIB, disk_path=tmp_path)
    try:
        one_file(tmp_path)  # 12 MB are left: not low yet
        (tmp_path / "more").write_bytes(b"x" * (8 * MIB))
        async with asyncio.timeout(90):
            is_low, free = await reports.pressure.get()
            assert is_low and free["disk_free_bytes"] < 8 * MIB
            (tmp_path / "more").unlink()
            assert (await reports.pressure.get())[0] is False
    finally:
        await monitor.close()
        subprocess.run(["umount", str(tmp_path)], check=True)


@as_root
async def test_a_lack_of_inodes_and_its_recovery_are_reported(reports: MonitorReports, tmp_path: Path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=400", "none", str(tmp_path)], check=True)
    monitor = reports.monitor(disk_reserve_files=200, disk_path=tmp_path)
    try:
        empty_files(tmp_path)
        async with asyncio.timeout(90):
            is_low, free = await reports.pressure.get()
            assert is_low and free["disk_free_files"] < 200 and free["disk_free_bytes"] > MIB
            for file in tmp_path.iterdir():
                file.unlink()
            assert (await reports.pressure.get())[0] is False
    finally:
        await monitor.close()
        subprocess.run(["umount", str(tmp_path)], check=True)


@as_root
async def test_a_recovery_during_a_restart_is_reported_by_the_next_monitor(reports: MonitorReports, tmp_path: Path):
    """Otherwise no sandbox would be started any more."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16M", "none", str(tmp_path)], check=True)
    monitor = reports.monitor(disk_reserve_bytes=8 * MIB, disk_path=tmp_path)
    try:
        (tmp_path / "more").write_bytes(b"x" * (12 * MIB))
        async with asyncio.timeout(90):
            assert (await reports.pressure.get())[0] is True
            assert monitor.pid is not None
            os.kill(monitor.pid, signal.SIGKILL)
            (tmp_path / "more").unlink()
            assert (await reports.pressure.get())[0] is False
    finally:
        await monitor.close()
        subprocess.run(["umount", str(tmp_path)], check=True)


# --- the program --------------------------------------------------------------------------------------


async def test_a_killed_monitor_is_replaced_and_gets_all_watches(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int], tmp_path: Path
):
    monitor.watch("a", pid=init_client(""), disk_bytes=4 * MIB, disk_folders=[tmp_path])
    await is_silent(reports, monitor, init_client)
    first = monitor.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    small_files(tmp_path)
    one_file(tmp_path)
    assert await reports.limit() == ("a", "disk")
    assert monitor.pid not in (None, first)


async def test_a_forgotten_sandbox_is_not_reported(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int]
):
    monitor.watch("a", pid=init_client(HEAP), memory_bytes=16 * MIB)
    monitor.forget("a")
    monitor.forget("a")
    await is_silent(reports, monitor, init_client)


async def test_a_watch_of_the_same_name_starts_again(
    reports: MonitorReports, monitor: MonitorClient, init_client: Callable[..., int]
):
    monitor.watch("a", pid=init_client(HEAP), memory_bytes=16 * MIB)
    assert await reports.limit() == ("a", "memory")
    monitor.watch("a", pid=init_client(HEAP), memory_bytes=16 * MIB)
    assert await reports.limit() == ("a", "memory")


async def test_close_leaves_no_process(reports: MonitorReports, init_client: Callable[..., int]):
    monitor = reports.monitor()
    monitor.watch("a", pid=init_client(""), memory_bytes=16 * MIB)
    pid = monitor.pid
    await monitor.close()
    await monitor.close()
    assert monitor.pid is None
    assert not Path(f"/proc/{pid}").exists()


def test_a_monitor_ends_with_its_service():
    own_end, monitor_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with monitor_end:
        argv = [sys.executable, "-I", "-S", monitor_program.__file__, str(monitor_end.fileno())]
        process = subprocess.Popen(argv, pass_fds=(monitor_end.fileno(),))
    own_end.close()
    assert process.wait(20) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize(("mode_meanwhile", "mode_after"), [(None, 0), (0o700, 0o700)])
def test_a_walk_restores_the_mode_of_a_folder_unless_another_program_has_changed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode_meanwhile: int | None, mode_after: int
) -> None:
    """A file job that copies a folder out makes it accessible, too. It failed while a walk was open."""
    folder = tmp_path / "closed"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    folder.chmod(0)
    monkeypatch.setattr(disk_walk.os, "geteuid", lambda: 12345)  # root can open everything
    walked = disk_walk.WalkedFolder.opened(str(folder), None)
    assert walked is not None and folder.stat().st_mode & 0o777 == 0o500
    if mode_meanwhile is not None:
        folder.chmod(mode_meanwhile)
    walked.close()
    assert folder.stat().st_mode & 0o777 == mode_after
