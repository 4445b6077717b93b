"""`rollyard doctor`: what this machine lacks, and how to mend it.

Each check tries the thing for real where it can. "fail" is what keeps the default runtime from working (exit 1);
"warn" is what will bite later: fewer sandboxes than the settings promise, little disk, a missing extra.
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollyard.cli._console import AsJson, note, plain, print_lines, run, show, table

if TYPE_CHECKING:
    from rollyard.service.settings import Settings

PROBE_S = 60.0
GIB = 1 << 30
FDS_PER_SANDBOX = 8  # measured about 5, and a shell's PTY
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `remedy` is empty where all is well."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


def doctor(
    file: Annotated[Path | None, typer.Option("--config", help="The TOML file to judge by.")] = None,
    as_json: AsJson = False,
) -> None:
    """Try what Rollyard needs of this machine; say what is wrong and how to mend it.

    Ends with 1 if the default runtime does not work here.
    """
    from rollyard.service.settings import load_settings

    settings = load_settings({}, os.environ, file).settings
    checks = [*run(runtime_checks(settings)), *machine_checks(settings)]
    if as_json:
        print_lines(asdict(check) for check in checks)
    else:
        made = table("check", "", "what was found", "what to do")
        for check in checks:
            made.add_row(
                check.name, f"[{_STYLES[check.state]}]{check.state}[/]", plain(check.detail), plain(check.remedy)
            )
        show(made)
    failed = sum(check.state == "fail" for check in checks)
    if failed:
        note(f"rollyard: runtime {settings.runtime} does not work on this machine — see what to do above")
        raise typer.Exit(1)


async def runtime_checks(settings: Settings) -> list[Check]:
    """Every runtime there is, tried with a real sandbox in a folder of its own."""
    from rollyard.sandbox import BubblewrapRuntime, LocalRuntime

    checks: list[Check] = []
    for kind in (BubblewrapRuntime, LocalRuntime):
        worst: Literal["warn", "fail"] = "fail" if kind.name == settings.runtime else "warn"
        found: Mapping[str, str]
        try:
            with tempfile.TemporaryDirectory(prefix="rollyard-doctor-") as folder:
                async with asyncio.timeout(PROBE_S), kind(root=Path(folder)) as runtime:
                    found = await runtime.probe()
        except TimeoutError:
            found = {"probe": f"it was not done in {PROBE_S:g} s"}
        except (OSError, RuntimeError) as error:
            found = {"probe": str(error)}
        use = (
            "default"
            if kind.name == settings.runtime
            else "allowed"
            if kind.name in settings.runtimes
            else "not allowed"
        )
        for feature, state in found.items():
            what, _, remedy = state.partition("; ")
            is_ok = state == "ok"
            # Images are an extra: a default runtime without them works.
            level = "ok" if is_ok else "warn" if feature == "overlay" else worst
            checks.append(Check(f"{kind.name}: {feature}", level, f"works ({use})" if is_ok else what, remedy))
    return checks


def machine_checks(settings: Settings) -> Iterable[Check]:
    live = settings.max_live or (settings.init_slots + settings.ready_slots + settings.run_slots + settings.eval_slots)
    yield _python()
    yield _user()
    yield _namespaces()
    yield _descriptors(live)
    yield _ptys(live)
    yield _shm()
    yield _disk(settings.data_dir)
    yield _memory()
    yield _tokenizers(settings)


def _python() -> Check:
    from rollyard import __version__

    return Check(
        "versions", "ok", f"rollyard {__version__}, Python {platform.python_version()}, Linux {platform.release()}"
    )


def _user() -> Check:
    if os.geteuid() != 0:
        return Check("user", "ok", "not root")
    found = "root: a sandbox's user is the host's uid 0, without any capability"
    return Check("user", "warn", found, "run the service as an ordinary user")


def _namespaces() -> Check:
    """What bubblewrap stands on. The runtime's own probe is the proof; this says why."""
    most = _sysctl("user/max_user_namespaces")
    restricted = _sysctl("kernel/apparmor_restrict_unprivileged_userns")
    clone = _sysctl("kernel/unprivileged_userns_clone")
    if most == 0:
        return Check("user namespaces", "warn", "there may be none", "sysctl -w user.max_user_namespaces=15000")
    if clone == 0 and os.geteuid() != 0:
        return Check("user namespaces", "warn", "only for root", "sysctl -w kernel.unprivileged_userns_clone=1")
    if restricted == 1 and os.geteuid() != 0:
        remedy = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or a profile for bwrap and this Python"
        return Check("user namespaces", "warn", "AppArmor restricts them", remedy)
    return Check("user namespaces", "ok", f"up to {most:,}" if most is not None else "not limited by sysctl")


def _descriptors(live: int) -> Check:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = live * FDS_PER_SANDBOX + 1024
    if hard in (resource.RLIM_INFINITY, -1) or hard >= needed:
        return Check("open files", "ok", f"{hard:,} for up to {live} live sandboxes")
    fits = max(1, (hard - 1024) // FDS_PER_SANDBOX)
    remedy = f"ulimit -Hn {needed} (systemd: LimitNOFILE={needed}), or set max_live to {fits}"
    return Check("open files", "warn", f"{hard:,}, but {live} live sandboxes want {needed:,}", remedy)


def _ptys(live: int) -> Check:
    most, used = _sysctl("kernel/pty/max"), _sysctl("kernel/pty/nr") or 0
    if most is None or most - used >= live:
        return Check("pseudo terminals", "ok", "not limited" if most is None else f"{most - used:,} free")
    detail = f"{most - used:,} free, one for each of {live} live sandboxes is wanted"
    return Check("pseudo terminals", "warn", detail, f"sysctl -w kernel.pty.max={used + 2 * live}")


def _shm() -> Check:
    """Commands are handed to sandboxes in files on tmpfs."""
    place = Path(os.environ.get("XDG_RUNTIME_DIR") or "/dev/shm")
    try:
        usage = os.statvfs(place)
    except OSError as error:
        return Check(str(place), "warn", f"cannot be used: {error.strerror}", f"mount -t tmpfs tmpfs {place}")
    free = usage.f_bavail * usage.f_frsize
    if not os.access(place, os.W_OK):
        return Check(str(place), "warn", "cannot be written to", f"chmod 1777 {place}")
    if free < 16 << 20:
        return Check(str(place), "warn", f"{free >> 20} MiB free", "make room, or in Docker: --shm-size 256m")
    return Check(str(place), "ok", f"{free / GIB:.1f} GiB free")


def _disk(data_dir: Path) -> Check:
    place = data_dir
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return Check("data_dir", "warn", f"{data_dir} cannot be written to", "set data_dir to a folder of yours")
    free = shutil.disk_usage(place).free
    remedy = "" if free >= 2 * GIB else "make room, or set data_dir to a larger disk"
    return Check("data_dir", "warn" if remedy else "ok", f"{data_dir}: {free / GIB:.1f} GiB free", remedy)


def _memory() -> Check:
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    remedy = "" if available >= GIB else "stop something, or lower run_slots"
    return Check("memory", "warn" if remedy else "ok", f"{available / GIB:.1f} GiB available", remedy)


def _tokenizers(settings: Settings) -> Check:
    """Those of the configured engines, and our own to show that loading works."""
    from rollyard.testing.tokenizer_files import tokenizer_dir
    from rollyard.tokens import Tokenizers

    loaded = Tokenizers()
    named = [engine.tokenizer for engine in settings.engines if engine.tokenizer]
    for source in (str(tokenizer_dir()), *named):
        try:
            loaded.load(source)
        except Exception as error:  # whatever a tokenizer's files can do to their reader
            detail = f"{source}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            return Check("tokenizers", "warn", detail, "give a folder with tokenizer.json (scripts/get-tokenizer)")
    return Check("tokenizers", "ok", f"loading works ({len(named)} of configured engines)")


def _sysctl(name: str) -> int | None:
    try:
        return int(Path("/proc/sys", name).read_text())
    except (OSError, ValueError):
        return None
