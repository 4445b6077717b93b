"""`rollyard doctor`: what this machine lacks, and how to mend it.

Each check tries the thing for real where it can: every runtime starts sandboxes, and what is promised of them is tried
from inside (`_doctor_inside.py`). "fail" is what keeps the default runtime from working, or from being safe (exit 1);
"warn" is what will bite later: a runtime that is not the default, fewer sandboxes than the settings promise, little
disk. It never raises: a check that breaks is a check that says so. It leaves nothing behind, and takes some seconds.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollyard.cli._console import AsJson, note, plain, print_lines, run, show, table
from rollyard.cli._doctor_check import DoctorCheck, State
from rollyard.cli._doctor_data import data_checks, nearest
from rollyard.cli._doctor_engines import engine_checks
from rollyard.cli._doctor_machine import machine_checks

if TYPE_CHECKING:
    from rollyard.sandbox.python import PortablePython
    from rollyard.service.settings import Settings

PROBE_S = 60.0
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
_TRIED_INSIDE = ("memory limit", "cpu limit", "uids")
"""Features that a runtime's own probe describes, and that are tried here."""


def doctor(
    file: Annotated[Path | None, typer.Option("--config", help="The TOML file to judge by.")] = None,
    as_json: AsJson = False,
) -> None:
    """Try what Rollyard needs of this machine; say what is wrong and how to mend it.

    Ends with 1 if the default runtime does not work here.
    """
    from rollyard.service.settings import load_settings

    settings = load_settings({}, os.environ, file).settings
    checks = [*run(runtime_checks(settings)), *_held(machine_checks, settings), *_held(data_checks, settings)]
    checks += run(_engines(settings))
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


def _held(look: Callable[[Settings], Iterable[DoctorCheck]], settings: Settings) -> list[DoctorCheck]:
    """What a look found, up to where it broke."""
    checks: list[DoctorCheck] = []
    try:
        checks.extend(look(settings))
    except Exception as error:
        checks.append(_broken(look.__name__.replace("_", " "), error, "warn"))
    return checks


async def _engines(settings: Settings) -> list[DoctorCheck]:
    try:
        return await engine_checks(settings)
    except Exception as error:
        return [_broken("engines", error, "warn")]


def _broken(name: str, error: BaseException, state: State) -> DoctorCheck:
    return DoctorCheck(name, state, f"the check broke: {type(error).__name__}: {error}", "report it, with this line")


async def runtime_checks(settings: Settings) -> list[DoctorCheck]:
    """Every runtime there is, in a folder where the service's own sandboxes would be."""
    from rollyard.service.runtimes import NAMES

    above = nearest(settings.data_dir)
    where = above if os.access(above, os.W_OK) else None  # the data_dir's own check says so
    with tempfile.TemporaryDirectory(prefix=".rollyard-doctor-", dir=where) as name:
        scratch = Path(name)
        python, checks = await _python(settings, scratch)
        # At once: most of each is waiting for processes.
        found = await asyncio.gather(*[_runtime(name, settings, scratch, python) for name in NAMES])
    return [check for group in found for check in group] + checks


async def _python(settings: Settings, scratch: Path) -> tuple[PortablePython | None, list[DoctorCheck]]:
    """The Python that is bound into sandboxes: the service's own copy, or one that is made to see that it can be."""
    from rollyard.sandbox.python import portable_python

    kept = settings.data_dir / "python"
    try:
        if kept.is_dir():
            (scratch / "python").symlink_to(kept.absolute())
        python = await asyncio.to_thread(portable_python, scratch / "python")
    except Exception as error:  # whatever the parts of this Python are like
        remedy = "use a Python of python.org, of your distribution or of uv, and install ldd (libc-bin)"
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
        checks.append(DoctorCheck(f"{name}: probe", worst, f"it was not done in {PROBE_S:g} s", "is the machine busy?"))
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
    """Adds to `checks` as it goes, so that what breaks late hides nothing."""
    from rollyard.cli._doctor_inside import look_inside
    from rollyard.core import RollyardError
    from rollyard.sandbox import OciRuntime
    from rollyard.sandbox.runtimes.oci import probe_image
    from rollyard.service.runtimes import make_runtime

    image = ""
    if name == "oci" and not settings.oci_image:
        image = str(await asyncio.to_thread(probe_image, scratch / "image") or "")
    tried = settings.model_copy(update={"data_dir": scratch, "oci_image": settings.oci_image or image})
    async with make_runtime(name, tried, scratch / name) as runtime:
        found = dict(await runtime.probe())
        is_looked_at = python is not None and runtime.is_isolated and found.get("start") == "ok"
        if is_looked_at:
            found = {feature: state for feature, state in found.items() if feature not in _TRIED_INSIDE}
        checks.extend(_probed(name, found, worst, use))
        try:
            if is_looked_at and python is not None:
                checks.extend(await look_inside(runtime, python, worst))
        except RollyardError as error:
            detail, _, remedy = error.detail.partition("; ")
            checks.append(DoctorCheck(f"{name}: inside", worst, detail, remedy or "see the lines above"))
        finally:
            if isinstance(runtime, OciRuntime) and image:
                await runtime.forget(image)


def _probed(name: str, found: Mapping[str, str], worst: State, use: str) -> Iterable[DoctorCheck]:
    """The runtime's own words: "ok", or what is wrong and how to mend it."""
    for feature, state in found.items():
        what, _, remedy = state.partition("; ")
        is_ok = state == "ok"
        # Images are an extra: a default runtime without them works.
        level: State = "ok" if is_ok else "warn" if feature == "overlay" else worst
        if not is_ok and not remedy:  # the program's own words, which we did not know
            remedy = f"try the program by hand, or set runtimes to others than {name}"
        yield DoctorCheck(f"{name}: {feature}", level, f"works ({use})" if is_ok else what, remedy)
