"""Locks between processes: exclusive or shared, released by the end of their process, and waited for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.core.locks import FileLock, is_abandoned, locked

HOLD = """
import sys
from pathlib import Path
from rollyard.core.locks import FileLock
lock = FileLock(Path(sys.argv[1]))
lock.acquire()
lock.write_holder()
print("held", flush=True)
sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_another_process_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as process, FileLock(path) as lock:
        assert not lock.try_acquire() and not lock.try_acquire(shared=True)
        assert lock.holder().startswith(f"pid {process.pid} on ")
        process.kill()
        process.wait(30)
        assert lock.try_acquire()


def test_waiting_is_reported_once_and_ends_with_the_holder(tmp_path: Path) -> None:
    path, waits = tmp_path / "lock", list[str]()
    with holder(path) as process:

        def on_wait() -> None:
            waits.append("waiting")
            process.kill()

        with locked(path, on_wait):
            assert waits == ["waiting"]
    with locked(path, lambda: waits.append("again")):
        assert waits == ["waiting"]


def test_shared_locks_exclude_only_an_exclusive_one(tmp_path: Path) -> None:
    with FileLock(tmp_path, is_folder=True) as one, FileLock(tmp_path, is_folder=True) as two:
        assert one.try_acquire(shared=True) and two.try_acquire(shared=True)
        assert not two.try_acquire()
        one.close()
        assert two.try_acquire()


def test_a_folder_that_is_gone_is_not_created_and_a_closed_lock_closes_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "gone", is_folder=True)
    assert not (tmp_path / "gone").exists()
    lock = FileLock(tmp_path / "lock")
    fd = lock.fd
    lock.close()
    other = os.open(os.devnull, os.O_RDONLY)
    assert other == fd
    lock.close()
    os.close(other)  # still open


def test_a_folder_is_abandoned_when_it_is_old_and_no_process_holds_its_lock(tmp_path: Path) -> None:
    assert not is_abandoned(tmp_path, older_than_s=3600.0)
    os.utime(tmp_path, (0, 0))
    assert is_abandoned(tmp_path, older_than_s=3600.0)
    with FileLock(tmp_path, is_folder=True) as lock:
        lock.acquire()
        assert not is_abandoned(tmp_path, older_than_s=3600.0)
    assert not is_abandoned(tmp_path / "gone", older_than_s=0.0)
