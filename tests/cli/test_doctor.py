"""`rollyard doctor` on a machine that lacks something: real sandboxes without one of their controls."""

import os
import subprocess
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.peer_drivers import CACHE
from bench.sandbox import _try
from rollyard.cli.commands.doctor import _guarded, runtime_checks
from rollyard.cli.doctor.check import DoctorCheck
from rollyard.cli.doctor.data import file_system, nearest, room
from rollyard.cli.doctor.inside import look_inside
from rollyard.cli.doctor.machine import apparmor_remedy, kernel_version, machine_checks
from rollyard.core import Json
from rollyard.core.failure import SandboxStartFailed
from rollyard.sandbox import BubblewrapRuntime
from rollyard.sandbox.limits.limiter import Limiter
from rollyard.sandbox.python import portable_python
from rollyard.service.settings import Settings

pytestmark = pytest.mark.slow

LINE = "29 1 8:1 / {point} rw,relatime - {kind} source rw\n"
ROOT = LINE.format(point="/", kind="ext4")


class Unfiltered(BubblewrapRuntime):
    """Behaves as on a kernel without seccomp."""

    @asynccontextmanager
    async def unfiltered(self) -> AsyncGenerator[BubblewrapRuntime, None]:
        async with self:
            self._refused = ""
            yield self


@dataclass(frozen=True)
class Findings:
    checks: dict[str, DoctorCheck]

    def bad(self) -> dict[str, str]:
        return {name.partition(": ")[2]: check.state for name, check in self.checks.items() if check.state != "ok"}


async def looked_at(runtime: BubblewrapRuntime) -> Findings:
    checks = await look_inside(runtime, portable_python(CACHE / "python"), "fail")
    findings = Findings({check.name: check for check in checks})
    assert all(check.remedy for check in checks if check.state != "ok")
    assert list(runtime.layer_root.iterdir()) == []
    return findings


async def test_a_missing_seccomp_filter_is_detected_inside_the_sandbox(tmp_path: Path):
    async with Unfiltered(root=tmp_path / "root").unfiltered() as runtime:
        findings = await looked_at(runtime)
    assert findings.bad()["seccomp"] == "fail"
    assert findings.checks["bubblewrap: nested namespaces"].state == "ok", "bwrap also forbids them"
    assert findings.checks["bubblewrap: network"].state == findings.checks["bubblewrap: doorway"].state == "ok"


async def test_limits_that_the_kernel_does_not_enforce_are_warned_of_with_a_remedy(tmp_path: Path):
    async with BubblewrapRuntime(root=tmp_path / "root", limiter=Limiter(has_cgroups=False)) as runtime:
        findings = await looked_at(runtime)
    assert findings.bad() == {"cpu limit": "warn", "memory limit": "warn"}
    memory = findings.checks["bubblewrap: memory limit"]
    assert "is ended by Rollyard's watchdog" in memory.detail
    assert "systemd-run --user --scope -p Delegate=yes" in memory.remedy
    assert "rlimit" in findings.checks["bubblewrap: processes limit"].detail
    assert findings.checks["bubblewrap: layers"].state == "ok"


@pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes of an ordinary user never run as root")
async def test_sandboxes_that_run_as_root_are_reported(tmp_path: Path):
    async with BubblewrapRuntime(root=tmp_path / "root", uids=None) as runtime:
        findings = await looked_at(runtime)
    assert findings.bad()["user"] == "fail"
    assert "sandbox_uids" in findings.checks["bubblewrap: user"].remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="about a service run as root")
def test_a_root_service_is_ok_if_its_sandboxes_do_not_run_as_root():
    (user,) = (check for check in machine_checks(Settings()) if check.name == "user")
    assert user.state == "ok" and "200000-265535" in user.detail
    (user,) = (check for check in machine_checks(Settings(sandbox_uids="")) if check.name == "user")
    assert user.state == "warn" and "sandbox_uids" in user.remedy


@pytest.mark.parametrize(
    ("kind", "state", "detail"),
    [("nfs4", "warn", "SQLite"), ("lustre", "warn", "SQLite"), ("overlay", "warn", "layers"), ("xfs", "ok", "xfs")],
)
def test_an_unsuitable_file_system_is_reported(tmp_path: Path, kind: str, state: str, detail: str):
    check = file_system(tmp_path / "not" / "there", ROOT + LINE.format(point=tmp_path, kind=kind))
    assert check.state == state and detail in check.detail and kind in check.detail
    assert bool(check.remedy) == (state != "ok")
    if check.remedy:
        assert "ROLLYARD_DATA_DIR=" in check.remedy


def test_a_missing_folder_is_checked_by_its_closest_parent(tmp_path: Path):
    assert nearest(tmp_path / "a" / "b") == tmp_path


@pytest.mark.parametrize(
    ("release", "version"),
    [("5.19.0-41-generic", (5, 19)), ("6.18.44-fc", (6, 18)), ("5.4.0", (5, 4)), ("odd", (0, 0))],
)
def test_kernel_versions_are_parsed(release: str, version: tuple[int, int]):
    assert kernel_version(release) == version


def test_the_remedy_for_apparmor_is_a_sysctl_or_a_profile():
    remedy = apparmor_remedy()
    assert "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0" in remedy
    assert "apparmor_parser -r /etc/apparmor.d/rollyard" in remedy and "userns," in remedy


def test_an_exception_in_a_check_is_reported_and_hides_no_other_check():
    def looks(settings: Settings) -> Iterator[DoctorCheck]:
        yield DoctorCheck("first", "ok", "fine")
        raise ZeroDivisionError("odd machine")

    first, broken = _guarded(looks, Settings())
    assert first.name == "first"
    assert broken.state == "warn" and "odd machine" in broken.detail and broken.remedy


async def test_an_exception_in_a_runtime_is_a_failure_only_for_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def broken(self: BubblewrapRuntime) -> None:
        raise ZeroDivisionError("odd runtime")

    monkeypatch.setattr(BubblewrapRuntime, "probe", broken)
    monkeypatch.setattr("rollyard.service.runtimes.NAMES", ("bubblewrap", "local"))
    data = tmp_path / "data"
    data.mkdir()
    (data / "python").symlink_to(CACHE / "python")  # built once for all tests, which takes seconds
    for name, state in (("bubblewrap", "fail"), ("local", "warn")):
        checks = await runtime_checks(Settings(data_dir=data, runtimes=(name,)))
        (probe,) = (check for check in checks if check.name.startswith("bubblewrap"))
        assert (probe.name, probe.state) == ("bubblewrap: probe", state)
        assert "odd runtime" in probe.detail
        assert any(check.name == "local: start" and check.state == "ok" for check in checks)
    assert [*tmp_path.iterdir(), *data.iterdir()] == [data, data / "python"], "nothing is left behind"


async def test_a_figure_that_cannot_be_measured_is_null_with_a_reason():
    async def lacking() -> dict[str, Json]:
        raise SandboxStartFailed("apptainer was not found")

    metrics: dict[str, Json] = {}
    await _try(metrics, "apptainer_dir_start_p50_ms", lacking)
    assert metrics["apptainer_dir_start_p50_ms"] is None
    assert "not found" in str(metrics["apptainer_dir_start_p50_ms_null"])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
@pytest.mark.parametrize(("inodes", "state"), [(400, "warn"), (200_000, "ok")])
def test_a_data_folder_with_few_inodes_is_warned_of(tmp_path: Path, inodes: int, state: str):
    options = f"size=3g,nr_inodes={inodes}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(tmp_path)], check=True)
    try:
        check = room(tmp_path / "data")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert check.state == state and "inodes free" in check.detail
    assert bool(check.remedy) == (state == "warn") and ("more inodes" in check.remedy) == (state == "warn")
