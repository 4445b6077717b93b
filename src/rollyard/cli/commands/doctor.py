"""`rollyard doctor`: reports what this machine lacks, and how to fix it.

Checks test the real thing where possible: every runtime starts sandboxes, and their guarantees are tested from inside
(`cli/doctor/inside.py`). "fail" means that the default runtime does not work, or is not safe (exit 1). "warn" is a
later problem: a runtime that is not the default, fewer sandboxes than the settings promise, little disk. It never
raises: an exception in a check is reported as its result. It leaves no files behind, and takes some seconds.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollyard.cli._console import AsJson, note, plain, print_lines, run, show, table
from rollyard.cli.doctor.check import DoctorCheck, State
from rollyard.cli.doctor.data import data_checks, nearest
from rollyard.cli.doctor.engines import engine_checks
from rollyard.cli.doctor.machine import machine_checks
from rollyard.cli.doctor.plugins import plugin_checks

if TYPE_CHECKING:
    from rollyard.sandbox.python import PortablePython
    from rollyard.service.settings import Settings

PROBE_S = 60.0
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
_TRIED_INSIDE = ("memory limit", "cpu limit", "uids")
"""Features that a runtime's own probe reports, and that are tested inside a sandbox instead."""


def doctor(
    file: Annotated[Path | None, typer.Option("--config", help="The TOML file with the settings.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check what Rollyard needs on this machine; report what is wrong and how to fix it.

    Exits with 1 if the default runtime does not work here.
    """
    from rollyard.service.settings import load_settings

    settings = load_settings({}, os.environ, file).settings
    checks = [*run(runtime_checks(settings)), *_guarded(machine_checks, settings), *_guarded(data_checks, settings)]
    checks += run(_awaited("plugins", plugin_checks(settings)))
    checks += run(_awaited("engines", engine_checks(settings)))
    if as_json:
        print_lines(asdict(check) for check in checks)
    else:
        grid = table("check", "", "finding", "remedy")
        for check in checks:
            grid.add_row(
                check.name, f"[{_STYLES[check.state]}]{check.state}[/]", plain(check.detail), plain(check.remedy)
            )
        show(grid)
    failed = sum(check.state == "fail" for check in checks)
    if failed:
        note(f"rollyard: runtime {settings.runtime} does not work on this machine — see the remedies above")
        raise typer.Exit(1)


def _guarded(look: Callable[[Settings], Iterable[DoctorCheck]], settings: Settings) -> list[DoctorCheck]:
    """Returns the checks of `look`, and if it raises, the exception as the last one."""
    checks: list[DoctorCheck] = []
    try:
        checks.extend(look(settings))
    except Exception as error:
        checks.append(_broken(look.__name__.replace("_", " "), error, "warn"))
    return checks


async def _awaited(name: str, look: Awaitable[list[DoctorCheck]]) -> list[DoctorCheck]:
    try:
        return await look
    except Exception as error:
        return [_broken(name, error, "warn")]


def _broken(name: str, error: BaseException, state: State) -> DoctorCheck:
    return DoctorCheck(name, state, f"the check failed: {type(error).__name__}: {error}", "report this line as a bug")


async def runtime_checks(settings: Settings) -> list[DoctorCheck]:
    """Checks every runtime, in a folder where the service would keep its sandboxes."""
    from rollyard.service.runtimes import NAMES

    above = nearest(settings.data_dir)
    where = above if os.access(above, os.W_OK) else None  # reported by the check of data_dir
    with tempfile.TemporaryDirectory(prefix=".rollyard-doctor-", dir=where) as name:
        scratch = Path(name)
        python, checks = await _python(settings, scratch)
        # Concurrently: each mostly waits for processes.
        groups = await asyncio.gather(*[_runtime(name, settings, scratch, python) for name in NAMES])
    return [check for group in groups for check in group] + checks


async def _python(settings: Settings, scratch: Path) -> tuple[PortablePython | None, list[DoctorCheck]]:
    """Returns the Python that is bound into sandboxes: the service's copy, or one that is built as a test."""
    from rollyard.sandbox.python import portable_python

    service_copy = settings.data_dir / "python"
    try:
        if service_copy.is_dir():
            (scratch / "python").symlink_to(service_copy.absolute())
        python = await asyncio.to_thread(portable_python, scratch / "python")
    except Exception as error:  # depends on how this Python was built
        remedy = "use a Python from python.org, your distribution or uv, and install ldd (libc-bin)"
        return None, [DoctorCheck("portable Python", "warn", f"cannot be built: {error}", remedy)]
    return python, [DoctorCheck("portable Python", "ok", "can be built: `ipython` works in any image")]


async def _runtime(name: str, settings: Settings, scratch: Path, python: PortablePython | None) -> list[DoctorCheck]:
    worst: State = "fail" if name == settings.runtime else "warn"
    use = "default" if name == settings.runtime else "allowed" if name in settings.runtimes else "not allowed"
    checks: list[DoctorCheck] = []
    try:
        async with asyncio.timeout(PROBE_S):
            await _try(name, settings, scratch, python, worst, use, checks)
    except TimeoutError:
        checks.append(
            DoctorCheck(
                f"{name}: probe", worst, f"it did not finish in {PROBE_S:g} s", "stop other programs and try again"
            )
        )
    except Exception as error:
        checks.append(_broken(f"{name}: probe", error, worst))
    return checks


async def _try(
    name: str,
    settings: Settings,
    scratch: Path,
    python: PortablePython | None,
    worst: State,
    use: str,
    checks: list[DoctorCheck],
) -> None:
    """Adds each result to `checks` at once, so that a later exception hides none."""
    from rollyard.cli.doctor.inside import look_inside
    from rollyard.core import RollyardError
    from rollyard.sandbox import OciRuntime
    from rollyard.sandbox.runtimes.oci import probe_image
    from rollyard.service.runtimes import make_runtime

    image = ""
    if name == "oci" and not settings.oci_image:
        image = str(await asyncio.to_thread(probe_image, scratch / "image") or "")
    tried = settings.model_copy(update={"data_dir": scratch, "oci_image": settings.oci_image or image})
    async with make_runtime(name, tried, scratch / name) as runtime:
        features = dict(await runtime.probe())
        is_looked_at = python is not None and runtime.is_isolated and features.get("start") == "ok"
        if is_looked_at:
            features = {feature: state for feature, state in features.items() if feature not in _TRIED_INSIDE}
        checks.extend(_probed(name, features, worst, use))
        try:
            if is_looked_at and python is not None:
                checks.extend(await look_inside(runtime, python, worst))
        except RollyardError as error:
            detail, _, remedy = error.detail.partition("; ")
            checks.append(DoctorCheck(f"{name}: inside", worst, detail, remedy or "see the lines above"))
        finally:
            if isinstance(runtime, OciRuntime) and image:
                await runtime.forget(image)


def _probed(name: str, features: Mapping[str, str], worst: State, use: str) -> Iterable[DoctorCheck]:
    """Converts the results of a runtime's own probe: "ok", or what is wrong and how to fix it."""
    for feature, state in features.items():
        what, _, remedy = state.partition("; ")
        is_ok = state == "ok"
        # Images are optional: a default runtime works without them.
        level: State = "ok" if is_ok else "warn" if feature == "overlay" else worst
        if not is_ok and not remedy:  # an unknown message of the program
            remedy = f"try the program by hand, or remove {name} from runtimes"
        yield DoctorCheck(f"{name}: {feature}", level, f"works ({use})" if is_ok else what, remedy)
