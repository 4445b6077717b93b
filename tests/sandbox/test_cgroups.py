"""Control groups of this machine's kernel with real processes in them; for v2, see `imitation`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollyard.core.failure import SandboxStartFailed
from rollyard.sandbox import BubblewrapRuntime, SandboxLimits, SandboxSpec
from rollyard.sandbox.limits import cgroup_files
from rollyard.sandbox.limits import cgroups as _cgroups
from rollyard.sandbox.limits.cgroups import Cgroups, Group
from rollyard.sandbox.limits.limiter import mark_of
from rollyard.testing.sandbox_conformance import eventually

MIB = 1 << 20


@pytest.fixture
def mark() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def cgroups(mark: str) -> Generator[Cgroups, None, None]:
    mechanism = Cgroups.find(mark)
    if mechanism is None:
        pytest.skip("control groups are not available: neither v2 delegated, nor by systemd, nor v1 as root")
    try:
        yield mechanism
    finally:
        mechanism.sweep()
        mechanism.close()


def run_in(group: Group, code: str, *, uid: int | None = None) -> int:
    """Runs Python code in a process that enters the group by itself, as the launcher's child does. Returns its
    status."""
    fds = group.open_procs()
    source = (
        "import os, sys\n"
        + (f"os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n" if uid else "")
        + "for fd in map(int, sys.argv[1].split(',')): os.write(fd, b'0')\n"
        + code
    )
    argv = [sys.executable, "-I", "-S", "-c", source, ",".join(map(str, fds))]
    try:
        completed = subprocess.run(argv, pass_fds=fds, capture_output=True, timeout=50)
    finally:
        for fd in fds:
            os.close(fd)
    return completed.returncode


@contextlib.contextmanager
def resident(group: Group) -> Generator[subprocess.Popen[bytes], None, None]:
    """Yields a process that has entered the group and stays until it is killed."""
    fds = group.open_procs()
    source = "import os, sys\nfor fd in map(int, sys.argv[1].split(',')): os.write(fd, b'0')\nprint(flush=True)\n"
    argv = [sys.executable, "-I", "-S", "-c", source + "sys.stdin.read()", ",".join(map(str, fds))]
    with subprocess.Popen(argv, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for fd in fds:
            os.close(fd)
        try:
            yield process
        finally:
            process.kill()


def folders_of(mark: str) -> list[str]:
    return _below("/sys/fs/cgroup", f"rollyard-{mark}")


def groups_in(mark: str) -> list[str]:
    return [path for folder in folders_of(mark) for path in _below(folder, "sbx_")]


def _below(top: str, start: str) -> list[str]:
    """Uses `os.walk`, which skips folders that are deleted meanwhile."""
    return [f"{at}/{name}" for at, names, _ in os.walk(top) for name in names if name.startswith(start)]


def test_a_mechanism_is_found_and_reports_what_it_enforces(cgroups: Cgroups):
    assert cgroups.means in ("cgroup v2", "systemd", "cgroup v1")
    assert {"memory", "processes"} <= cgroups.enforces <= {"memory", "processes", "cpus"}


def test_the_kernel_kills_a_process_above_the_memory_limit(cgroups: Cgroups):
    group = cgroups.make("sbx_memory", 64 * MIB, None, None)
    assert run_in(group, "x = b'x' * (16 << 20)") == 0
    assert group.events().oom_kills == 0
    assert run_in(group, "x = b'x' * (256 << 20)") == -signal.SIGKILL
    assert group.events().oom_kills == 1
    assert group.remove()


def test_an_oom_kill_caused_by_a_parent_group_counts_as_a_host_kill(cgroups: Cgroups):
    """As on a machine, or in a container, that is out of memory as a whole."""
    if cgroups.means != "cgroup v1":
        pytest.skip("a v2 group with a limit under test cannot contain the test's own process")
    above = cgroups.make("sbx_above", 64 * MIB, None, None)
    inner = Path(above.folders["memory"], "inner")
    inner.mkdir()
    group = Group({"memory": str(inner)}, is_v2=False)
    assert run_in(group, "x = b'x' * (256 << 20)") == -signal.SIGKILL
    assert (group.events().oom_kills, group.events().host_kills) == (0, 1)
    assert group.remove() and above.remove()


def test_memory_of_many_processes_is_counted_together(cgroups: Cgroups):
    group = cgroups.make("sbx_many", 96 * MIB, 64, None)
    child = "os.close(writer); x = b'x' * (32 << 20); os.read(reader, 1); os._exit(0)"  # stays until the parent ends
    run_in(group, f"reader, writer = os.pipe()\nfor _ in range(8):\n  if os.fork() == 0:\n    {child}\nos.wait()")
    assert group.events().oom_kills >= 1
    assert group.remove()


def test_memory_on_tmpfs_and_in_memfds_is_counted(cgroups: Cgroups):
    group = cgroups.make("sbx_memfd", 64 * MIB, None, None)
    code = "fd = os.memfd_create('x')\nfor _ in range(256): os.write(fd, b'x' * (1 << 20))"
    assert run_in(group, code) == -signal.SIGKILL
    assert group.events().oom_kills == 1
    assert group.remove()


def test_a_fork_bomb_stops_at_the_limit(cgroups: Cgroups):
    group = cgroups.make("sbx_forks", None, 20, None)
    code = (
        "n = 0\n"
        "try:\n"
        "  while n < 200:\n"
        "    if os.fork() == 0: sys.stdin.read(); os._exit(0)\n"
        "    n += 1\n"
        "except BlockingIOError: pass\n"
        "sys.exit(n)"
    )
    assert run_in(group, code) == 19
    assert group.events().processes_refused >= 1
    group.kill()
    assert group.remove()


def test_cpu_is_throttled(cgroups: Cgroups):
    if "cpus" not in cgroups.enforces:
        pytest.skip("the cpu controller is not delegated here")
    group = cgroups.make("sbx_cpu", None, None, 0.1)
    assert run_in(group, "import time\nwhile time.process_time() < 0.15: pass") == 0
    stat = (Path(group.folders["cpu"]) / "cpu.stat").read_text()
    assert int(dict(line.split() for line in stat.splitlines())["nr_throttled"]) > 0
    assert group.remove()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_unprivileged_process_enters_by_opened_descriptors_and_cannot_leave(cgroups: Cgroups):
    group = cgroups.make("sbx_uid", 64 * MIB, 20, None)
    outside = [str(Path(path).parent.parent / Path(path).name) for path in group.procs_files]
    code = (
        f"for path in {outside!r} + {group.procs_files!r}:\n"
        "  try: open(path, 'w').write('0')\n"
        "  except PermissionError: continue\n"
        "  sys.exit(5)\n"
        "x = b'x' * (256 << 20)"
    )
    assert run_in(group, code, uid=54321) == -signal.SIGKILL
    assert group.events().oom_kills == 1
    assert group.remove()


def test_swap_is_limited_too(cgroups: Cgroups):
    group = cgroups.make("sbx_swap", 64 * MIB, None, None)
    folder = Path(group.folders["memory"])
    total, swap = folder / "memory.memsw.limit_in_bytes", folder / "memory.swap.max"
    if total.exists():
        assert int(total.read_text()) == 64 * MIB
    elif swap.exists():
        assert int(swap.read_text()) == 0
    assert group.remove()


def test_only_requested_limits_create_groups(cgroups: Cgroups):
    group = cgroups.make("sbx_one", None, 20, None)
    assert set(group.folders) == {"pids"}
    assert group.events().memory_bytes == 0
    assert group.remove()
    assert cgroups.make("sbx_none", None, None, None).procs_files == []


def test_events_report_current_use(cgroups: Cgroups):
    group = cgroups.make("sbx_use", 256 * MIB, 20, None)
    with resident(group):
        events = group.events()
        assert events.processes == 1
        assert 0 < events.memory_bytes < 256 * MIB
    assert group.remove()


def test_a_group_with_a_process_is_not_removed_and_kill_ends_it(cgroups: Cgroups):
    group = cgroups.make("sbx_live", 256 * MIB, 20, None)
    with resident(group) as process:
        assert not group.remove(bound_s=0.01)
        group.kill()
        assert process.wait(10) == -signal.SIGKILL
    assert group.remove()
    assert group.remove()  # idempotent


def test_a_refused_limit_leaves_no_group(cgroups: Cgroups, mark: str):
    with pytest.raises(OSError):
        cgroups.make("sbx_bad", 64 * MIB, -5, None)
    assert [path for path in folders_of(mark) if "sbx_bad" in path] == []
    with pytest.raises(FileExistsError):
        cgroups.make("sbx_twice", 64 * MIB, 5, None)
        cgroups.make("sbx_twice", 64 * MIB, 5, None)


def test_the_sweep_removes_only_groups_of_an_earlier_process(cgroups: Cgroups, mark: str):
    other = Cgroups.find(f"{mark}-other")
    assert other is not None
    group, others = cgroups.make("sbx_left", 256 * MIB, 20, 1.0), other.make("sbx_left", 256 * MIB, 20, None)
    with resident(group) as process, resident(others) as stranger:
        again = Cgroups.find(mark)  # the service after a crash
        assert again is not None
        assert again.sweep() == len(set(group.folders.values()))
        assert process.wait(10) == -signal.SIGKILL
        assert stranger.poll() is None
    assert not any(Path(folder).exists() for folder in group.folders.values())
    assert others.remove()
    other.close()


def test_in_a_tree_too_large_to_search_own_and_shallow_groups_are_found(
    cgroups: Cgroups, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """On a host with thousands of groups, those of the killed service are still removed."""
    for tree in ("a", "z"):  # in any order of the folders, one of them comes first
        for number in range(30):
            (tmp_path / tree / "deep" / f"other-{number}").mkdir(parents=True)
    shallow, deep = tmp_path / "m" / "ours", tmp_path / "a" / "deep" / "other-1" / "ours"
    shallow.mkdir(parents=True)
    deep.mkdir()
    assert set(cgroup_files.folders_named(str(tmp_path), "ours")) == {str(shallow), str(deep)}
    assert not caplog.records
    monkeypatch.setattr(cgroup_files, "MAX_WALKED", 6)
    assert cgroup_files.folders_named(str(tmp_path), "ours") == [str(shallow)]
    assert "too many control groups" in caplog.text
    monkeypatch.setattr(cgroup_files, "MAX_WALKED", 0)
    group = cgroups.make("sbx_left", 256 * MIB, 20, None)
    again = Cgroups.find(mark)
    assert again is not None
    assert again.sweep() == len(set(group.folders.values()))


async def test_starts_that_are_cancelled_or_fail_leave_no_group(cgroups: Cgroups, tmp_path: Path):
    async with BubblewrapRuntime(root=tmp_path) as runtime:
        for delay_s in (0.0, 0.001, 0.002, 0.004, 0.006, 0.008, 0.012):
            starting = asyncio.ensure_future(runtime.start(SandboxSpec(), lease_s=60.0))
            await asyncio.sleep(delay_s)
            starting.cancel()
            await asyncio.wait([starting])
            if not starting.cancelled():
                await starting.result().kill()
        with pytest.raises(SandboxStartFailed):  # a value that the kernel refuses after half of the group is made
            await runtime.start(SandboxSpec(limits=SandboxLimits(processes=1 << 40)), lease_s=60.0)
        sandbox = await runtime.start(SandboxSpec(), lease_s=60.0)
        mark = mark_of(tmp_path)
        assert groups_in(mark)
        await sandbox.kill()
        await eventually(lambda: not groups_in(mark), "no group is left")
    assert not folders_of(mark)


def test_close_leaves_no_folder(mark: str):
    mechanism = Cgroups.find(mark)
    if mechanism is None:
        pytest.skip("control groups are not available")
    assert folders_of(mark) != []
    mechanism.close()
    assert folders_of(mark) == []


# --- v2 -----------------------------------------------------------------------------------------------


@dataclass
class Imitation:
    base: Path
    proc: str


@pytest.fixture
def imitation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Imitation]:
    """A folder tree that *imitates* a v2 hierarchy with plain files and the kernel's rules.

    New folders are filled, a PID is in one group at a time, and a group with processes gives no controllers down.
    It shows what is written where and in which order; it enforces no limit. A machine whose controllers are bound to v1
    (as CI's may be) cannot have real v2 limits, and no test may rebind them. Features that need no controller (clone
    into a group, cgroup.kill, removal) are tested on the real v2 tree below.
    """
    mount = tmp_path / "cgroup"
    names = ["cgroup.procs", "cgroup.subtree_control", "memory.max", "memory.swap.max", "pids.max", "cpu.max"]
    names += ["memory.events", "pids.events", "memory.current", "pids.current"]
    real_mkdir, real_rmdir, real_write = os.mkdir, os.rmdir, cgroup_files.write

    def mkdir(path: str | Path, mode: int = 0o777) -> None:
        real_mkdir(path, mode)
        if mount in Path(path).parents:
            above = Path(path).parent / "cgroup.subtree_control"
            (Path(path) / "cgroup.controllers").write_text(above.read_text() if above.exists() else "")
            for name in names:
                (Path(path) / name).touch()

    def rmdir(path: str | Path) -> None:
        if mount in Path(path).parents:
            if (Path(path) / "cgroup.procs").read_text() or any(entry.is_dir() for entry in Path(path).iterdir()):
                raise OSError(errno.EBUSY, "busy")
            for entry in Path(path).iterdir():
                entry.unlink()
        real_rmdir(path)

    def write(path: str, value: str, is_optional: bool = False) -> None:
        file = Path(path)
        if file.name == "cgroup.subtree_control":
            if (file.parent / "cgroup.procs").read_text():
                raise OSError(errno.EBUSY, "busy")
            file.write_text(f"{file.read_text()} {value.removeprefix('+')}")
        elif file.name == "cgroup.procs":
            for other in mount.rglob("cgroup.procs"):
                other.write_text("".join(f"{pid}\n" for pid in other.read_text().split() if pid != value))
            file.write_text(f"{file.read_text()}{value}\n")
        else:
            real_write(path, value, is_optional)

    def build(controllers: str, processes: str) -> Imitation:
        for target, name, double in ((os, "mkdir", mkdir), (os, "rmdir", rmdir), (cgroup_files, "write", write)):
            monkeypatch.setattr(target, name, double)
        base, proc = mount / "app.scope", tmp_path / "proc"
        base.mkdir(parents=True)
        (base / "cgroup.controllers").write_text(controllers)
        (base / "cgroup.procs").write_text(processes)
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "mountinfo").write_text(f"30 20 0:26 / {mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n")
        (proc / "self" / "cgroup").write_text("0::/app.scope\n")
        return Imitation(base, str(proc))

    return build


def test_imitated_v2_writes_every_limit(imitation: Callable[[str, str], Imitation]):
    tree = imitation("cpuset cpu io memory pids", "")
    mechanism = _cgroups.find_v2("m", proc=tree.proc)
    assert mechanism is not None
    assert (mechanism.means, mechanism.enforces) == ("cgroup v2", {"memory", "processes", "cpus"})
    group = mechanism.make("sbx_1", 64 * MIB, 20, 1.5)
    folder = tree.base / "rollyard-m" / "sbx_1"
    written = {name: (folder / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")}
    assert written.pop("cpu.max") == "150000 100000"
    assert written == {"memory.max": str(64 * MIB), "memory.swap.max": "0", "pids.max": "20"}
    assert group.procs_files == [str(folder / "cgroup.procs")]
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\noom_group_kill 0\n")
    (folder / "pids.events").write_text("max 3\n")
    (folder / "memory.current").write_text("4096\n")
    (folder / "pids.current").write_text("2\n")
    assert group.events() == _cgroups.GroupEvents(1, 0, 3, 4096, 2)
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 0\noom_kill 1\noom_group_kill 0\n")
    assert group.events() == _cgroups.GroupEvents(0, 1, 3, 4096, 2)
    assert group.remove()
    mechanism.close()
    assert not (tree.base / "rollyard-m").exists()


def test_imitated_v2_reports_missing_controllers(imitation: Callable[[str, str], Imitation]):
    mechanism = _cgroups.find_v2("m", proc=imitation("memory pids", "").proc)
    assert mechanism is not None
    assert mechanism.enforces == {"memory", "processes"}


def test_imitated_v2_without_the_needed_controllers_is_not_used(imitation: Callable[[str, str], Imitation]):
    assert _cgroups.find_v2("m", proc=imitation("hugetlb", "").proc) is None


def test_in_imitated_v2_the_process_and_its_children_move_to_a_leaf(imitation: Callable[[str, str], Imitation]):
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            tree = imitation("cpu memory pids", f"{os.getpid()}\n{child.pid}\n")
            assert _cgroups.find_v2("m", proc=tree.proc) is not None
            leaf = tree.base / _cgroups.LEAF
            assert (leaf / "cgroup.procs").read_text().split() == [str(os.getpid()), str(child.pid)]
            (Path(tree.proc) / "self" / "cgroup").write_text(f"0::/app.scope/{_cgroups.LEAF}\n")
            assert _cgroups.find_v2("second", proc=tree.proc) is not None  # another runtime, from within the leaf
            assert (tree.base / "rollyard-second").is_dir()
        finally:
            child.kill()


def test_imitated_v2_with_foreign_processes_is_left_unchanged(imitation: Callable[[str, str], Imitation]):
    tree = imitation("memory pids", f"1\n{os.getpid()}\n")  # init is not a child of this process
    assert _cgroups.find_v2("m", proc=tree.proc) is None
    assert (tree.base / "cgroup.procs").read_text().split() == ["1", str(os.getpid())]
    assert [entry.name for entry in tree.base.iterdir() if entry.is_dir()] == []


@pytest.fixture
def real_v2(mark: str) -> Generator[Path, None, None]:
    """A group of the real v2 tree, without controllers. Nothing else on the machine is changed."""
    own = cgroup_files.own_folders("/proc").get("")
    if own is None or not os.access(own[0], os.W_OK):
        pytest.skip("no v2 tree is mounted here, or it is not writable")
    folder = Path(own[0]) / f"rollyard-{mark}"
    folder.mkdir()
    try:
        yield folder
    finally:
        Group({"pids": str(folder)}, is_v2=True).kill()
        assert Group({"pids": str(folder)}, is_v2=True).remove()


def test_a_real_v2_group_is_entered_killed_and_removed(real_v2: Path):
    group = Group({"pids": str(real_v2)}, is_v2=True)
    with resident(group) as process:
        assert (real_v2 / "cgroup.procs").read_text().split() == [str(process.pid)]
        group.kill()
        assert process.wait(10) == -signal.SIGKILL


@pytest.mark.skipif(os.uname().machine != "x86_64" and os.uname().machine != "aarch64", reason="clone3's number")
def test_a_process_is_cloned_into_a_real_v2_group(real_v2: Path):
    """clone3 with CLONE_INTO_CGROUP and `open_folder` needs no move, and therefore no lock."""
    group = Group({"pids": str(real_v2)}, is_v2=True)
    folder = group.open_folder()
    code = (
        "import ctypes, os, struct, sys\n"
        "arguments = struct.pack('11Q', 0x200000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, int(sys.argv[1]))\n"
        "pid = ctypes.PyDLL(None).syscall(435, arguments, len(arguments))\n"
        "if pid == 0: os._exit(0 if sys.argv[2] in open('/proc/self/cgroup').read() else 3)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert folder is not None
    try:
        argv = [sys.executable, "-I", "-S", "-c", code, str(folder), real_v2.name]
        assert subprocess.run(argv, pass_fds=(folder,), timeout=20).returncode == 0
    finally:
        os.close(folder)


def test_systemd_is_not_used_without_a_v2_memory_controller(mark: str):
    """If v2 has no memory controller, a scope would limit nothing; without systemd, the call fails."""
    if os.path.exists("/run/systemd/system"):  # noqa: PTH110
        pytest.skip("systemd runs here: the call would move this process")
    assert _cgroups._find_by_systemd(mark) is None  # pyright: ignore[reportPrivateUsage]
