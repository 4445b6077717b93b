"""Checks of `rollyard doctor` for the machine: the kernel, its limits, and the programs that runtimes need.

The checks inside sandboxes (`inside.py`) are the proof; these explain failures, and warn of later problems.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rollyard.cli.doctor.check import DELEGATE, DoctorCheck

if TYPE_CHECKING:
    from rollyard.service.settings import Settings

GIB = 1 << 30
FDS_PER_SANDBOX = 8  # about 5 measured, and a shell's PTY
IDMAPPED_OVERLAYS = (5, 19)
USER_OVERLAYS = (5, 11)
_MAKERS = ("bwrap", "apptainer", "singularity")


def machine_checks(settings: Settings) -> Iterable[DoctorCheck]:
    live = settings.max_live or (settings.init_slots + settings.ready_slots + settings.run_slots + settings.eval_slots)
    yield _versions()
    yield _kernel(settings)
    yield _user(settings)
    yield _namespaces()
    yield _subuids()
    yield _fuse()
    yield _squashfuse()
    yield _cgroups()
    yield _descriptors(live)
    yield _ptys(live)
    yield _shm()
    yield _memory()


def _versions() -> DoctorCheck:
    from rollyard.core.version import __version__

    return DoctorCheck(
        "versions", "ok", f"rollyard {__version__}, Python {platform.python_version()}, Linux {platform.release()}"
    )


def kernel_version(release: str) -> tuple[int, int]:
    """Returns (5, 19) for "5.19.0-41-generic", and (0, 0) if it is not a kernel's release."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _kernel(settings: Settings) -> DoctorCheck:
    has, release = kernel_version(platform.release()), platform.release()
    if has < USER_OVERLAYS:
        return DoctorCheck(
            "kernel", "warn", f"{release} has no overlays in user namespaces", "update it to 5.11 or newer"
        )
    if has < IDMAPPED_OVERLAYS and os.geteuid() == 0 and settings.uid_range is not None:
        remedy = 'update it to 5.19 or newer, run the service as an ordinary user, or set sandbox_uids = ""'
        return DoctorCheck("kernel", "warn", f"{release} cannot give root's files to sandboxes of other users", remedy)
    return DoctorCheck("kernel", "ok", f"{release}: overlays in user namespaces, and idmapped ones")


def _user(settings: Settings) -> DoctorCheck:
    if os.geteuid() != 0:
        return DoctorCheck("user", "ok", f"uid {os.geteuid()}, not root")
    uids = settings.uid_range
    if uids is None:
        detail = "root, and sandbox_uids is empty: a sandbox's user is the host's uid 0, without any capability"
        return DoctorCheck(
            "user", "warn", detail, 'sandbox_uids = "200000-265535", or run the service as an ordinary user'
        )
    return DoctorCheck("user", "ok", f"root; each sandbox has its own uid, of {uids.start}-{uids.stop - 1}")


def _namespaces() -> DoctorCheck:
    """Required by all runtimes but `local`."""
    from rollyard.sandbox.runtimes.user_namespaces import restriction, sysctl

    name = "user namespaces"
    known = restriction()
    if known is not None:
        remedy = apparmor_remedy() if known.by == "apparmor" else known.command
        return DoctorCheck(name, "warn", known.what, remedy)
    most = sysctl("user/max_user_namespaces")
    return DoctorCheck(name, "ok", f"up to {most:,}" if most is not None else "not limited by sysctl")


def apparmor_remedy() -> str:
    """For Ubuntu since 23.10: a profile for each program that creates a namespace, this Python and the runtimes."""
    programs = [Path(sys.executable).resolve(), *(Path(path) for name in _MAKERS if (path := shutil.which(name)))]
    profiles = "".join(
        f"profile rollyard-{program.name} {program} flags=(unconfined) {{ userns, }}\\n" for program in programs
    )
    text = f"abi <abi/4.0>,\\ninclude <tunables/global>\\n{profiles}"
    return (
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (to keep it: in /etc/sysctl.d/60-rollyard.conf), or"
        f" profiles: printf '{text}' > /etc/apparmor.d/rollyard && apparmor_parser -r /etc/apparmor.d/rollyard"
    )


def _subuids() -> DoctorCheck:
    return DoctorCheck(
        "subordinate uids", "ok", "not needed: sandboxes have one user each (rootless podman needs its own)"
    )


def _fuse() -> DoctorCheck:
    """For SIF images."""
    device, remedy = Path("/dev/fuse"), "modprobe fuse && chmod 666 /dev/fuse (in Docker: --device /dev/fuse)"
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
        mode = device.stat().st_mode
    except OSError as error:
        return DoctorCheck("/dev/fuse", "warn", f"SIF images cannot be mounted: {error.strerror}", remedy)
    if os.geteuid() == 0 and stat.S_IMODE(mode) & 0o006 != 0o006:
        return DoctorCheck(
            "/dev/fuse", "warn", "only for root, but sandboxes do not run as root", "chmod 666 /dev/fuse"
        )
    return DoctorCheck("/dev/fuse", "ok", "can be opened: SIF images can be mounted")


def _squashfuse() -> DoctorCheck:
    places = "/usr/libexec/apptainer/bin:/usr/libexec/singularity/bin"
    path = f"{os.environ.get('PATH', os.defpath)}:{places}"
    program = shutil.which("squashfuse_ll", path=path) or shutil.which("squashfuse", path=path)
    if program is None:
        return DoctorCheck("squashfuse", "warn", "not found: SIF images need it", "apt-get install squashfuse")
    return DoctorCheck("squashfuse", "ok", program)


def _cgroups() -> DoctorCheck:
    """Checks which tree exists, and whether it is writable. Each runtime's `memory limit` checks what is enforced."""
    from rollyard.sandbox.limits.cgroup_files import own_folders

    own = own_folders("/proc")
    v2, v1 = own.get(""), own.get("memory")
    if v2 is not None and "memory" in _words(Path(v2[0], "cgroup.controllers")):
        if os.access(Path(v2[0], "cgroup.procs"), os.W_OK) and os.access(v2[0], os.W_OK):
            return DoctorCheck("cgroups", "ok", f"v2, delegated: {v2[0]}")
        return DoctorCheck("cgroups", "warn", f"v2, but {v2[0]} is not delegated", DELEGATE)
    if v1 is not None:
        if os.access(v1[0], os.W_OK):
            return DoctorCheck("cgroups", "ok", f"v1, writable: {v1[0]}")
        return DoctorCheck("cgroups", "warn", "v1, writable only for root: Rollyard monitors memory instead", DELEGATE)
    return DoctorCheck("cgroups", "warn", "none with a memory controller: Rollyard monitors memory instead", DELEGATE)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _descriptors(live: int) -> DoctorCheck:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = live * FDS_PER_SANDBOX + 1024
    if hard in (resource.RLIM_INFINITY, -1) or hard >= needed:
        return DoctorCheck("open files", "ok", f"{hard:,} for up to {live} live sandboxes")
    fits = max(1, (hard - 1024) // FDS_PER_SANDBOX)
    remedy = f"ulimit -Hn {needed} (systemd: LimitNOFILE={needed}), or set max_live to {fits}"
    return DoctorCheck("open files", "warn", f"{hard:,}, but {live} live sandboxes need {needed:,}", remedy)


def _ptys(live: int) -> DoctorCheck:
    from rollyard.sandbox.runtimes.user_namespaces import sysctl

    most, used = sysctl("kernel/pty/max"), sysctl("kernel/pty/nr") or 0
    if most is None or most - used >= live:
        return DoctorCheck("pseudo terminals", "ok", "not limited" if most is None else f"{most - used:,} free")
    detail = f"{most - used:,} free, but {live} live sandboxes need one each"
    return DoctorCheck("pseudo terminals", "warn", detail, f"sysctl -w kernel.pty.max={used + 2 * live}")


def _shm() -> DoctorCheck:
    """Commands are passed to sandboxes in files on tmpfs."""
    place = Path(os.environ.get("XDG_RUNTIME_DIR") or "/dev/shm")
    try:
        usage = os.statvfs(place)
    except OSError as error:
        return DoctorCheck(str(place), "warn", f"cannot be used: {error.strerror}", f"mount -t tmpfs tmpfs {place}")
    free = usage.f_bavail * usage.f_frsize
    if not os.access(place, os.W_OK):
        return DoctorCheck(str(place), "warn", "cannot be written to", f"chmod 1777 {place}")
    if free < 16 << 20:
        return DoctorCheck(
            str(place), "warn", f"{free >> 20} MiB free", "free some space, or in Docker: --shm-size 256m"
        )
    return DoctorCheck(str(place), "ok", f"{free / GIB:.1f} GiB free")


def _memory() -> DoctorCheck:
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    remedy = "" if available >= GIB else "stop other programs, or lower run_slots"
    return DoctorCheck("memory", "warn" if remedy else "ok", f"{available / GIB:.1f} GiB available", remedy)
